"""The segments of one namespace as files of its directory, as far as the directory takes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ssd.errors import CacheError
from ssd.retrieval.cache_state import CacheState
from ssd.retrieval.checkpoints import Checkpoint
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.learned_state import Copy, LearnedState
from ssd.retrieval.outage import Outage
from ssd.retrieval.segment import Segment

SAVE_LEARNED_S: Final = 60.0


class SegmentStore:
    """Writes segments, the manifest and what drafting learned; without a directory all stays in memory.

    What cannot be written is searched all the same, begins an outage, and is tried again (``write_again``). Used by
    maintenance: one thread at a time.
    """

    def __init__(
        self,
        state: CacheState,
        directory: SegmentDirectory | None,
        *,
        segments: Sequence[Segment],
        kept: Checkpoint | None,
        learned: LearnedState,
    ) -> None:
        """``segments``, ``kept`` : what the directory's manifest says now; the static ones stay in it for good."""
        self.directory = directory
        self.outage = Outage(state.name)
        self._state = state
        self._committed: tuple[tuple[Segment, ...], Checkpoint | None] = tuple(segments), kept
        # Of a directory that the builder began: neither evicted nor merged, and kept at every commit.
        self._own_static = tuple(segment for segment in segments if segment.start is None)
        self._parts: dict[str, tuple[Segment, ...]] = {}  # of a segment without a file: the files it came from
        self._learned = learned
        self._saved: Copy | None = None
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S

    @property
    def keeps_files(self) -> bool:
        """Whether there is a directory, and it outlives the process."""
        return self.directory is not None and self.directory.durable

    def has_file(self, segment: Segment) -> bool:
        """Whether the segment was written."""
        return self.directory is not None and self.directory.has_file(segment.segment_id)

    def path_of(self, segment: Segment) -> Path | None:
        """Where the segment's file lies, or would; None without a directory."""
        return None if self.directory is None else self.directory.path_of(segment.segment_id)

    def write(self, segment: Segment) -> Segment:
        """The segment as it was read from its new file; itself where it could not be written."""
        if self.directory is None:
            return segment
        try:
            return self.directory.write(segment)
        except (OSError, CacheError) as error:
            self._report_outage("a segment stays in memory", error)
            return segment

    def write_made_of(self, inputs: Sequence[Segment], segment: Segment) -> Segment:
        """``write``; where that fails the directory keeps the files of ``inputs``, which hold the same text."""
        written = self.write(segment)
        if self.directory is not None and not self.has_file(written):
            self._parts[written.segment_id] = tuple(file for each in inputs for file in self._files_of(each))
        return written

    def write_again(self) -> None:
        """Try again with segments that could not be written: there may be room by now."""
        if self.directory is None:
            return
        for segment in self._state.index.ring_born:
            if self.has_file(segment):
                continue
            written = self.write(segment)
            if written is segment:
                self.outage.put_off()
                return
            with self._state.lock:
                self._state.index.install_merged((segment,), written)

    def commit(self) -> None:
        """Bring the manifest up to date, with the newest checkpoint that holds. O(number of segments)."""
        if self.directory is None:
            return
        with self._state.lock:
            segments, next_position = self._state.index.ring_born, self._state.index.next_position
            kept = self._state.checkpoints.kept_at(self._first_not_in_files(segments))
        files = tuple(file for segment in segments for file in self._files_of(segment))
        self._parts = {s.segment_id: self._parts[s.segment_id] for s in segments if s.segment_id in self._parts}
        content = (*self._own_static, *files)
        if (content, kept) != self._committed:
            try:
                shared = None if kept is None else kept.to_json()
                self.directory.commit(content, next_position=next_position, shared=shared)
                self._committed = content, kept
            except OSError as error:
                self._report_outage("the manifest was not written", error)
                return
        if files == segments:
            self.outage.over()

    def save_learned(self, *, now: bool = False) -> None:
        """Write the newest copy of what drafting learned, every SAVE_LEARNED_S or ``now``; only where it is new."""
        if not now and time.monotonic() < self._save_learned_at:
            return
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S
        newest = self._learned.newest
        if self.directory is None or not self.keeps_files or newest is None or newest is self._saved:
            return
        try:
            self.directory.write_learned(newest.to_bytes())
            self._saved = newest
        except OSError as error:
            self._state.report_failure("what was learned beside the text was not written", error)

    def close(self) -> None:
        """Let go of the directory."""
        if self.directory is not None:
            self.directory.close()

    def _files_of(self, segment: Segment) -> tuple[Segment, ...]:
        """What of ``segment`` is in files, oldest first: itself, or some of what it was merged from."""
        return (segment,) if self.has_file(segment) else self._parts.get(segment.segment_id, ())

    def _first_not_in_files(self, segments: Sequence[Segment]) -> int:
        for segment in segments:
            position = segment.start
            for file in self._files_of(segment):
                position = file.stop if file.start == position else position
            if position is not None and position != segment.stop:
                return position
        return self._state.tail_start

    def _report_outage(self, what: str, error: Exception) -> None:
        self._state.num_failures += 1
        self.outage.failed(what, error)
