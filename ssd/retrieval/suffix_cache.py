"""The retrieval cache of one namespace: learning and reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.retrieval.cache_state import CacheStats, SourcePosition
from ssd.retrieval.prefixes import as_sequence
from ssd.retrieval.segment import Segment, Tokens
from ssd.retrieval.snapshot import Snapshot
from ssd.retrieval.static import load_static_directory
from ssd.retrieval.upkeep import MaintainedIndex

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class Pieces(list[Tokens]):
    """The pieces of one append, in order: int32[n] each, no separators.

    ``position`` : of the first one's first token in the ring. The others follow, each after one separator.
    """

    def __init__(self, pieces: Iterable[Tokens], position: int) -> None:
        super().__init__(pieces)
        self.position = position


Listener = Callable[[Pieces], None]


_RING_BYTES_PER_TOKEN: Final = 7  # of a segment that holds text of the ring
_ROOM_WAIT_S: Final = 1.0


class SuffixCache(MaintainedIndex):
    """What one namespace has learned. Made by ``CacheSet``, which also calls ``maintain`` unless it is inline.

    Appending and reading are safe from any thread and never wait for sorting or files.
    """

    _listeners: tuple[Listener, ...] = ()
    _num_appended = 0

    def snapshot(self) -> Snapshot:
        """What can be searched now, the last append included. O(1)."""
        return self._index.snapshot()

    @property
    def capacity_tokens(self) -> int:
        """Most tokens of its own text."""
        return self._config.capacity_tokens

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
        # Text of the ring comes and goes in copies: there must be room for it.
        segments = load_static_directory(
            path,
            fingerprint=self._fingerprint,
            budget=self._budget,
            leaving=self.capacity_tokens * _RING_BYTES_PER_TOKEN,
        )
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
            num_static = sum(len(segment) for segment in index.own if segment.start is None)
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
                num_damaged_segments=self._num_damaged,
                num_evicted_segments=index.num_evicted_segments,
                num_evicted_tokens=index.num_evicted_tokens,
                num_dropped_tokens=index.num_dropped_tokens,
                num_failures=self._num_failures,
            )
