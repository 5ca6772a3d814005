"""The default drafter: own text and index together, each token with an estimated acceptance probability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.acceptance import DEFAULT_WEIGHTS, Calibration
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.suffix_kernel import propose_suffix
from ssd.drafting.workspace import Workspace, propose_by_snapshot
from ssd.retrieval.snapshot import Snapshot

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
        self._weights = self._calibration.applied_to(DEFAULT_WEIGHTS)
        self._workspace = Workspace()
        self._biases: dict[str, float] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; one kernel call per snapshot."""
        return propose_by_snapshot(requests, self._propose)

    def _propose(self, snapshot: Snapshot, requests: Sequence[DraftRequest]) -> list[Draft]:
        workspace = self._workspace
        contexts = workspace.fill(requests, snapshot, self._biases)
        propose_suffix(
            workspace.address,
            snapshot.address,
            len(contexts),
            self._max_length,
            self._min_length,
            self._threshold,
            self._weights,
        )
        return workspace.drafts(len(contexts), with_probabilities=True)

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
        self._weights = self._calibration.applied_to(DEFAULT_WEIGHTS)
        surprise = float(accepted.sum() - estimates[:tested].sum())
        self._biases[request_id] = min(_MAX_BIAS, max(-_MAX_BIAS, bias + _BIAS_STEP * surprise))

    def finish(self, request_id: str) -> None:
        """Forget a request: it has ended."""
        self._biases.pop(request_id, None)
        self._workspace.forget(request_id)

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        self.propose([DraftRequest("", np.zeros(2, np.int32), 2, None, 1)])
        self.finish("")
