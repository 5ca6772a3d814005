"""The seed policy, kept as the baseline: the most frequent continuation of the longest match in the shared index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.batch import MAX_DRAFT, Batch, by_snapshot
from ssd.drafting.continuations import make_samples
from ssd.drafting.frequency_kernel import propose_frequency
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.retrieval.search import MAX_SCAN_HITS, address


class FrequencyDrafter:
    """Looks up the last ``max_match_length`` tokens down to ``min_match_length`` in the index, and nothing else.

    Of all places where the longest present one occurs, what followed most often, as long as the limit, is the draft;
    it is cut at the end of its sequence, and the most recent wins ties. Exact up to a few dozen occurrences; more are
    sampled evenly (segments) or the most recent taken (tail). Owned by one thread.
    """

    def __init__(self, *, max_match_length: int = 10, min_match_length: int = 1) -> None:
        self._max_length = max_match_length
        self._min_length = min_match_length
        self._batch = Batch()
        self._samples = make_samples(MAX_DRAFT)
        self._hits = np.empty((2, MAX_SCAN_HITS), np.int64)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; one kernel call per snapshot."""
        drafts = [EMPTY_DRAFT] * len(requests)
        batch = self._batch
        for snapshot, members in by_snapshot(requests):
            contexts = batch.fill([requests[i] for i in members])
            batch.room_for(snapshot)
            propose_frequency(
                snapshot.segment_table,
                address(snapshot.ring),
                len(snapshot.ring),
                snapshot.tail_start,
                snapshot.tail_stop,
                batch.rows[: len(contexts)],
                self._max_length,
                self._min_length,
                self._hits,
                batch.intervals,
                self._samples,
                batch.tokens,
                batch.results,
            )
            for row, i in enumerate(members):
                drafts[i] = batch.draft(row)
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Nothing is learned from single drafts."""

    def finish(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        self.propose([DraftRequest("", np.zeros(2, np.int32), 2, None, 1)])
