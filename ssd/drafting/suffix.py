"""The default drafter: own text and index together, each token with an estimated acceptance probability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.acceptance import DEFAULT_WEIGHTS, Calibration
from ssd.drafting.batch import MAX_DRAFT, Batch, by_snapshot
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.drafting.suffix_kernel import make_scratch, propose_suffix
from ssd.retrieval.search import address

_BIAS_STEP = 0.15
_MAX_BIAS = 2.0
_RELAXATION = 0.995  # a request that drafts nothing learns nothing: it tries again after a while


class SuffixDrafter:
    """Drafts a chain of most probable tokens from the request's own text, the index's tail and its segments.

    Each source is looked up at up to ``max_match_length`` tokens and at a few shorter lengths. Step by step the level
    whose favourite next token has the highest estimated acceptance gives the token, and samples that disagree drop
    out. The draft ends where the product of the estimates, the chance that the whole draft is accepted, falls below
    ``threshold``. Drafts that do better or worse than estimated move the estimates: a little those of all requests,
    more those of the request that had them. Deterministic given its calls. Owned by one thread. Bounded work: at most
    192 occurrences are looked at per match length.
    """

    def __init__(self, *, max_match_length: int = 32, min_match_length: int = 1, threshold: float = 0.1) -> None:
        self._max_length = max_match_length
        self._min_length = min_match_length
        self._threshold = threshold
        self._calibration = Calibration()
        self._batch = Batch()
        self._scratch = make_scratch(MAX_DRAFT)
        self._biases: dict[str, float] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; one kernel call per snapshot."""
        drafts = [EMPTY_DRAFT] * len(requests)
        weights = self._calibration.applied_to(DEFAULT_WEIGHTS)
        batch = self._batch
        for snapshot, members in by_snapshot(requests):
            contexts = batch.fill([requests[i] for i in members])
            for row, i in enumerate(members):
                batch.biases[row] = self._biases.get(requests[i].request_id, 0.0)
            batch.room_for(snapshot)
            propose_suffix(
                snapshot.segment_table,
                address(snapshot.ring),
                len(snapshot.ring),
                snapshot.tail_start,
                snapshot.tail_stop,
                batch.rows[: len(contexts)],
                batch.biases,
                self._max_length,
                self._min_length,
                self._threshold,
                weights,
                batch.intervals,
                self._scratch,
                batch.tokens,
                batch.probabilities,
                batch.results,
            )
            for row, i in enumerate(members):
                drafts[i] = draft = batch.draft(row)
                if len(draft.token_ids):
                    draft.probabilities = batch.probabilities[row, : len(draft.token_ids)].copy()
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Learn from what was accepted: the calibration of all estimates, and this request's own bias.

        One gradient step of the log loss. Tokens after the first rejected one were never tested and teach nothing.
        """
        estimates = draft.probabilities
        bias = self._biases.get(request_id, 0.0)
        if estimates is None or not len(estimates):
            self._biases[request_id] = bias * _RELAXATION
            return
        tested = min(len(estimates), num_accepted + 1)
        accepted = np.arange(tested) < num_accepted
        self._calibration.learn(estimates[:tested], accepted, bias)
        surprise = float(accepted.sum() - estimates[:tested].sum())
        self._biases[request_id] = min(_MAX_BIAS, max(-_MAX_BIAS, bias + _BIAS_STEP * surprise))

    def finish(self, request_id: str) -> None:
        """Forget a request: it has ended."""
        self._biases.pop(request_id, None)

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        self.propose([DraftRequest("", np.zeros(2, np.int32), 2, None, 1)])
        self.finish("")
