"""The segments of one namespace as files of its directory, as far as the directory takes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from ssd.errors import CacheError, SegmentCorrupt
from ssd.retrieval.cache_state import CacheState, Checkpoint
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.segment import Segment, checked_text
from ssd.retrieval.segment_file import open_segment

log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""What could not be written is tried again this often, beside what is sealed meanwhile."""


class Outage:
    """Whether the directory of one namespace takes what is written. Only maintenance uses it: one thread at a time.

    An outage begins with the first failure. It ends when everything is in files again, not with the first write that
    works: a disk that is nearly full takes small files all the time.
    """

    def __init__(self, name: str) -> None:
        self.is_on = False
        self._name = name
        self._retry_at = 0.0

    def failed(self, what: str, error: Exception) -> None:
        """Something could not be written."""
        if not self.is_on:
            self.is_on = True
            log.error(
                "cache namespace=%s: %s: %s. Requests are served as before; what is learned from now on is kept in "
                "memory and written once the directory can be written again, which is tried every %.0f s. Until then a "
                "restart loses it. Make room, or mount it writable",
                self._name, what, error, RETRY_S,
            )  # fmt: skip

    def over(self) -> None:
        """Everything is in files."""
        if self.is_on:
            self.is_on = False
            log.warning("cache namespace=%s: its directory can be written again, nothing is missing", self._name)

    def is_retry_due(self) -> bool:
        """Whether it is time to try again with what could not be written."""
        return time.monotonic() >= self._retry_at

    def put_off(self) -> None:
        """The retry failed: wait."""
        self._retry_at = time.monotonic() + RETRY_S


class Copy(Protocol):
    """What was learned up to some moment; never changed after it was published."""

    def to_bytes(self) -> bytes:
        """All of it, for ``LearnedState.stored`` of the next process. From any thread."""
        ...


class LearnedState:
    """Where a drafter publishes copies of what it learns about a namespace, and upkeep finds the newest to save.

    What is learned has one owner, the drafter that changes it at every step; only copies get here, each with one
    assignment. Where several drafters learn about one namespace, the copy published last is kept. The retrieval layer
    knows nothing of what they hold.

    ``stored`` : bytes that the directory kept from an earlier process, None when there are none. ``newest`` : the copy
    that was published last; None before the first.
    """

    def __init__(self, stored: bytes | None = None) -> None:
        self.stored = stored
        self.newest: Copy | None = None

    def adopt(self, stored: bytes) -> None:
        """Begin with ``stored``, of another process, where nothing is known and nobody has begun. O(1), any thread."""
        if self.stored is None and self.newest is None:
            self.stored = stored

    def to_bytes(self) -> bytes | None:
        """The newest there is; None where nothing was learned."""
        newest = self.newest
        return self.stored if newest is None else newest.to_bytes()

    def publish(self, copy: Copy) -> None:
        """Make ``copy`` the newest. O(1), from any thread."""
        self.newest = copy


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
