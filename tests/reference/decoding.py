"""Slow twin of decoding recorded outputs: the drafter asked from Python, a step at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cache_builder.evaluation.costs import CostCurve
from cache_builder.evaluation.decoding import marginal_costs
from cache_builder.evaluation.log import RecordedOutput
from ssd.cost_model.throughput import FORGETTING
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftOutcome, DraftRequest, TokenCosts
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.retrieval.snapshot import Snapshot
from tests.reference.tree import path_of

Step = tuple[int, int, str]


class CurvePrice:
    """Draft what gives most in a pass and one like the recent ones together, where passes take what a curve says."""

    def __init__(self, curve: CostCurve, max_draft: int) -> None:
        self._costs = curve.costs_up_to(max_draft + 1)[1:]
        self._marginal_costs = marginal_costs(self._costs)
        self._sums = np.zeros(3)  # passes, tokens and seconds of late

    def _recent(self) -> tuple[float, float]:
        passes, tokens, seconds = self._sums.tolist()
        return (tokens / passes, seconds / passes) if passes else (0.0, 0.0)

    def prices(self) -> TokenCosts | None:
        tokens, seconds = self._recent()
        return np.array([more * (1.0 + tokens) / (self._costs[0] + seconds) for more in self._marginal_costs])

    def paying(self, draft: Draft) -> Draft:
        if draft.probabilities is None:
            return draft
        expected = np.append(1.0, 1.0 + np.cumsum(draft.path_probabilities()))
        tokens, seconds = self._recent()
        return draft.cut(int(np.argmax((expected + tokens) / (self._costs[: len(expected)] + seconds))))

    def learn(self, num_drafted: int, num_output: int) -> None:
        self._sums = FORGETTING * self._sums + [1.0, num_output, self._costs[num_drafted]]


class SlowDecoder:
    """`OutputDecoder`, in plain calls."""

    def __init__(self, curve: CostCurve, limit: int, *, tree: bool, sure: float) -> None:
        self._drafter = SuffixDrafter(recycling=False, use_sample_cache=False)
        self._pricing, self._limit, self._tree, self._sure = CurvePrice(curve, limit), limit, tree, sure

    def decode(self, row: RecordedOutput, snapshot: Snapshot | None) -> list[Step]:
        """(drafted, accepted, source) of every step."""
        text, position, steps = row.text(), len(row.context), list[Step]()
        while position < len(text):
            prices = self._pricing.prices()
            request = DraftRequest(
                "", text[:position], len(row.context), snapshot, self._limit, token_costs=prices, allow_tree=self._tree
            )
            draft = self._drafter.propose([request])[0]
            if not steps and (draft.probabilities is None or draft.probabilities[0] < self._sure):
                draft = EMPTY_DRAFT
            draft = self._pricing.paying(draft)
            truth, parents = text[position:].tolist(), draft.parents_of_all()
            branches = [path_of(parents, node) for node in range(len(draft.token_ids))]
            agreeing = [b for b in branches if draft.token_ids[b].tolist() == truth[: len(b)]]
            path = max(agreeing, key=len, default=[])
            if draft.parents is not None and path:
                draft = replace(draft, path=np.array(path, np.int32))
            self._drafter.observe([DraftOutcome("", draft, len(path))])
            self._pricing.learn(len(draft.token_ids), min(len(path) + 1, len(truth)))
            accepted = min(len(path), len(truth) - 1)
            steps.append((len(draft.token_ids), accepted, draft.source))
            position += accepted + 1
        self._drafter.finish("")
        return steps
