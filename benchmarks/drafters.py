"""Our drafters as a server runs them, decoding recorded requests over one cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from benchmarks.walk import Counts, Proposal, Steps, walk
from cache_builder.evaluation.costs import CostCurve
from cache_builder.evaluation.decoding import rising
from cache_builder.evaluation.log import Row, TokenIds
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.drafting import make_drafter
from ssd.drafting.protocol import Draft, Drafter, DraftRequest, Prices
from ssd.pricing.rate import Rate
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.snapshot import Snapshot


class CurvePrice:
    """Draft as `Rate` says, where passes take what a curve says."""

    def __init__(self, curve: CostCurve, max_draft: int) -> None:
        self._costs = curve.upto(max_draft + 1)[1:]
        self._more = rising(self._costs)
        self._rate = Rate()

    def prices(self) -> Prices | None:
        return np.array([self._rate.price(1, self._costs[0], more) for more in self._more])

    def paying(self, draft: Draft) -> Draft:
        if draft.probabilities is None:
            return draft
        expected = np.append(1.0, 1.0 + np.cumsum(draft.chances()))
        return draft.cut(self._rate.best(expected, self._costs[: len(expected)]))

    def learn(self, num_drafted: int, num_output: int) -> None:
        self._rate.observe(num_output, float(self._costs[num_drafted]))


_NO_FINGERPRINT = "0" * 32


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a drafter."""

    drafter: str
    name: str
    limit: int
    """Most tokens of a draft."""
    curve: CostCurve | None = None
    """The cost curve that sets the prices; ours only."""


class OurDrafters:
    """Our drafters, side by side over one index that does its upkeep at once: nothing depends on time."""

    def __init__(
        self,
        settings: Sequence[Setting],
        *,
        draft: DraftConfig,
        index: IndexConfig,
        tree: bool = False,
        drafters: Sequence[Drafter] | None = None,
    ) -> None:
        """``drafters`` : one for each setting, in place of those that the settings name."""
        self.settings = settings
        self._caches = CacheSet(CacheConfig(index=index), _NO_FINGERPRINT, inline=True)
        self._cache = self._caches.get()
        self._drafters = drafters or [make_drafter(setting.drafter, draft) for setting in settings]
        for drafter in self._drafters:
            getattr(drafter, "warm_up", lambda: None)()
        curves = [(setting.curve, setting.limit) for setting in settings]
        self._pricings = [None if curve is None else CurvePrice(curve, limit) for curve, limit in curves]
        self._tree = tree

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._caches.close()

    def replay(self, request_id: str, row: Row) -> list[Steps]:
        text = row.text()
        snapshot = self._cache.snapshot()
        askers = [  # they share text, not what they learn from its acceptance: each is as if it were alone
            _OurAsker(drafter, setting, pricing, self._tree, request_id, text, len(row.context), snapshot)
            for drafter, setting, pricing in zip(self._drafters, self.settings, self._pricings, strict=True)
        ]
        steps = walk(text.tolist(), len(row.context), askers)
        for drafter in self._drafters:
            drafter.finish(request_id)
        self._cache.append(text, prompt_length=len(row.context))
        self._cache.maintain()
        return steps

    def num_cached_tokens(self) -> int:
        return self._cache.snapshot().num_tokens

    def describe(self) -> dict[str, Any]:
        return {}


class _OurAsker:
    """One of our drafters on one request."""

    def __init__(
        self,
        drafter: Drafter,
        setting: Setting,
        pricing: CurvePrice | None,
        tree: bool,
        request_id: str,
        text: TokenIds,
        prompt_length: int,
        snapshot: Snapshot,
    ) -> None:
        self._drafter, self._setting, self._pricing, self._tree = drafter, setting, pricing, tree
        self._request_id, self._text, self._prompt_length, self._snapshot = request_id, text, prompt_length, snapshot
        self._draft: Draft | None = None
        self._num_left = 0

    def ask(self, position: int) -> Proposal:
        request = DraftRequest(
            self._request_id,
            self._text[:position],
            self._prompt_length,
            self._snapshot,
            self._setting.limit,
            prices=None if self._pricing is None else self._pricing.prices(),
            tree=self._tree,
        )
        began = time.perf_counter_ns()
        draft = self._drafter.propose([request])[0]
        took = time.perf_counter_ns() - began
        if len(draft.token_ids) > self._setting.limit:
            raise AssertionError(f"{self._setting.name} drafted {len(draft.token_ids)} tokens")
        if self._pricing is not None:
            draft = self._pricing.paying(draft)
        self._draft, self._num_left = draft, len(self._text) - position
        parents = None if draft.parents is None else draft.parents.tolist()
        return Proposal(took, draft.token_ids.tolist(), parents)

    def tell(self, num_accepted: int) -> None:
        assert self._draft is not None
        self._drafter.observe(self._request_id, self._draft, num_accepted)
        if self._pricing is not None:
            self._pricing.learn(len(self._draft.token_ids), min(num_accepted + 1, self._num_left))


def replay_stream(rows: Sequence[Row], replayer: Any) -> list[Counts]:
    """What each setting comes to on rows in their order. ``replayer`` : `OurDrafters`, or what is asked alike."""
    counts = [Counts() for _ in replayer.settings]
    for number, row in enumerate(rows):
        for one, steps in zip(counts, replayer.replay(str(number), row), strict=True):
            one.add(steps, len(row.output))
    for one in counts:
        one.num_cached_tokens = replayer.num_cached_tokens()
    return counts
