"""The retrieval cache of one namespace: it stores sequences, and sorts and writes them to files in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.config import IndexConfig
from ssd.retrieval.cache_state import CacheStats, LearnedState, PendingCheckpoints, SourcePosition
from ssd.retrieval.dedup import as_sequence
from ssd.retrieval.directory import RETRY_S, DurableSegments, SegmentDirectory
from ssd.retrieval.files import is_retained, new_segment_id
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.prebuilt import load_prebuilt_directory
from ssd.retrieval.reuse import reused_texts
from ssd.retrieval.segment import Segment, Tokens, concatenate
from ssd.retrieval.snapshot import Snapshot
from ssd.retrieval.suffix_array import build_segment, build_suffix_array

log = logging.getLogger(__name__)

TokenIds = Sequence[int] | npt.NDArray[np.integer]

FIRST_BACKOFF_S: Final = 30.0
MAX_BACKOFF_S: Final = 3600.0

_MAX_SEGMENTS: Final = 256  # with more segments, as merges fail, only a memtable of half the ring is flushed
_MAX_INLINE_SORT: Final = 1 << 14  # tokens; larger merges are sorted by the executor
_ROOM_WAIT_S: Final = 1.0


class StoredPieces(list[Tokens]):
    """The parts of one sequence that were stored by an append, in order: int32[n] each, without separators.

    ``position`` is the ring-buffer position of the first token. The other parts follow, each after a separator.
    """

    def __init__(self, pieces: Iterable[Tokens], position: int) -> None:
        super().__init__(pieces)
        self.position = position


Listener = Callable[[StoredPieces], None]


class _RunningMerge(NamedTuple):
    inputs: tuple[Segment, ...]
    tokens: Tokens
    order: Future[Tokens]


class NamespaceCache:
    """The stored text of one namespace. Made by ``CacheManager``, which also calls ``maintain`` unless it is inline.

    Appending and reading are safe from any thread and never wait for sorting or files. ``maintain``, ``close`` and
    ``discard`` sort, read and write files; they are safe from any thread, and run one at a time. ``_lock`` is held for
    microseconds, to change the index, checkpoints or counters, or to read several of them consistently.
    """

    def __init__(
        self,
        name: str,
        config: IndexConfig,
        *,
        fingerprint: str,
        directory: SegmentDirectory | None = None,
        sorter: Executor | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Create a cache.

        Args:
            name: The namespace.
            config: The settings of the index.
            fingerprint: The tokenizer's fingerprint.
            directory: A directory whose segments are searched and in which new ones become files; None keeps all text
                in memory.
            sorter: The executor that sorts large merges. If it is None, ``maintain`` sorts them itself.
            wake: A function to call if ``maintain`` is due. None: the owner calls ``maintain`` regularly.
        """
        self.name = name
        self._config = config
        self._fingerprint = fingerprint
        self._sorter = sorter
        self._wake = wake
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # notified when a flush made room, and when closing begins
        self._maintaining = threading.Lock()  # locked while files are written; acquired before ``_lock``
        self._is_closing = self._is_closed = False
        self._is_discarded = False  # appends are ignored
        self._listeners: tuple[Listener, ...] = ()
        self._num_appended = self._num_flushes = self._num_merges = self._num_failed_merges = self._num_failures = 0
        self._logged: set[str] = set()

        self._files = None if directory is None else DurableSegments(name, directory, self.report_failure)
        segments = [] if self._files is None else self._files.load()
        self.checkpoint = None if self._files is None else self._files.checkpoint
        """The replication-log position up to which all text was in files when the directory was opened.

        None without a directory, or if ``set_source`` was never called.
        """
        self.learned = LearnedState(None if self._files is None else self._files.learned)
        """The acceptance model of this namespace. Drafters publish copies of what they have learned here, and the
        newest copy is saved in the directory.
        """
        self._index = SuffixIndex(
            config,
            [segment for segment in segments if segment.start is not None],
            0 if self._files is None else self._files.next_position,
            () if self._files is None else self._files.gaps,
        )
        # Prebuilt segments in this directory are neither evicted nor merged, but must be in every manifest.
        self._own_prebuilt = tuple(segment for segment in segments if segment.start is None)
        self._index.add_prebuilt(self._own_prebuilt)
        self._checkpoints = PendingCheckpoints(self.checkpoint)
        self._retry_writes_at = 0.0
        self._running: _RunningMerge | None = None  # the merge that the sorter runs
        self._failed_merges: dict[
            tuple[str, ...], tuple[float, float]
        ] = {}  # by inputs: time of the next attempt, last pause

    def report_failure(self, what: str, error: BaseException) -> None:
        """Count a failure, and log it if it is the first one of its kind, because such failures often repeat."""
        self._num_failures += 1
        kind = f"{what} {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("cache namespace=%s: %s (logged once): %s", self.name, what, error)

    @property
    def capacity_tokens(self) -> int:
        return self._index.config.capacity_tokens

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the namespace's text for a lookup; it includes the last append."""
        return self._index.snapshot()

    # Appending

    def append(self, token_ids: TokenIds, *, prompt_length: int = 0) -> None:
        """Store a finished sequence (prompt, then completion). Never raises and never waits for sorting or files.

        ``token_ids`` are ids >= 0, the end-of-text token included, and the first ``prompt_length`` of them are the
        prompt. Leading blocks of the prompt that are stored already are skipped. Input that cannot be stored counts as
        a failure.
        """
        try:
            tokens = as_sequence(token_ids)
            with self._lock:
                if self._is_discarded:
                    return
                position = self._index.next_position
                stored = StoredPieces(self._index.append(tokens, prompt_length=prompt_length), position)
                self._num_appended += len(tokens)
        except Exception as error:  # a cache must not fail a request
            self.report_failure("a sequence was not stored", error)
            return
        self._wake_if_due()
        for listener in self._listeners if stored else ():
            try:
                listener(stored)
            except Exception as error:
                self.report_failure("a listener failed", error)

    def append_replicated(self, pieces: Sequence[Tokens], *, source: SourcePosition | None = None) -> None:
        """Store text from another replica unchanged, without calling the listeners. Never raises.

        If a later prompt begins with such text, this beginning is neither stored again nor passed to listeners, so that
        replicas do not republish each other's text.

        If half of the ring buffer is unflushed, the call waits at most a second for flushing, because a replica that
        reads a long log could append text faster than it is flushed. The call does not wait if the cache is being
        closed. Because of this wait, do not use the method on the request path, and pass some thousand tokens per call.

        Args:
            pieces: int32[n] each, ids >= 0, verified by the caller. They are copied.
            source: The position in the replication log after the last piece, see ``set_source``.
        """
        index = self._index
        try:
            wait_until: float | None = None
            with self._room:
                for tokens in pieces:
                    if self._wake is not None and not index.has_room():
                        index.publish()  # because waiting releases the lock
                        self._wake()
                        wait_until = wait_until or time.monotonic() + _ROOM_WAIT_S
                        self._room.wait_for(
                            lambda: self._is_closing or index.has_room(), max(0.0, wait_until - time.monotonic())
                        )
                    if self._is_discarded:
                        return
                    index.add(tokens)
                    self._num_appended += len(tokens)
                index.publish()
                if source is not None:
                    self._set_source(source)
        except Exception as error:
            self.report_failure("text of a replica was not stored", error)
            return
        self._wake_if_due()

    def set_source(self, source: SourcePosition) -> None:
        """Record how far the caller has read a replication log: up to the position ``source``.

        A recorded position becomes durable once all text that the cache contained at the time of the call, from any
        caller, is in files. The directory stores the newest durable position, which ``checkpoint`` returns after a
        restart. Only text of the log after it must then be read again.

        ``source`` must be small JSON, because every manifest contains it. While a segment cannot be written, no newer
        position becomes durable, so a restart may read some text twice. Lost text counts as stored: text that was
        dropped before it was flushed, and text in a file that has become unreadable.
        """
        with self._lock:
            self._set_source(source)

    def _set_source(self, source: SourcePosition) -> None:
        self._checkpoints.set(source, self._index.next_position, self._memtable_start)

    def add_listener(self, listener: Listener) -> None:
        """Register a function that each later ``append`` calls with the stored parts, on the calling thread."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def add_prebuilt_directory(self, path: Path) -> frozenset[str]:
        """Make the text of a directory made by ``ssd-cache build`` searchable; return the ids of its segments.

        This text is never evicted. If the directory cannot be used, CacheError is raised: SegmentCorrupt,
        FormatVersion, TokenizerMismatch or StoreUnavailable.
        """
        segments = load_prebuilt_directory(path, fingerprint=self._fingerprint)
        with self._lock:
            self._index.add_prebuilt(segments)
        return frozenset(segment.segment_id for segment in segments)

    @property
    def shared_segments(self) -> tuple[Segment, ...]:
        """The segments of another namespace, such as the shared one, that are searched too."""
        return self._index.shared_segments

    def attach_shared(self, segments: tuple[Segment, ...]) -> None:
        """Set the segments of another namespace that are searched too. They replace those of an earlier call.

        The ``start`` of each segment must be None.
        """
        with self._lock:
            if not self._is_discarded:
                self._index.attach_shared(segments)

    def _wake_if_due(self) -> None:
        if self._wake is not None and self._index.num_memtable_tokens >= self._config.flush_tokens:
            self._wake()

    def stats(self) -> CacheStats:
        with self._lock:
            snapshot, index = self._index.snapshot(), self._index
            num_shared = sum(map(len, index.shared_segments))
            num_prebuilt = sum(len(segment) for segment in snapshot.segments if segment.start is None) - num_shared
            return CacheStats(
                num_tokens=snapshot.num_tokens - num_prebuilt - num_shared,
                num_retained_tokens=index.num_retained_tokens,
                num_prebuilt_tokens=num_prebuilt,
                num_shared_tokens=num_shared,
                num_memtable_tokens=index.num_memtable_tokens,
                num_segments=len(snapshot.segments),
                generation=snapshot.generation,
                num_appended_tokens=self._num_appended,
                num_skipped_tokens=index.num_skipped_tokens,
                num_flushes=self._num_flushes,
                num_merges=self._num_merges,
                num_failed_merges=self._num_failed_merges,
                num_evicted_segments=index.num_evicted_segments,
                num_evicted_tokens=index.num_evicted_tokens,
                num_dropped_tokens=index.num_dropped_tokens,
                num_failures=self._num_failures + (0 if self._files is None else self._files.num_failures),
            )

    # Maintenance

    def maintain(self, *, flush_all: bool = False, wait: bool = True) -> None:
        """Flush the memtable and merge segments if necessary, and update the directory.

        Args:
            flush_all: Flush the memtable whatever its size.
            wait: Wait for merges that run on another thread. Otherwise these merges are only started, and a later call
                installs their results.
        """
        with self._maintaining:
            if self._is_closed:
                return
            try:
                if wait or len(self._index.ring_segments) <= _MAX_SEGMENTS or not self._index.has_room():
                    self._flush_memtable(1 if flush_all else self._config.flush_tokens)
                self._retain_reused()
                self._merge(wait=wait)
                if time.monotonic() >= self._retry_writes_at or (flush_all and wait):
                    self._retry_writes()
            finally:
                self._commit()
            if self._files is not None:
                self._files.save_learned(self.learned.newest)

    def flush(self) -> None:
        """Flush the whole memtable, wait for all merges of segments, and retry failed writes."""
        self.maintain(flush_all=True)

    def begin_close(self) -> None:
        """Make maintenance on another thread stop after the current segment. The caller must then call ``close``."""
        with self._room:
            self._is_closing = True
            self._room.notify_all()

    def close(self) -> None:
        """Flush the memtable and close the directory. Text appended later is stored in memory only.

        The call does not wait for text that other threads append meanwhile. It sorts at most one memtable, and writes
        the new segments and the segments whose earlier writes failed.
        """
        self.begin_close()
        with self._maintaining:
            if self._is_closed:
                return
            self._flush_memtable(1)
            self._retain_reused()
            self._retry_writes()
            self._is_closed = True
            self._commit()
            if self._files is not None:
                self._files.save_learned(self.learned.newest, now=True)
                self._files.close()

    def discard(self) -> None:
        """Delete all text permanently: later snapshots are empty, and later appends are ignored.

        Waits for running flushes and merges. Afterwards the caller removes the files with ``remove_directory``.
        """
        self.begin_close()
        self._clear()  # takes effect at once
        with self._maintaining:
            self._is_closed = True
            self._running = None
            self._clear()  # again, because a flush or merge may have added text
            if self._files is not None:
                self._files.close()

    def _clear(self) -> None:
        with self._lock:
            self._is_discarded = True
            self._index.clear()

    @property
    def _memtable_start(self) -> int:
        return self._index.next_position - self._index.num_memtable_tokens

    # Flushing, and retaining reused text

    def _flush_memtable(self, min_tokens: int) -> None:
        """Turn the memtable's oldest text into segments while the memtable has at least ``min_tokens`` tokens.

        Text that is appended during the call does not make the call last longer.
        """
        stop = self._index.next_position
        while True:
            with self._lock:
                is_due = self._memtable_start < stop and self._index.num_memtable_tokens >= min_tokens
                due = self._index.memtable_to_flush() if is_due else None
            if due is None:
                return
            start, tokens = due
            segment = self._write(build_segment(tokens, start=start, segment_id=new_segment_id(start)))
            with self._room:
                self._index.install_flushed(segment)
                self._num_flushes += 1
                self._room.notify_all()

    def _retain_reused(self) -> None:
        """Find the text of evicted segments that later outputs repeated, and store it in retained segments."""
        while True:
            with self._lock:
                due = self._index.eviction_pass()
            if due is None:
                return
            retained: list[tuple[Segment, Segment]] = []
            try:
                for evicted, text in reused_texts(due):
                    segment_id = new_segment_id(evicted.start, retained=True)
                    segment = build_segment(text, start=evicted.start, segment_id=segment_id)
                    retained.append((evicted, self._write(segment)))
            except Exception as error:  # probably out of memory: the text is lost
                self.report_failure("reused text was not retained, and may be evicted", error)
            with self._room:
                self._index.install_retained(due.evicted, retained)
                self._room.notify_all()

    # Merging

    def _merge(self, *, wait: bool) -> None:
        """Merge small segments into larger ones until no merge is due.

        The text of a large merge is sorted on another thread. With ``wait``, this call waits for the result; otherwise
        a later call installs it.
        """
        while not self._is_closing:
            if self._running is not None:
                if not wait and not self._running.order.done():
                    return
                merge, self._running = self._running, None
                try:
                    self._install_merged(merge.inputs, merge.tokens, merge.order.result())
                except CancelledError:  # the manager is being closed
                    return
                except Exception as error:
                    self._back_off_merge(merge.inputs, error)
                continue
            with self._lock:
                inputs = self._index.plan_merge(self._merges_in_backoff())
            if inputs is None:
                return
            try:
                tokens = concatenate(inputs)
                if self._sorter is None or len(tokens) <= _MAX_INLINE_SORT:
                    self._install_merged(inputs, tokens)
                    continue
                self._running = _RunningMerge(inputs, tokens, self._sorter.submit(build_suffix_array, tokens))
                if (wake := self._wake) is not None:
                    self._running.order.add_done_callback(lambda _: wake())
            except Exception as error:  # probably out of memory
                self._back_off_merge(inputs, error)

    def _merges_in_backoff(self) -> set[str]:
        """Return the ids of segments whose merge failed recently and must not be retried yet."""
        there, now = {segment.segment_id for segment in self._index.ring_segments}, time.monotonic()
        self._failed_merges = {ids: when for ids, when in self._failed_merges.items() if there.issuperset(ids)}
        return {each for ids, (again_at, _) in self._failed_merges.items() if again_at > now for each in ids}

    def _install_merged(self, inputs: Sequence[Segment], tokens: Tokens, order: Tokens | None = None) -> None:
        """Replace the segments ``inputs`` by one segment that contains ``tokens``.

        ``order`` is the suffix array of ``tokens``; if it is None, the tokens are sorted by this call.
        """
        segment_id = new_segment_id(
            inputs[0].start, retained=all(is_retained(segment.segment_id) for segment in inputs)
        )
        merged = build_segment(tokens, start=inputs[0].start, segment_id=segment_id, order=order)
        written = self._write(merged)
        if self._files is not None and written is merged and any(map(self._files.has, inputs)):
            self._back_off_merge(inputs)  # the inputs' files stay until the disk has room
            return
        with self._lock:
            if self._index.install_merged(inputs, written):
                self._num_merges += 1

    def _back_off_merge(self, inputs: Sequence[Segment], error: Exception | None = None) -> None:
        """Count a merge that failed with ``error``, and delay its retry, twice as long after each failure.

        Without ``error``, the merge succeeded, but the file of the merged segment could not be written. The retry is
        then delayed, and no failed merge is counted.
        """
        ids = tuple(segment.segment_id for segment in inputs)
        if error is None:
            self._failed_merges[ids] = time.monotonic() + RETRY_S, FIRST_BACKOFF_S / 2
            return
        _, last_backoff_s = self._failed_merges.get(ids, (0.0, FIRST_BACKOFF_S / 2))
        backoff_s = min(MAX_BACKOFF_S, 2 * last_backoff_s)
        self._failed_merges[ids] = time.monotonic() + backoff_s, backoff_s
        self._num_failed_merges += 1
        self.report_failure("a merge failed; it is retried later, and its text stays in small segments", error)

    # Files

    def _write(self, segment: Segment) -> Segment:
        return segment if self._files is None else self._files.write(segment)

    def _retry_writes(self) -> None:
        if self._files is None:
            return
        for segment in self._index.ring_segments:
            if self._files.has(segment):
                continue
            written = self._write(segment)
            if written is segment:
                self._retry_writes_at = time.monotonic() + RETRY_S
                return
            with self._lock:
                self._index.install_merged((segment,), written)

    def _commit(self) -> None:
        if self._files is None:
            return
        with self._lock:
            segments, next_position = self._index.ring_segments, self._index.next_position
            missing = (segment.start or 0 for segment in segments if not self._files.has(segment))
            checkpoint = self._checkpoints.durable_at(next(missing, self._memtable_start))
        self._files.commit(
            (*self._own_prebuilt, *segments), next_position, checkpoint, is_whole=not self._failed_merges
        )
