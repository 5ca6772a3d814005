"""The retrieval cache of one namespace: it learns, is read, and is kept sorted and in files beside the requests."""

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
from ssd.retrieval.directory import RETRY_S, DurableSegments, SegmentDirectory
from ssd.retrieval.files import is_kept, new_segment_id
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.prefixes import as_sequence
from ssd.retrieval.segment import Segment, Tokens, concatenate
from ssd.retrieval.snapshot import Snapshot
from ssd.retrieval.static import load_static_directory
from ssd.retrieval.suffix_array import build_order, build_segment
from ssd.retrieval.usage import used_texts

log = logging.getLogger(__name__)

TokenIds = Sequence[int] | npt.NDArray[np.integer]

FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0

_MOST_SEGMENTS: Final = 256  # beyond so many, when merges fail, a tail is sealed only once it fills half the ring
_SORTED_AT_ONCE: Final = 1 << 14  # tokens; what sorts more is not waited for
_ROOM_WAIT_S: Final = 1.0


class Pieces(list[Tokens]):
    """The pieces of one append, in order: int32[n] each, no separators.

    ``position`` : of the first one's first token in the ring. The others follow, each after one separator.
    """

    def __init__(self, pieces: Iterable[Tokens], position: int) -> None:
        super().__init__(pieces)
        self.position = position


Listener = Callable[[Pieces], None]


class _RunningMerge(NamedTuple):
    inputs: tuple[Segment, ...]
    tokens: Tokens
    order: Future[Tokens]


class SuffixCache:
    """What one namespace has learned. Made by ``CacheSet``, which also calls ``maintain`` unless it is inline.

    Appending and reading are safe from any thread and never wait for sorting or files. ``maintain``, ``close`` and
    ``discard`` do from any thread, one at a time, what takes long: sort, read and write. ``_lock`` is held for
    microseconds, while index, checkpoints or counters are changed, or read where more than one must fit together.
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
        """``directory`` : its segments are searched, and new ones become files there; None keeps them in memory.

        ``sorter`` : where large merges are sorted, None for the thread that maintains. ``wake`` : called when there is
        maintenance to do, None when the owner calls ``maintain``.
        """
        self.name = name
        self._config = config
        self._fingerprint = fingerprint
        self._sorter = sorter
        self._wake = wake
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # notified when sealing made room, and when it is being closed
        self._maintaining = threading.Lock()  # held while files are written; taken before ``_lock``
        self._is_closing = self._is_closed = False
        self._is_discarded = False  # nothing is stored any more
        self._listeners: tuple[Listener, ...] = ()
        self._num_appended = self._num_sealed = self._num_merged = self._num_failed_merges = self._num_failures = 0
        self._complained: set[str] = set()

        self._files = None if directory is None else DurableSegments(name, directory, self.report_failure)
        segments = [] if self._files is None else self._files.load()
        self.kept = None if self._files is None else self._files.kept
        """What the directory said when it was opened: the last source position whose text had all reached files, and
        the ring position before which everything had. None without a directory and where none was ever given."""
        self.learned = LearnedState(None if self._files is None else self._files.learned)
        """What drafting learns beside the text; the directory keeps the copy published last."""
        self._index = SuffixIndex(
            config,
            [segment for segment in segments if segment.start is not None],
            0 if self._files is None else self._files.next_position,
            () if self._files is None else self._files.gaps,
        )
        # Of a directory that the builder began: neither evicted nor merged, and kept at every commit.
        self._own_static = tuple(segment for segment in segments if segment.start is None)
        self._index.add_static(self._own_static)
        self._checkpoints = PendingCheckpoints(self.kept)
        self._write_again_at = 0.0
        self._running: _RunningMerge | None = None  # what the sorter is at
        self._failed_merges: dict[tuple[str, ...], tuple[float, float]] = {}  # by inputs: when to try again, the pause

    def report_failure(self, what: str, error: BaseException) -> None:
        """Count a failure and log the first of its kind: what fails once often fails always."""
        self._num_failures += 1
        kind = f"{what} {type(error).__name__}"
        if kind not in self._complained:
            self._complained.add(kind)
            log.warning("cache namespace=%s: %s (logged once): %s", self.name, what, error)

    @property
    def capacity_tokens(self) -> int:
        """Most tokens kept."""
        return self._index.config.capacity_tokens

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
            tokens = as_sequence(token_ids)
            with self._lock:
                if self._is_discarded:
                    return
                position = self._index.next_position
                stored = Pieces(self._index.append(tokens, prompt_length=prompt_length), position)
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

    def append_all_shared(self, pieces: Sequence[Tokens], *, source: SourcePosition | None = None) -> None:
        """Store pieces another replica stored, as they are; listeners do not hear of them. Never raises. O(tokens).

        ``pieces`` : int32[n] each, ids >= 0, which the caller has checked; they are copied. A prompt that begins with
        one is not stored, nor heard of, again: what one replica told, no other repeats.

        ``source`` : as for ``set_source``, with the last of ``pieces`` as the last one given.

        Waits, at most a second, while the ring is half full of unsealed tokens: a replica that reads a long log must
        not outrun the sealing. Once the cache is being closed there is none, and no wait. Not for the request path,
        which a call of many tokens may hold up: some thousand at once are well.
        """
        index = self._index
        try:
            wait_until: float | None = None
            with self._room:
                for tokens in pieces:
                    if self._wake is not None and not index.has_room():
                        index.publish()  # others have the lock meanwhile
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
            self.report_failure("a shared piece was not stored", error)
            return
        self._wake_if_due()

    def set_source(self, source: SourcePosition) -> None:
        """``source`` says how far the caller is in its source. Given back in ``kept`` after a restart.

        The directory keeps the newest at which everything stored so far, by anyone, is in files: what a crash
        loses is always after it. It must be JSON and small, it is written with every manifest. Text in a file
        that turns out to be unreadable is missing all the same, and so is text dropped because sealing could not keep
        up. A segment that could not be written holds it back: what came after it may be given again. O(1).
        """
        with self._lock:
            self._set_source(source)

    def _set_source(self, source: SourcePosition) -> None:
        self._checkpoints.set(source, self._index.next_position, self._tail_start)

    def add_listener(self, listener: Listener) -> None:
        """Call ``listener`` with the pieces of every ``append`` that stored any, on its thread."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def add_static_directory(self, path: Path) -> frozenset[str]:
        """Search the segments of a directory made by ``ssd-cache build`` too; they are never evicted.

        Returns their ids. Raises CacheError: SegmentCorrupt, FormatVersion, TokenizerMismatch, StoreUnavailable.
        """
        segments = load_static_directory(path, fingerprint=self._fingerprint)
        with self._lock:
            self._index.add_static(segments)
        return frozenset(segment.segment_id for segment in segments)

    @property
    def borrowed(self) -> tuple[Segment, ...]:
        """Segments of another namespace that are searched too."""
        return self._index.borrowed

    def borrow(self, segments: tuple[Segment, ...]) -> None:
        """Search ``segments`` too, without a position, which another namespace owns, in place of those before."""
        with self._lock:
            if not self._is_discarded:
                self._index.borrow(segments)

    def _wake_if_due(self) -> None:
        if self._wake is not None and self._index.num_tail_tokens >= self._config.seal_tokens:
            self._wake()

    def stats(self) -> CacheStats:
        """Sizes and counters."""
        with self._lock:
            snapshot, index = self._index.snapshot(), self._index
            num_borrowed = sum(map(len, index.borrowed))
            num_static = sum(len(segment) for segment in snapshot.segments if segment.start is None) - num_borrowed
            return CacheStats(
                num_tokens=snapshot.num_tokens - num_static - num_borrowed,
                num_kept_tokens=index.num_kept_tokens,
                num_static_tokens=num_static,
                num_borrowed_tokens=num_borrowed,
                num_tail_tokens=index.num_tail_tokens,
                num_segments=len(snapshot.segments),
                generation=snapshot.generation,
                num_appended_tokens=self._num_appended,
                num_skipped_tokens=index.num_skipped_tokens,
                num_sealed=self._num_sealed,
                num_merged=self._num_merged,
                num_failed_merges=self._num_failed_merges,
                num_evicted_segments=index.num_evicted_segments,
                num_evicted_tokens=index.num_evicted_tokens,
                num_dropped_tokens=index.num_dropped_tokens,
                num_failures=self._num_failures + (0 if self._files is None else self._files.num_failures),
            )

    # Upkeep

    def maintain(self, *, seal_all: bool = False, wait: bool = True) -> None:
        """Seal what is due, merge what is due, bring the directory up to date.

        ``seal_all`` : seal the tail however short it is. ``wait`` : also finish merges that the sorter does; without,
        they are started here and taken over by a later call.
        """
        with self._maintaining:
            if self._is_closed:
                return
            try:
                if wait or len(self._index.ring_born) <= _MOST_SEGMENTS or not self._index.has_room():
                    self._seal(1 if seal_all else self._config.seal_tokens)
                self._keep_used()
                self._merge(wait=wait)
                if time.monotonic() >= self._write_again_at or (seal_all and wait):
                    self._write_again()
            finally:
                self._commit()
            if self._files is not None:
                self._files.save_learned(self.learned.newest)

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
            if self._files is not None:
                self._files.save_learned(self.learned.newest, now=True)
                self._files.close()

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
            if self._files is not None:
                self._files.close()

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
                    kept.append((left, self._write(segment)))
            except Exception as error:  # there is no memory: it is gone, as without this
                self.report_failure("text that was of use was not kept", error)
            with self._room:
                self._index.install_kept(due.left, kept)
                self._room.notify_all()

    # Merging

    def _merge(self, *, wait: bool) -> None:
        """Merge what is due. ``wait`` : also what the sorter is at; else that is taken over by a later call."""
        while not self._is_closing:
            if self._running is not None:
                if not wait and not self._running.order.done():
                    return
                merge, self._running = self._running, None
                try:
                    self._install_merged(merge.inputs, merge.tokens, merge.order.result())
                except CancelledError:  # the set is being closed
                    return
                except Exception as error:
                    self._put_off(merge.inputs, error)
                continue
            with self._lock:
                inputs = self._index.merge_plan(self._waiting_merges())
            if inputs is None:
                return
            try:
                tokens = concatenate(inputs)
                if self._sorter is None or len(tokens) <= _SORTED_AT_ONCE:
                    self._install_merged(inputs, tokens)
                    continue
                self._running = _RunningMerge(inputs, tokens, self._sorter.submit(build_order, tokens))
                if (wake := self._wake) is not None:
                    self._running.order.add_done_callback(lambda _: wake())
            except Exception as error:  # no memory, most probably
                self._put_off(inputs, error)

    def _waiting_merges(self) -> set[str]:
        """The segments of merges that failed and are to wait; a merge that can no longer be is forgotten."""
        there, now = {segment.segment_id for segment in self._index.ring_born}, time.monotonic()
        self._failed_merges = {ids: when for ids, when in self._failed_merges.items() if there.issuperset(ids)}
        return {each for ids, (again_at, _) in self._failed_merges.items() if again_at > now for each in ids}

    def _install_merged(self, inputs: Sequence[Segment], tokens: Tokens, order: Tokens | None = None) -> None:
        """Put one segment of ``tokens`` in the place of ``inputs``, sorted here where there is no ``order``."""
        segment_id = new_segment_id(inputs[0].start, kept=all(is_kept(segment.segment_id) for segment in inputs))
        merged = build_segment(tokens, start=inputs[0].start, segment_id=segment_id, order=order)
        written = self._write(merged)
        if self._files is not None and written is merged and any(map(self._files.has, inputs)):
            self._put_off(inputs)  # what is in files stays there until there is room for more
            return
        with self._lock:
            if self._index.install_merged(inputs, written):
                self._num_merged += 1

    def _put_off(self, inputs: Sequence[Segment], error: Exception | None = None) -> None:
        """A merge that failed is counted and waits, twice as long each time; one without room on disk just waits."""
        ids = tuple(segment.segment_id for segment in inputs)
        if error is None:
            self._failed_merges[ids] = time.monotonic() + RETRY_S, FIRST_PAUSE_S / 2
            return
        _, last_pause_s = self._failed_merges.get(ids, (0.0, FIRST_PAUSE_S / 2))
        pause_s = min(LONGEST_PAUSE_S, 2 * last_pause_s)
        self._failed_merges[ids] = time.monotonic() + pause_s, pause_s
        self._num_failed_merges += 1
        self.report_failure("a merge failed, it is tried again later and its text stays in small segments", error)

    # Files

    def _write(self, segment: Segment) -> Segment:
        return segment if self._files is None else self._files.write(segment)

    def _write_again(self) -> None:
        """Try again with segments that could not be written: there may be room by now."""
        if self._files is None:
            return
        for segment in self._index.ring_born:
            if self._files.has(segment):
                continue
            written = self._write(segment)
            if written is segment:
                self._write_again_at = time.monotonic() + RETRY_S
                return
            with self._lock:
                self._index.install_merged((segment,), written)

    def _commit(self) -> None:
        """Bring the manifest up to date, with the newest checkpoint that holds. O(number of segments)."""
        if self._files is None:
            return
        with self._lock:
            segments, next_position = self._index.ring_born, self._index.next_position
            missing = (segment.start or 0 for segment in segments if not self._files.has(segment))
            kept = self._checkpoints.kept_at(next(missing, self._tail_start))
        self._files.commit((*self._own_static, *segments), next_position, kept, is_whole=not self._failed_merges)
