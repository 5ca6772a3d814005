"""An index with its files and counters: sealed, merged and written beside the requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

from ssd.config import IndexConfig
from ssd.errors import CacheError, SegmentCorrupt
from ssd.retrieval.cache_state import Checkpoint, Copy, LearnedState, PendingCheckpoints
from ssd.retrieval.directory import DirectoryReader, SegmentDirectory, read_learned
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.files import is_kept, new_segment_id
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.merge_worker import MergeWorker
from ssd.retrieval.segment import Segment, Tokens, checked_text, concatenate, open_segment
from ssd.retrieval.suffix_array import build_segment
from ssd.retrieval.usage import used_texts

log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""What could not be written is tried again this often, beside what is sealed meanwhile."""
FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0
SAVE_LEARNED_S: Final = 60.0

_MOST_SEGMENTS: Final = 256  # beyond so many, when merges fail, a tail is sealed only once it fills half the ring
_MERGED_IN_PROCESS: Final = 1 << 14  # tokens; sorting so few costs less than asking the worker
_MANY_SEGMENTS: Final = 64  # beyond so many, nothing waits for the worker: what it is not at is merged here


class _RunningMerge(NamedTuple):
    inputs: tuple[Segment, ...]
    tokens: Tokens
    order: Future[Tokens]


class MaintainedIndex:
    """One namespace's index, counters and, where it has a directory, files.

    ``maintain``, ``close`` and ``discard`` do from any thread, one at a time, what takes long: sort, read and write.
    ``_lock`` is held for microseconds, while index, checkpoints or counters are changed, or read where more than one
    must fit together.

    What cannot be written is searched all the same and tried again. Such an outage begins with the first failure and
    ends when everything is in files again, not with the first write that works: a disk that is nearly full takes small
    files all the time.
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
        None keeps them in memory. ``budget`` : what private copies of static segments may take. ``worker`` : sorts
        what is merged; ``wake`` : called when there is maintenance to do, None when the owner calls ``maintain``.
        """
        self.name = name
        self._config = config
        self._fingerprint = fingerprint
        self._budget = budget
        self._worker = worker
        self._wake = wake
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # notified when sealing made room, and when it is being closed
        self._maintaining = threading.Lock()  # held while files are written; taken before ``_lock``
        self._is_closing = self._is_closed = False
        self._is_discarded = False  # nothing is stored any more
        self._num_sealed = self._num_merged = self._num_failed_merges = self._num_damaged = self._num_failures = 0
        self._complained: set[str] = set()

        segments: list[Segment] = []
        next_position = 0
        self.kept: Checkpoint | None = None
        """What the directory said when it was opened: the last source position whose text had all reached files, and
        the ring position before which everything had. None without a directory and where none was ever given."""
        stored = None
        if directory is not None:
            segments, failures = directory.load()
            next_position = directory.manifest.next_position
            self.kept = Checkpoint.from_json(directory.manifest.shared)
            for failure in failures:
                self.report_failure("a segment was left out", failure)
            try:
                stored = read_learned(directory.path)
            except OSError as error:
                self.report_failure("what was learned beside the text was not read", error)
        self.learned = LearnedState(stored)
        """What drafting learns beside the text; the directory keeps the copy published last."""
        self._index = SuffixIndex(config, [segment for segment in segments if segment.start is not None], next_position)
        # Of a directory that the builder began: neither evicted nor merged, and kept at every commit.
        self._own_static = tuple(segment for segment in segments if segment.start is None)
        self._index.add_static(self._own_static)
        self._checkpoints = PendingCheckpoints(self.kept)

        self._directory = directory if isinstance(directory, SegmentDirectory) else None
        self._committed: tuple[tuple[Segment, ...], Checkpoint | None] = tuple(segments), self.kept
        self._parts: dict[str, tuple[Segment, ...]] = {}  # of a segment without a file: the files it came from
        self._is_outage = False
        self._write_again_at = 0.0
        self._saved_copy: Copy | None = None
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S
        self._running: _RunningMerge | None = None  # what the worker is at
        self._failed_merges: dict[tuple[str, ...], tuple[float, float]] = {}  # by inputs: when to try again, the pause

    def report_failure(self, what: str, error: BaseException) -> None:
        """Count a failure and log the first of its kind: what fails once often fails always."""
        self._num_failures += 1
        kind = f"{what} {type(error).__name__}"
        if kind not in self._complained:
            self._complained.add(kind)
            log.warning("cache namespace=%s: %s (logged once): %s", self.name, what, error)

    def maintain(self, *, seal_all: bool = False, wait: bool = True) -> None:
        """Seal what is due, merge what is due, bring the directory up to date.

        ``seal_all`` : seal the tail however short it is. ``wait`` : also finish merges that the worker does; without,
        they are started here and taken over by a later call.
        """
        with self._maintaining:
            if self._is_closed:
                return
            try:
                if wait or len(self._index.ring_born) <= _MOST_SEGMENTS or not self._index.has_room():
                    self._seal(1 if seal_all else self._config.seal_tokens)
                self._mend_changed()
                self._keep_used()
                self._merge(wait=wait)
                if time.monotonic() >= self._write_again_at or (seal_all and wait):
                    self._write_again()
            finally:
                self._commit()
            self._save_learned()

    def flush(self) -> None:
        """Seal the whole tail, wait for all merges, try again with what could not be written."""
        self.maintain(seal_all=True)

    def begin_close(self) -> None:
        """Have maintenance that runs on another thread end with the segment it is at. ``close`` must follow."""
        with self._room:
            self._is_closing = True
            self._room.notify_all()

    def close(self) -> None:
        """Seal the tail and let go of the directory. Appends still work afterwards, in memory only.

        Bounded while others append: what they store after the call is not waited for. Sorts a tail at most, and writes
        it and what could not be written before.
        """
        self.begin_close()
        with self._maintaining:
            if self._is_closed:
                return
            self._seal(1)
            self._keep_used()
            self._write_again()
            self._is_closed = True
            self._commit()
            self._save_learned(now=True)
            if self._directory is not None:
                self._directory.close()

    def discard(self) -> None:
        """Forget everything, for good: no snapshot taken from now on holds a token, and nothing is stored any more.

        Files are left to the caller, with no right to write them: see ``remove_directory``. Waits for what is being
        sealed or merged.
        """
        self.begin_close()
        self._clear()  # at once
        with self._maintaining:
            self._is_closed = True
            self._running = None
            self._clear()  # and what was being sealed or merged meanwhile
            if self._directory is not None:
                self._directory.close()

    def _clear(self) -> None:
        with self._lock:
            self._is_discarded = True
            self._index.clear()

    @property
    def _tail_start(self) -> int:
        """Ring position of the first token that no segment holds."""
        return self._index.next_position - self._index.num_tail_tokens

    # Sealing, and keeping what was of use

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
            segment = self._write(build_segment(tokens, start=start, segment_id=new_segment_id(start)))
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
            kept: list[tuple[Segment, Segment]] = []
            try:
                for left, text in used_texts(due):
                    segment_id = new_segment_id(left.start, kept=True)
                    segment = build_segment(text, start=left.start, segment_id=segment_id)
                    kept.append((left, self._write(segment, made_of=(left,))))  # whose file holds it too, with the rest
            except Exception as error:  # its file was changed, or there is no memory: it is gone, as before
                self.report_failure("text that was of use was not kept", error)
            with self._room:
                self._index.install_kept(due.left, kept)
                self._room.notify_all()

    # Merging: by the worker where that is worth it, else here

    def _merge(self, *, wait: bool) -> None:
        """Merge what is due. ``wait`` : also what the worker is at; else that is taken over by a later call."""
        while not self._is_closing:
            if self._running is not None and (wait or self._running.order.done()):
                merge, self._running = self._running, None
                self._take_over(merge)
                continue
            if self._running is not None and len(self._index.ring_born) <= _MANY_SEGMENTS:
                return
            with self._lock:
                inputs = self._index.merge_plan(self._not_to_be_merged())
            if inputs is None:
                return
            try:
                tokens = concatenate(inputs)
            except SegmentCorrupt as error:
                self._mend(inputs, error)
            except MemoryError as error:
                self._put_off(inputs, error)
            else:
                if self._worker is None or self._running is not None or len(tokens) <= _MERGED_IN_PROCESS:
                    self._install_merged(inputs, tokens)
                else:
                    self._running = _RunningMerge(inputs, tokens, self._worker.submit(tokens))
                    if (wake := self._wake) is not None:
                        self._running.order.add_done_callback(lambda _: wake())

    def _not_to_be_merged(self) -> set[str]:
        """What the worker is at, and what a failed merge is to wait with; one that can no longer be is forgotten."""
        there, now = {segment.segment_id for segment in self._index.ring_born}, time.monotonic()
        self._failed_merges = {ids: when for ids, when in self._failed_merges.items() if there.issuperset(ids)}
        apart = {each for ids, (again_at, _) in self._failed_merges.items() if again_at > now for each in ids}
        return apart.union(segment.segment_id for segment in (self._running.inputs if self._running else ()))

    def _take_over(self, merge: _RunningMerge) -> None:
        """Install what the worker sorted, or else sort here; nothing when the cache is being closed."""
        order = None
        try:
            order = merge.order.result()
        except CacheError as error:
            if self._is_closing:
                return
            self.report_failure("a merge by the rebuild process failed", error)
        self._install_merged(merge.inputs, merge.tokens, order)

    def _install_merged(self, inputs: Sequence[Segment], tokens: Tokens, order: Tokens | None = None) -> None:
        """Put one segment of ``tokens`` in the place of ``inputs``, sorted here where there is no ``order``."""
        segment_id = new_segment_id(inputs[0].start, kept=all(is_kept(segment.segment_id) for segment in inputs))
        try:
            merged = build_segment(tokens, start=inputs[0].start, segment_id=segment_id, order=order)
            merged = self._write(merged, made_of=inputs)
        except Exception as error:  # no memory, most probably
            self._put_off(inputs, error)
            return
        with self._lock:
            if self._index.install_merged(inputs, merged):
                self._num_merged += 1

    def _put_off(self, inputs: Sequence[Segment], error: Exception) -> None:
        """A merge that failed is counted and waits, twice as long each time."""
        ids = tuple(segment.segment_id for segment in inputs)
        _, last_pause_s = self._failed_merges.get(ids, (0.0, FIRST_PAUSE_S / 2))
        pause_s = min(LONGEST_PAUSE_S, 2 * last_pause_s)
        self._failed_merges[ids] = time.monotonic() + pause_s, pause_s
        self._num_failed_merges += 1
        self.report_failure("a merge failed, it is tried again later and its text stays in small segments", error)

    # Files

    def _has_file(self, segment: Segment) -> bool:
        return self._directory is not None and self._directory.has_file(segment.segment_id)

    def _write(self, segment: Segment, *, made_of: Sequence[Segment] = ()) -> Segment:
        """The segment as it was read from its new file; itself where it could not be written.

        Then the directory keeps the files of those it was made of, which hold the same text.
        """
        if self._directory is None:
            return segment
        try:
            return self._directory.write(segment)
        except (OSError, CacheError) as error:
            self._report_outage("a segment stays in memory", error)
        if made_of:
            self._parts[segment.segment_id] = tuple(file for each in made_of for file in self._files_of(each))
        return segment

    def _write_again(self) -> None:
        """Try again with segments that could not be written: there may be room by now."""
        if self._directory is None:
            return
        for segment in self._index.ring_born:
            if self._has_file(segment):
                continue
            written = self._write(segment)
            if written is segment:
                self._write_again_at = time.monotonic() + RETRY_S
                return
            with self._lock:
                self._index.install_merged((segment,), written)

    def _commit(self) -> None:
        """Bring the manifest up to date, with the newest checkpoint that holds. O(number of segments)."""
        if self._directory is None:
            return
        with self._lock:
            segments, next_position = self._index.ring_born, self._index.next_position
            kept = self._checkpoints.kept_at(self._first_not_in_files(segments))
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
        if files == segments and self._is_outage:
            self._is_outage = False
            log.warning("cache namespace=%s: its directory can be written again, nothing is missing", self.name)

    def _files_of(self, segment: Segment) -> tuple[Segment, ...]:
        """What of ``segment`` is in files, oldest first: itself, or some of what it was merged from."""
        return (segment,) if self._has_file(segment) else self._parts.get(segment.segment_id, ())

    def _first_not_in_files(self, segments: Sequence[Segment]) -> int:
        for segment in segments:
            position = segment.start
            for file in self._files_of(segment):
                position = file.stop if file.start == position else position
            if position is not None and position != segment.stop:
                return position
        return self._tail_start

    def _report_outage(self, what: str, error: Exception) -> None:
        self._num_failures += 1
        if not self._is_outage:
            self._is_outage = True
            log.error(
                "cache namespace=%s: %s: %s. Requests are served as before; what is learned from now on is kept in "
                "memory and written once the directory can be written again, which is tried every %.0f s. Until then a "
                "restart loses it. Make room, or mount it writable",
                self.name, what, error, RETRY_S,
            )  # fmt: skip

    def _save_learned(self, *, now: bool = False) -> None:
        """Write the newest copy of what drafting learned, every SAVE_LEARNED_S or ``now``; only where it is new."""
        if not now and time.monotonic() < self._save_learned_at:
            return
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S
        newest, directory = self.learned.newest, self._directory
        if directory is None or newest is None or newest is self._saved_copy:
            return
        try:
            directory.write_learned(newest.to_bytes())
            self._saved_copy = newest
        except OSError as error:
            self.report_failure("what was learned beside the text was not written", error)

    # Segments whose bytes were changed: read again where the file holds what it did, else searched no more

    def _mend_changed(self) -> None:
        """Those whose file was written to or cut while it is mapped. O(number of segments)."""
        for segment in self._index.own:  # what is borrowed is its owner's
            if segment.shared is not None and segment.shared.has_changed():
                path = segment.shared.path
                self._reopen(segment, path, SegmentCorrupt(f"{path} was changed while it was in use"))

    def _mend(self, segments: Sequence[Segment], error: Exception) -> None:
        """Those of ``segments`` whose text does not fit its checksum; ``error`` says how that was noticed. O(text)."""
        for segment in segments:
            try:
                checked_text(segment)
            except SegmentCorrupt:
                path = None if self._directory is None else self._directory.path_of(segment.segment_id)
                self._reopen(segment, path, error)

    def _reopen(self, segment: Segment, path: Path | None, error: Exception) -> None:
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
