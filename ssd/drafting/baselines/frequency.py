"""The seed policy, kept as the baseline: the most frequent continuation of the longest match in the shared index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.baselines.frequency_kernel import make_continuations, propose_frequency
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.suffix.by_snapshot import propose_by_snapshot
from ssd.drafting.suffix.workspace import Workspace, checked_lengths
from ssd.retrieval.snapshot import Snapshot


class FrequencyDrafter:
    """Looks up the last ``max_match_length`` tokens down to ``min_match_length`` in the index, and nothing else.

    Of all places where the longest present one occurs, what followed most often, as long as the limit, is the draft;
    it is cut at the end of its sequence, and the most recent wins ties. Exact up to a few dozen occurrences; more are
    sampled evenly (segments) or the most recent taken (tail). Owned by one thread.
    """

    def __init__(self, *, max_match_length: int = 10, min_match_length: int = 1) -> None:
        self._max_length, self._min_length = checked_lengths(max_match_length, min_match_length)
        self._workspace = Workspace()
        self._continuations = make_continuations()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; one kernel call per snapshot."""
        return propose_by_snapshot(requests, self._propose)

    def _propose(self, snapshot: Snapshot, requests: Sequence[DraftRequest]) -> list[Draft]:
        workspace = self._workspace
        workspace.room_for(len(requests), snapshot)
        held = workspace.fill(requests, 0.0)
        propose_frequency(
            workspace.address,
            snapshot.address,
            len(requests),
            self._max_length,
            self._min_length,
            self._continuations,
        )
        del held
        return [workspace.draft(row) for row in range(len(requests))]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Nothing is learned from single drafts."""

    def finish(self, request_id: str) -> None:
        """Forget a request: it has ended."""
        self._workspace.forget(request_id)

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        self.propose([DraftRequest("", np.zeros(2, np.int32), 2, None, 1)])
