"""The upkeep of one namespace: sealing, keeping what was of use, merging, and its directory."""

from __future__ import annotations

import threading
from typing import Final

from ssd.retrieval.cache_state import CacheState
from ssd.retrieval.merging import Merging
from ssd.retrieval.names import new_segment_id
from ssd.retrieval.packed import Tokens
from ssd.retrieval.segment import Segment, concatenate
from ssd.retrieval.segment_store import Damage, SegmentStore
from ssd.retrieval.suffix_array import build_segment
from ssd.retrieval.usage import NO_WINDOWS, used_text, windows

_MOST_SEGMENTS: Final = 256  # beyond so many, when merges fail, a tail is sealed only once it fills half the ring


class Upkeep:
    """What is done to a namespace beside the requests; from any thread, one at a time."""

    def __init__(
        self, state: CacheState, store: SegmentStore, damage: Damage, merging: Merging, *, seal_tokens: int
    ) -> None:
        """``seal_tokens`` : length of a tail that is sealed unasked."""
        self._state = state
        self._store = store
        self._damage = damage
        self._merging = merging
        self._seal_tokens = seal_tokens
        self._lock = threading.Lock()  # held while files are written; taken before the state's
        self._is_closed = False

    def maintain(self, *, seal_all: bool = False, wait: bool = True) -> None:
        """As ``SuffixCache.maintain``."""
        with self._lock:
            if self._is_closed:
                return
            index = self._state.index
            try:
                if wait or len(index.ring_born) <= _MOST_SEGMENTS or not index.has_room():
                    self._seal(1 if seal_all else self._seal_tokens)
                self._damage.mend_changed()
                self._keep_used()
                self._merging.run(wait=wait)
                if self._store.outage.is_retry_due() or (seal_all and wait):
                    self._store.write_again()
            finally:
                self._store.commit()
            self._store.save_learned()

    def begin_close(self) -> None:
        """Have what runs on another thread end with the segment it is at. ``close`` must follow."""
        with self._state.room:
            self._state.is_closing = True
            self._state.room.notify_all()

    def close(self) -> None:
        """As ``SuffixCache.close``."""
        self.begin_close()
        with self._lock:
            if self._is_closed:
                return
            if self._store.directory is None or self._store.keeps_files:
                self._seal(1)
                self._keep_used()
                self._store.write_again()
            self._is_closed = True
            self._store.commit()
            self._store.save_learned(now=True)
            self._store.close()

    def discard(self) -> None:
        """As ``SuffixCache.discard``."""
        self.begin_close()
        self._clear()  # at once
        with self._lock:
            self._is_closed = True
            self._merging.abandon()
            self._clear()  # and what was being sealed or merged meanwhile
            self._store.close()

    def _clear(self) -> None:
        with self._state.lock:
            self._state.is_discarded = True
            self._state.index.clear()

    def _seal(self, min_tokens: int) -> None:
        """Seal what the tail holds now, while that is at least ``min_tokens``; what comes meanwhile waits."""
        state = self._state
        stop = state.index.next_position
        while True:
            with state.lock:
                is_due = state.tail_start < stop and state.index.num_tail_tokens >= min_tokens
                due = state.index.tail_to_seal() if is_due else None
            if due is None:
                return
            start, tokens = due
            segment = self._store.write(build_segment(tokens, start=start, segment_id=new_segment_id(start)))
            with state.room:
                state.index.install_sealed(segment)
                state.num_sealed += 1
                state.room.notify_all()

    def _keep_used(self) -> None:
        """Bring back what was of use of the segments that have left."""
        state = self._state
        while True:
            with state.lock:
                due = state.index.leaving()
            if due is None:
                return
            left, used = due
            kept, gone, found = None, NO_WINDOWS, NO_WINDOWS
            try:
                tokens = concatenate((left,))
                kept = self._kept_of(left, used_text(tokens, left.start or 0, used))
                gone = windows(tokens)
                found = gone if kept is None else windows(concatenate((kept,)))
            except Exception as error:  # its file was changed, or there is no memory: it is gone, as before
                state.report_failure("text that was of use was not kept", error)
            with state.room:
                state.index.install_kept(left, kept, gone, found)
                state.room.notify_all()

    def _kept_of(self, left: Segment, text: Tokens) -> Segment | None:
        if not len(text):
            return None
        assert left.start is not None
        segment_id = new_segment_id(left.start, kept=True)
        kept = build_segment(text, start=left.start, segment_id=segment_id)
        return self._store.write_made_of((left,), kept)  # whose file holds it too, with the rest
