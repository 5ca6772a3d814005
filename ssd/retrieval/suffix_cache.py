"""The retrieval cache of one namespace."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ssd.config import IndexConfig
from ssd.errors import CacheError, SegmentCorrupt
from ssd.retrieval.directory import DirectoryReader, SegmentDirectory
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.learned_state import Copy, LearnedState
from ssd.retrieval.marks import KeptMark, Mark, PendingMarks
from ssd.retrieval.merge_worker import MergeWorker
from ssd.retrieval.names import is_kept, new_segment_id
from ssd.retrieval.outage import Outage
from ssd.retrieval.prefixes import PrefixFilter
from ssd.retrieval.put_off import PutOff
from ssd.retrieval.rebuild_process import MergeJob
from ssd.retrieval.segment_file import open_segment
from ssd.retrieval.snapshot import Segment, Snapshot, checked_text, concatenate
from ssd.retrieval.static import load_static_directory
from ssd.retrieval.suffix_array import build_segment
from ssd.retrieval.usage import NO_WINDOWS, WINDOW_TOKENS, used_text, windows

log = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]
TokenIds = Sequence[int] | npt.NDArray[np.integer]


class Pieces(list[Tokens]):
    """The pieces of one append, in order: int32[n] each, no separators.

    ``position`` : of the first one's first token in the ring. The others follow, each after one separator.
    """

    def __init__(self, pieces: Iterable[Tokens], position: int) -> None:
        super().__init__(pieces)
        self.position = position


Listener = Callable[[Pieces], None]

_MERGED_IN_PROCESS = 1 << 14  # tokens; sorting so few costs less than asking the worker
_MANY_SEGMENTS = 64  # beyond so many, nothing waits for the worker: what it is not at is merged here
_MOST_SEGMENTS = 256  # beyond so many, when merges fail, a tail is sealed only once it fills half the ring
_RING_BYTES_PER_TOKEN = 7  # of a segment that holds text of the ring
_ROOM_WAIT_S = 1.0
_KEEP_LEARNED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters of one namespace since it was opened; sizes are those of now. Tokens include separators."""

    num_tokens: int
    """Ring-born tokens that can be matched, at most the capacity."""
    num_kept_tokens: int
    """Of those, what stays for having been of use, though it is older than text that was evicted."""
    num_static_tokens: int
    num_tail_tokens: int
    num_segments: int
    generation: int
    num_appended_tokens: int
    """Tokens given to append and append_shared."""
    num_skipped_tokens: int
    """Of those, prompt tokens that were stored already."""
    num_sealed: int
    num_merged: int
    num_failed_merges: int
    """Merges that could be done neither by the rebuild process nor here; each is tried again later."""
    num_damaged_segments: int
    """Segments given up because their bytes changed while they were in use."""
    num_evicted_segments: int
    num_evicted_tokens: int
    num_dropped_tokens: int
    """Tokens lost because sealing could not keep up."""
    num_failures: int
    """Refused appends, failed listeners, files that could not be read or written, failed merges."""


@dataclass(frozen=True, slots=True)
class _RunningMerge:
    inputs: tuple[Segment, ...]
    segment_id: str
    future: Future[None]


class SuffixCache:
    """What one namespace has learned. Made by ``CacheSet``, which also calls ``maintain`` unless it is inline.

    Appending and reading are safe from any thread and never wait for sorting or files::

        _lock               index, filter, counters           held for microseconds
        _maintenance_lock   sealing, merging, the directory   held while files are written; taken before _lock
    """

    def __init__(
        self,
        name: str,
        config: IndexConfig,
        *,
        fingerprint: str,
        directory: DirectoryReader | None = None,
        budget: CopyBudget | None = None,
        worker: MergeWorker | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """``directory`` : what it holds is searched, and where it is a SegmentDirectory, segments become files there;
        None keeps them in memory. ``budget`` : what private copies of static segments may take. ``worker`` : merges
        files; ``wake`` : called when there is maintenance to do, None when the owner calls ``maintain`` by itself.
        """
        self.name = name
        self._fingerprint = fingerprint
        self._budget = budget
        self._seal_tokens = config.seal_tokens
        self._keeps_used = config.eviction == "used"
        self._ring_bytes = config.capacity_tokens * _RING_BYTES_PER_TOKEN
        self._directory = directory if isinstance(directory, SegmentDirectory) else None
        self._worker = worker
        self._wake = wake
        self._lock = threading.Lock()
        self._maintenance_lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._listeners: tuple[Listener, ...] = ()
        self._merge: _RunningMerge | None = None
        self._put_off = PutOff()
        self._num_appended = self._num_skipped = self._num_sealed = self._num_merged = self._num_failures = 0
        self._num_failed_merges = self._num_damaged = 0
        self._complained: set[str] = set()
        self._outage = Outage(name)
        self._closing = False
        self._closed = False

        self.kept_mark: KeptMark | None = None
        """What the directory said when it was opened: the last mark whose text had all reached files, and the ring
        position before which everything had. None without a directory and where no mark was ever given."""

        segments: list[Segment] = []
        next_position = 0
        if directory is not None:
            segments, failures = directory.load()
            next_position = directory.manifest.next_position
            self.kept_mark = KeptMark.from_json(directory.manifest.shared)
            for failure in failures:
                self.report_failure("a segment was left out", failure)
        self._committed = tuple(segments), self.kept_mark
        # Of a directory that the builder began: neither evicted nor merged, and kept at every commit.
        self._own_static = tuple(segment for segment in segments if segment.start is None)
        self._marks = PendingMarks(self.kept_mark)
        self._parts: dict[str, tuple[Segment, ...]] = {}  # of a merged segment without a file: the files it came from
        self.learned = LearnedState(self._read_learned(directory))
        """What drafting learns beside the text; the directory keeps the copy published last."""
        self._kept_learned: Copy | None = None
        self._keep_learned_at = time.monotonic() + _KEEP_LEARNED_S
        ring_born = [segment for segment in segments if segment.start is not None]
        self._index = SuffixIndex(config, ring_born, next_position)
        self._index.add_static(self._own_static)
        self._filter = PrefixFilter(config.dedup_block_tokens, config.lead_in_tokens)

    def snapshot(self) -> Snapshot:
        """What can be searched now, the last append included. O(1)."""
        return self._index.snapshot()

    # Learning

    def append(self, token_ids: TokenIds, *, prompt_length: int = 0) -> None:
        """Store a finished sequence, prompt then completion. O(n); never raises and never waits for sorting or files.

        ``token_ids`` : ids >= 0, end-of-text included. Of its first ``prompt_length`` tokens, the leading blocks stored
        before are not stored again. What cannot be stored is counted as a failure.
        """
        try:
            tokens = _checked(token_ids)
            output = tokens[max(0, prompt_length - WINDOW_TOKENS + 1) :]
            said = windows(output) if self._keeps_used else None
            with self._lock:
                if said is not None:
                    self._index.note_said(said)
                pieces = self._filter.pieces(tokens, prompt_length, self._index.next_position)
                stored = self._store(pieces)
                self._num_appended += len(tokens)
                self._num_skipped += len(tokens) - sum(map(len, pieces))
        except Exception as error:  # a cache must not fail a request
            self.report_failure("a sequence was not stored", error)
            return
        self._wake_if_due()
        for listener in self._listeners if stored else ():
            try:
                listener(stored)
            except Exception as error:
                self.report_failure("a listener failed", error)

    def append_shared(self, token_ids: TokenIds, *, mark: Mark | None = None) -> None:
        """Store a piece another replica stored, as it is; listeners do not hear of it. Never raises. O(n).

        ``mark`` : as for ``set_mark``, with this piece as the last one given.

        Waits, at most a second, while the ring is half full of unsealed tokens: a replica that reads a long log must
        not outrun the sealing. Once the cache is being closed there is none, and no wait. Not for the request path.
        """
        try:
            tokens = _checked(token_ids)
            with self._room:
                if self._wake is not None:
                    self._room.wait_for(lambda: self._closing or self._index.has_room(), _ROOM_WAIT_S)
                self._store([tokens])
                self._num_appended += len(tokens)
                if mark is not None:
                    self._set_mark(mark)
        except Exception as error:
            self.report_failure("a shared piece was not stored", error)
            return
        self._wake_if_due()

    def set_mark(self, mark: Mark) -> None:
        """``mark`` says how far the caller is in its source. Given back as ``kept_mark`` after a restart.

        The directory keeps the newest mark at which everything stored so far, by anyone, is in files: what a crash
        loses is always after it. The mark must be JSON and small, it is written with every manifest. Text in a file
        that turns out to be unreadable is missing all the same, and so is text dropped because sealing could not keep
        up. A segment that could not be written holds the mark back: what came after it may be given again. O(1).
        """
        with self._lock:
            self._set_mark(mark)

    def _set_mark(self, mark: Mark) -> None:
        if self._directory is not None:
            self._marks.set(mark, self._index.next_position, self._tail_start)

    def add_listener(self, listener: Listener) -> None:
        """Call ``listener`` with the pieces of every ``append`` that stored any, on its thread."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def add_static_directory(self, path: Path) -> None:
        """Search the segments of a directory made by ``ssd-cache build`` too; they are never evicted.

        Raises CacheError: SegmentCorrupt, FormatVersion, TokenizerMismatch, StoreUnavailable.
        """
        # Text of the ring comes and goes in copies: there must be room for it.
        segments = load_static_directory(
            path, fingerprint=self._fingerprint, budget=self._budget, leaving=self._ring_bytes
        )
        with self._lock:
            self._index.add_static(segments)

    def remove_static(self, segment_id: str) -> bool:
        """Stop searching one static segment. Returns whether it was there."""
        with self._lock:
            return self._index.remove_static(segment_id)

    def _store(self, pieces: list[Tokens]) -> Pieces:
        num_dropped, position = self._index.num_dropped_tokens, self._index.next_position
        stored = Pieces((part for piece in pieces for part in self._index.append(piece)), position)
        # Positions say nothing about text dropped from the middle, so then every block is forgotten.
        has_dropped = self._index.num_dropped_tokens > num_dropped
        self._filter.forget_before(self._index.next_position if has_dropped else self._index.recent_position)
        return stored

    def _wake_if_due(self) -> None:
        if self._wake is not None and self._index.num_tail_tokens >= self._seal_tokens:
            self._wake()

    # Maintenance

    def maintain(self, *, seal_all: bool = False, wait: bool = True) -> None:
        """Seal what is due, merge what is due, bring the directory up to date.

        ``seal_all`` : seal the tail however short it is. ``wait`` : also finish merges that the worker does; without,
        they are started here and taken over by a later call.
        """
        with self._maintenance_lock:
            if self._closed:
                return
            try:
                if wait or not self._is_crowded(_MOST_SEGMENTS) or not self._index.has_room():
                    self._seal(1 if seal_all else self._seal_tokens)
                self._give_up_changed()
                self._keep_used()
                self._run_merges(wait)
                if self._outage.is_retry_due() or (seal_all and wait):
                    self._write_again()
            finally:
                self._commit()
            if time.monotonic() >= self._keep_learned_at:
                self._keep_learned()

    def flush(self) -> None:
        """Seal the whole tail, wait for all merges, try again with what could not be written."""
        self.maintain(seal_all=True)

    def begin_close(self) -> None:
        """Have maintenance that runs on another thread end with the segment it is at. ``close`` must follow."""
        with self._room:
            self._closing = True
            self._room.notify_all()

    def close(self) -> None:
        """Seal the tail and let go of the directory. Appends still work afterwards, in memory only.

        Bounded while others append: what they store after the call is not waited for. Sorts a tail at most, and writes
        it and what could not be written before.
        """
        self.begin_close()
        with self._maintenance_lock:
            if self._closed:
                return
            if self._directory is None or self._directory.durable:
                self._seal(1)
                self._keep_used()
                self._write_again()
            self._closed = True
            self._commit()
            self._keep_learned()
            if self._directory is not None:
                self._directory.close()

    def _seal(self, min_tokens: int) -> None:
        """Seal what the tail holds now, while that is at least ``min_tokens``; what comes meanwhile waits."""
        stop = self._index.next_position
        while True:
            with self._lock:
                is_due = self._tail_start < stop and self._index.num_tail_tokens >= min_tokens
                due = self._index.tail_to_seal() if is_due else None
            if due is None:
                return
            start, tokens = due
            segment = self._to_file(build_segment(tokens, start=start, segment_id=new_segment_id(start)))
            with self._room:
                self._index.install_sealed(segment)
                self._num_sealed += 1
                self._room.notify_all()

    def _keep_used(self) -> None:
        """Bring back what was of use of the segments that have left."""
        while True:
            with self._lock:
                due = self._index.leaving()
            if due is None:
                return
            left, used = due
            kept, gone, found = None, NO_WINDOWS, NO_WINDOWS
            try:
                tokens = concatenate((left,))
                kept = self._kept_of(left, used_text(tokens, left.start or 0, used))
                gone = windows(tokens)
                found = gone if kept is None else windows(kept.tokens)
            except Exception as error:  # its file was changed, or there is no memory: it is gone, as before
                self.report_failure("text that was of use was not kept", error)
            with self._room:
                self._index.install_kept(left, kept, gone, found)
                self._room.notify_all()

    def _kept_of(self, left: Segment, text: Tokens) -> Segment | None:
        if not len(text):
            return None
        assert left.start is not None
        segment_id = new_segment_id(left.start, kept=True)
        kept = self._to_file(build_segment(text, start=left.start, segment_id=segment_id))
        if self._directory is not None and not self._directory.has_file(kept.segment_id):
            self._parts[kept.segment_id] = self._files_of(left)  # it is in there, with the rest
        return kept

    def _is_crowded(self, num_segments: int) -> bool:
        return len(self._index.ring_born) > num_segments

    def _run_merges(self, wait: bool) -> None:
        while not self._closing:
            if self._merge is not None and (wait or self._merge.future.done()):
                merge, self._merge = self._merge, None
                self._take_over(merge)
                continue
            if self._merge is not None and not self._is_crowded(_MANY_SEGMENTS):
                return
            with self._lock:
                inputs = self._index.merge_plan(self._not_to_be_merged())
            if inputs is None:
                return
            running = self._submit(inputs) if self._merge is None else None
            if running is not None:
                self._merge = running
            else:
                self._merge_here(inputs)

    def _not_to_be_merged(self) -> frozenset[str]:
        running = () if self._merge is None else self._merge.inputs
        return self._put_off.waiting(self._index.ring_born) | {segment.segment_id for segment in running}

    def _submit(self, inputs: tuple[Segment, ...]) -> _RunningMerge | None:
        """Have the worker merge, if there is one, the work is worth it and all inputs are files."""
        directory, worker = self._directory, self._worker
        if directory is None or worker is None or sum(map(len, inputs)) <= _MERGED_IN_PROCESS:
            return None
        if not all(directory.has_file(segment.segment_id) for segment in inputs):
            return None
        start = inputs[0].start
        assert start is not None
        segment_id = _merged_id(inputs)
        job = MergeJob(
            inputs=tuple(str(directory.path_of(segment.segment_id)) for segment in inputs),
            output=str(directory.path_of(segment_id)),
            segment_id=segment_id,
            start=start,
            fingerprint=self._fingerprint,
            namespace=self.name,
            num_tokens=sum(map(len, inputs)),
            durable=directory.durable,
        )
        future = worker.submit(job)
        if self._wake is not None:
            wake = self._wake
            future.add_done_callback(lambda _: wake())
        return _RunningMerge(inputs, segment_id, future)

    def _take_over(self, merge: _RunningMerge) -> None:
        """Install what the worker merged, or else merge here; nothing when the cache is being closed."""
        assert self._directory is not None
        try:
            merge.future.result()
            merged = self._directory.adopt(merge.segment_id)
        except (CacheError, OSError) as error:
            if self._closing:
                return
            self._merge_here(merge.inputs)
            if self._outage.is_on:
                self._num_failures += 1  # the directory takes nothing, from the worker as little as from here
            else:
                self.report_failure("a merge by the rebuild process failed", error)
        else:
            self._install(merge.inputs, merged)

    def _merge_here(self, inputs: Sequence[Segment]) -> None:
        """Merge in this process and install it; what fails is counted and left alone for a while."""
        start = inputs[0].start
        try:
            merged = self._to_file(build_segment(concatenate(inputs), start=start, segment_id=_merged_id(inputs)))
        except SegmentCorrupt as error:
            self._replace_damaged(inputs, error)
            return
        except Exception as error:  # no memory, most probably
            self._put_off.failed(inputs)
            self._num_failed_merges += 1
            self.report_failure("a merge failed, it is tried again later and its text stays in small segments", error)
            return
        if self._directory is not None and not self._directory.has_file(merged.segment_id):
            # It could not be written: the directory keeps what it was merged from.
            self._parts[merged.segment_id] = tuple(file for segment in inputs for file in self._files_of(segment))
        self._install(inputs, merged)

    def _replace_damaged(self, segments: Sequence[Segment], error: Exception) -> None:
        """Those of ``segments`` whose text is not what it was, by what their files hold; or by nothing."""
        for segment in segments:
            try:
                checked_text(segment)
            except SegmentCorrupt:
                path = None if self._directory is None else self._directory.path_of(segment.segment_id)
                self._reopen_or_leave_out(segment, path, error)

    def _give_up_changed(self) -> None:
        """Search no segment any more whose file was written to or cut while it is mapped."""
        for segment in self._index.snapshot().segments:
            if segment.shared is not None and segment.shared.has_changed():
                path = segment.shared.path
                self._reopen_or_leave_out(segment, path, SegmentCorrupt(f"{path} was changed while it was in use"))

    def _reopen_or_leave_out(self, segment: Segment, path: Path | None, error: Exception) -> None:
        mended = None
        if path is not None:
            try:
                again = open_segment(path, fingerprint=self._fingerprint, budget=self._budget)
                if (again.checksum, again.segment_id) == (segment.checksum, segment.segment_id):
                    mended = again  # touched, or written with what it held before
            except (CacheError, OSError) as failure:
                error = failure
        with self._lock:
            if mended is not None:
                self._index.exchange(segment, mended)
                return
            self._index.leave_out([segment])
        self._num_damaged += 1
        self._num_failures += 1
        log.error(
            "cache namespace=%s: segment %s, %d tokens, is no longer searched: %s",
            self.name, segment.segment_id, len(segment), error,
        )  # fmt: skip

    def _install(self, inputs: Sequence[Segment], merged: Segment) -> None:
        found = windows(merged.tokens) if self._keeps_used and is_kept(merged.segment_id) else None
        with self._lock:
            if self._index.install_merged(inputs, merged, found):
                self._num_merged += 1

    def _to_file(self, segment: Segment) -> Segment:
        if self._directory is None:
            return segment
        try:
            return self._directory.write(segment)
        except (OSError, CacheError) as error:
            self._report_outage("a segment stays in memory", error)
            return segment

    def _write_again(self) -> None:
        """Try again with segments that could not be written: there may be room by now."""
        if self._directory is None:
            return
        for segment in self._index.ring_born:
            if self._directory.has_file(segment.segment_id):
                continue
            written = self._to_file(segment)
            if written is segment:
                self._outage.put_off()
                return
            with self._lock:
                self._index.install_merged((segment,), written)

    def _commit(self) -> None:
        if self._directory is None:
            return
        with self._lock:
            segments, next_position = self._index.ring_born, self._index.next_position
            kept = self._marks.kept_at(self._first_not_in_files(segments))
        files = tuple(file for segment in segments for file in self._files_of(segment))
        self._parts = {s.segment_id: self._parts[s.segment_id] for s in segments if s.segment_id in self._parts}
        content = (*self._own_static, *files)
        if (content, kept) != self._committed:
            try:
                shared = None if kept is None else kept.to_json()
                self._directory.commit(content, next_position=next_position, shared=shared)
                self._committed = content, kept
            except OSError as error:
                self._report_outage("the manifest was not written", error)
                return
        if files == segments:
            self._outage.over()

    def _read_learned(self, directory: DirectoryReader | None) -> bytes | None:
        if directory is None:
            return None
        try:
            return directory.read_learned()
        except OSError as error:
            self.report_failure("what was learned beside the text was not read", error)
            return None

    def _keep_learned(self) -> None:
        self._keep_learned_at = time.monotonic() + _KEEP_LEARNED_S
        if self._directory is None or not self._directory.durable:
            return
        try:
            newest = self.learned.newest
            if newest is not None and newest is not self._kept_learned:
                self._directory.write_learned(newest.to_bytes())
                self._kept_learned = newest
        except OSError as error:
            self.report_failure("what was learned beside the text was not written", error)

    def _files_of(self, segment: Segment) -> tuple[Segment, ...]:
        """What of ``segment`` is in files, oldest first: itself, or some of what it was merged from."""
        if self._directory is not None and self._directory.has_file(segment.segment_id):
            return (segment,)
        return self._parts.get(segment.segment_id, ())

    def _first_not_in_files(self, segments: Sequence[Segment]) -> int:
        for segment in segments:
            position = segment.start
            for file in self._files_of(segment):
                position = file.stop if file.start == position else position
            if position is not None and position != segment.stop:
                return position
        return self._tail_start

    @property
    def _tail_start(self) -> int:
        return self._index.next_position - self._index.num_tail_tokens

    def _report_outage(self, what: str, error: Exception) -> None:
        self._num_failures += 1
        self._outage.failed(what, error)

    def report_failure(self, what: str, error: BaseException) -> None:
        """Count a failure and log the first of its kind: what fails once often fails always."""
        self._num_failures += 1
        kind = f"{what} {type(error).__name__}"
        if kind not in self._complained:
            self._complained.add(kind)
            log.warning("cache namespace=%s: %s (logged once): %s", self.name, what, error)

    def stats(self) -> CacheStats:
        """Sizes and counters."""
        with self._lock:
            snapshot, index = self._index.snapshot(), self._index
            num_static = sum(len(segment) for segment in snapshot.segments if segment.start is None)
            return CacheStats(
                num_tokens=snapshot.num_tokens - num_static,
                num_kept_tokens=index.num_kept_tokens,
                num_static_tokens=num_static,
                num_tail_tokens=index.num_tail_tokens,
                num_segments=len(snapshot.segments),
                generation=snapshot.generation,
                num_appended_tokens=self._num_appended,
                num_skipped_tokens=self._num_skipped,
                num_sealed=self._num_sealed,
                num_merged=self._num_merged,
                num_failed_merges=self._num_failed_merges,
                num_damaged_segments=self._num_damaged,
                num_evicted_segments=index.num_evicted_segments,
                num_evicted_tokens=index.num_evicted_tokens,
                num_dropped_tokens=index.num_dropped_tokens,
                num_failures=self._num_failures,
            )


def _merged_id(inputs: Sequence[Segment]) -> str:
    return new_segment_id(inputs[0].start, kept=all(is_kept(segment.segment_id) for segment in inputs))


def _checked(token_ids: TokenIds) -> Tokens:
    """A copy as int32[n]; raises ValueError or OverflowError."""
    wide = np.array(token_ids)
    if len(wide) == 0:
        return np.empty(0, np.int32)
    if wide.ndim != 1 or wide.dtype.kind not in "iu" or wide.min() < 0 or wide.max() > np.iinfo(np.int32).max:
        raise ValueError("token ids must be one sequence of integers within 0..2147483647")
    return wide.astype(np.int32)
