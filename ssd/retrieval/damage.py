"""Segments whose bytes are no longer what they were when they were checked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ssd.errors import CacheError, SegmentCorrupt
from ssd.retrieval.cache_state import CacheState
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.segment import Segment, checked_text
from ssd.retrieval.segment_file import open_segment
from ssd.retrieval.segment_store import SegmentStore

log = logging.getLogger(__name__)


class Damage:
    """Reads such segments again where their files still hold what they did, and else has them searched no more.

    Used by maintenance: one thread at a time.
    """

    def __init__(self, state: CacheState, store: SegmentStore, *, fingerprint: str, budget: CopyBudget | None) -> None:
        """``budget`` : what private copies may take."""
        self._state = state
        self._store = store
        self._fingerprint = fingerprint
        self._budget = budget

    def mend_changed(self) -> None:
        """Those whose file was written to or cut while it is mapped. O(number of segments)."""
        for segment in self._state.index.own:  # what is borrowed is its owner's
            if segment.shared is not None and segment.shared.has_changed():
                path = segment.shared.path
                self._reopen(segment, path, SegmentCorrupt(f"{path} was changed while it was in use"))

    def mend(self, segments: Sequence[Segment], error: Exception) -> None:
        """Those of ``segments`` whose text does not fit its checksum; ``error`` says how that was noticed. O(text)."""
        for segment in segments:
            try:
                checked_text(segment)
            except SegmentCorrupt:
                self._reopen(segment, self._store.path_of(segment), error)

    def _reopen(self, segment: Segment, path: Path | None, error: Exception) -> None:
        state, mended = self._state, None
        if path is not None:
            try:
                again = open_segment(path, fingerprint=self._fingerprint, budget=self._budget)
                if (again.checksum, again.segment_id) == (segment.checksum, segment.segment_id):
                    mended = again  # touched, or written with what it held before
            except (CacheError, OSError) as failure:
                error = failure
        with state.lock:
            if mended is not None:
                state.index.exchange(segment, mended)
                return
            state.index.leave_out([segment])
        state.num_damaged += 1
        state.num_failures += 1
        log.error(
            "cache namespace=%s: segment %s, %d tokens, is no longer searched: %s",
            state.name, segment.segment_id, len(segment), error,
        )  # fmt: skip
