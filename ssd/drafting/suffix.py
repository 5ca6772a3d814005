"""The default drafter: own text and index together, each token with an estimated acceptance probability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.acceptance import DEFAULT_WEIGHTS, Calibration
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.suffix_kernel import propose_suffix, propose_suffix_one
from ssd.drafting.workspace import NO_SNAPSHOT, Workspace, contiguous, propose_by_snapshot
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
    128 places are looked at per request, see ``evidence.gather``.
    """

    def __init__(self, *, max_match_length: int = 32, min_match_length: int = 1, threshold: float = 0.1) -> None:
        self._calibration = Calibration()
        weights = self._calibration.applied_to(DEFAULT_WEIGHTS)
        self._settings = max_match_length, max(1, min_match_length), threshold, weights
        self._workspace = Workspace()
        self._biases: dict[str, float] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; one kernel call per snapshot."""
        if len(requests) == 1:
            return [self._propose_one(requests[0])]
        return propose_by_snapshot(requests, self._propose)

    def _propose_one(self, request: DraftRequest) -> Draft:
        workspace, request_id, snapshot = self._workspace, request.request_id, request.snapshot or NO_SNAPSHOT
        workspace.room_for(1, snapshot)
        context, bias = contiguous(request.context), self._biases.get(request_id, 0.0)
        state, is_new = workspace.state_of(request_id)
        propose_suffix_one(
            workspace.address, snapshot.address, context, request.limit, bias, state, is_new, *self._settings
        )
        return workspace.draft(0, with_probabilities=True)

    def _propose(self, snapshot: Snapshot, requests: Sequence[DraftRequest]) -> list[Draft]:
        workspace, count = self._workspace, len(requests)
        workspace.room_for(count, snapshot)
        contexts = workspace.fill(requests, self._biases)
        propose_suffix(workspace.address, snapshot.address, len(contexts), *self._settings)
        return [workspace.draft(row, with_probabilities=True) for row in range(count)]

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
        self._settings = *self._settings[:3], self._calibration.applied_to(DEFAULT_WEIGHTS)
        surprise = float(accepted.sum() - estimates[:tested].sum())
        self._biases[request_id] = min(_MAX_BIAS, max(-_MAX_BIAS, bias + _BIAS_STEP * surprise))

    def finish(self, request_id: str) -> None:
        """Forget a request: it has ended."""
        self._biases.pop(request_id, None)
        self._workspace.forget(request_id)

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        request = DraftRequest("", np.zeros(2, np.int32), 2, None, 1)
        self.propose([request])
        self.propose([request, request])
        self.finish("")
