"""The retrieval cache of one namespace: learning and reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.config import IndexConfig
from ssd.errors import CacheError
from ssd.retrieval.cache_state import CacheState, CacheStats, Checkpoint, SourcePosition
from ssd.retrieval.directory import DirectoryReader, SegmentDirectory
from ssd.retrieval.file_bytes import CopyBudget
from ssd.retrieval.index import SuffixIndex
from ssd.retrieval.merge_worker import MergeWorker
from ssd.retrieval.merging import Merging
from ssd.retrieval.packed import Tokens
from ssd.retrieval.prefixes import PrefixFilter, as_sequence
from ssd.retrieval.segment import Segment
from ssd.retrieval.segment_store import Damage, LearnedState, SegmentStore
from ssd.retrieval.snapshot import Snapshot
from ssd.retrieval.static import load_static_directory
from ssd.retrieval.upkeep import Upkeep
from ssd.retrieval.usage import WINDOW_TOKENS, windows

TokenIds = Sequence[int] | npt.NDArray[np.integer]


class Pieces(list[Tokens]):
    """The pieces of one append, in order: int32[n] each, no separators.

    ``position`` : of the first one's first token in the ring. The others follow, each after one separator.
    """

    def __init__(self, pieces: Iterable[Tokens], position: int) -> None:
        super().__init__(pieces)
        self.position = position


Listener = Callable[[Pieces], None]


class SealedText(NamedTuple):
    """``segments`` : in order of position, all that is stored before ring position ``position``.

    ``checkpoint`` : how far the caller of ``set_source`` was when all before ``position`` had been stored; None where
    it never said.
    """

    segments: tuple[Segment, ...]
    position: int
    checkpoint: Checkpoint | None


_RING_BYTES_PER_TOKEN: Final = 7  # of a segment that holds text of the ring
_ROOM_WAIT_S: Final = 1.0


class SuffixCache:
    """What one namespace has learned. Made by ``CacheSet``, which also calls ``maintain`` unless it is inline.

    Appending and reading are safe from any thread and never wait for sorting or files: those are the business of its
    ``Upkeep``.
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
        self._wake = wake
        self._listeners: tuple[Listener, ...] = ()

        segments: list[Segment] = []
        failures: list[CacheError | OSError] = []
        next_position = 0
        self.kept: Checkpoint | None = None
        """What the directory said when it was opened: the last source position whose text had all reached files, and
        the ring position before which everything had. None without a directory and where none was ever given."""
        if directory is not None:
            segments, failures = directory.load()
            next_position = directory.manifest.next_position
            self.kept = Checkpoint.from_json(directory.manifest.shared)
        index = SuffixIndex(config, [segment for segment in segments if segment.start is not None], next_position)
        index.add_static([segment for segment in segments if segment.start is None])
        self._filter = PrefixFilter(config.dedup_block_tokens, config.lead_in_tokens, follows_others=True)
        self._state = state = CacheState(name, index, self.kept)
        self._index, self._lock = index, state.lock
        for failure in failures:
            state.report_failure("a segment was left out", failure)
        self.learned = LearnedState(self._read_learned(directory))
        """What drafting learns beside the text; the directory keeps the copy published last."""
        self._files = SegmentStore(
            state,
            directory if isinstance(directory, SegmentDirectory) else None,
            segments=segments,
            kept=self.kept,
            learned=self.learned,
        )
        damage = Damage(state, self._files, fingerprint=fingerprint, budget=budget)
        merging = Merging(
            state,
            self._files,
            damage,
            worker=worker,
            fingerprint=fingerprint,
            keeps_used=self._keeps_used,
            wake=wake,
        )
        self._upkeep = Upkeep(state, self._files, damage, merging, seal_tokens=config.seal_tokens)

    def snapshot(self) -> Snapshot:
        """What can be searched now, the last append included. O(1)."""
        return self._index.snapshot()

    def sealed(self) -> SealedText:
        """What was sealed of its own text until now, for whoever copies it. O(number of segments)."""
        with self._lock:
            position = self._state.tail_start
            segments = () if self._state.is_discarded else self._index.ring_born
            return SealedText(segments, position, self._state.checkpoints.newest_at(position))

    def own_text(self) -> tuple[tuple[Segment, ...], Tokens]:
        """Segments of its own text, and a copy of the tail with its separators: int32[n]. O(tail)."""
        with self._lock:
            tail = self._index.tail()
            return self._index.ring_born, tail

    @property
    def capacity_tokens(self) -> int:
        """Most tokens of its own text."""
        return self._index.config.capacity_tokens

    # Learning

    def append(self, token_ids: TokenIds, *, prompt_length: int = 0) -> None:
        """Store a finished sequence, prompt then completion. O(n); never raises and never waits for sorting or files.

        ``token_ids`` : ids >= 0, end-of-text included. Of its first ``prompt_length`` tokens, the leading blocks stored
        before are not stored again. What cannot be stored is counted as a failure.
        """
        try:
            tokens = as_sequence(token_ids)
            output = tokens[max(0, prompt_length - WINDOW_TOKENS + 1) :]
            said = windows(output) if self._keeps_used else None
            with self._lock:
                if self._state.is_discarded:
                    return
                if said is not None:
                    self._index.note_said(said)
                pieces = self._filter.pieces(tokens, prompt_length, self._index.next_position)
                stored = self._store(pieces)
                self._state.num_appended += len(tokens)
                self._state.num_skipped += len(tokens) - sum(map(len, pieces))
        except Exception as error:  # a cache must not fail a request
            self.report_failure("a sequence was not stored", error)
            return
        self._wake_if_due()
        for listener in self._listeners if stored else ():
            try:
                listener(stored)
            except Exception as error:
                self.report_failure("a listener failed", error)

    def append_shared(self, token_ids: TokenIds, *, source: SourcePosition | None = None) -> None:
        """``append_all_shared`` of one piece of any kind; what is no sequence of token ids is a failure."""
        try:
            tokens = as_sequence(token_ids)
        except Exception as error:
            self.report_failure("a shared piece was not stored", error)
            return
        self.append_all_shared((tokens,), source=source)

    def append_all_shared(self, pieces: Sequence[Tokens], *, source: SourcePosition | None = None) -> None:
        """Store pieces another replica stored, as they are; listeners do not hear of them. Never raises. O(tokens).

        ``pieces`` : int32[n] each, ids >= 0, which the caller has checked; they are copied. A prompt that begins with
        one is not stored, nor heard of, again: what one replica told, no other repeats.

        ``source`` : as for ``set_source``, with the last of ``pieces`` as the last one given.

        Waits, at most a second, while the ring is half full of unsealed tokens: a replica that reads a long log must
        not outrun the sealing. Once the cache is being closed there is none, and no wait. Not for the request path,
        which a call of many tokens may hold up: some thousand at once are well.
        """
        state, index = self._state, self._index
        try:
            wait_until: float | None = None
            with state.room:
                num_dropped = index.num_dropped_tokens
                for tokens in pieces:
                    if self._wake is not None and not index.has_room():
                        index.publish()  # others have the lock meanwhile
                        self._wake()
                        wait_until = wait_until or time.monotonic() + _ROOM_WAIT_S
                        state.room.wait_for(
                            lambda: state.is_closing or index.has_room(), max(0.0, wait_until - time.monotonic())
                        )
                    if state.is_discarded:
                        return
                    self._filter.note(tokens, index.next_position)
                    index.add(tokens)
                    state.num_appended += len(tokens)
                index.publish()
                self._forget_prefixes(index.num_dropped_tokens > num_dropped)
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
        self._state.checkpoints.set(source, self._index.next_position, self._state.tail_start)

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
            path, fingerprint=self._fingerprint, budget=self._budget, leaving=self._ring_bytes
        )
        with self._lock:
            self._index.add_static(segments)
        return frozenset(segment.segment_id for segment in segments)

    def exchange_static(self, former: Sequence[Segment], segments: Sequence[Segment]) -> None:
        """Search ``segments``, in memory of this process, in place of ``former``, which a call like this brought."""
        with self._lock:
            if not self._state.is_discarded:
                self._index.leave_out(former)
                self._index.add_static(segments)

    @property
    def borrowed(self) -> tuple[Segment, ...]:
        """Segments of another namespace that are searched too."""
        return self._index.borrowed

    def borrow(self, segments: tuple[Segment, ...]) -> None:
        """Search ``segments`` too, without a position, which another namespace owns, in place of those before."""
        with self._lock:
            if not self._state.is_discarded:
                self._index.borrow(segments)

    def _store(self, pieces: list[Tokens]) -> Pieces:
        num_dropped, position = self._index.num_dropped_tokens, self._index.next_position
        stored = Pieces((part for piece in pieces for part in self._index.append(piece)), position)
        self._forget_prefixes(self._index.num_dropped_tokens > num_dropped)
        return stored

    def _forget_prefixes(self, has_dropped: bool) -> None:
        # Positions say nothing about text dropped from the middle, so then every block is forgotten.
        self._filter.forget_before(self._index.next_position if has_dropped else self._index.recent_position)

    def _wake_if_due(self) -> None:
        if self._wake is not None and self._index.num_tail_tokens >= self._seal_tokens:
            self._wake()

    # Maintenance

    def maintain(self, *, seal_all: bool = False, wait: bool = True) -> None:
        """Seal what is due, merge what is due, bring the directory up to date.

        ``seal_all`` : seal the tail however short it is. ``wait`` : also finish merges that the worker does; without,
        they are started here and taken over by a later call.
        """
        self._upkeep.maintain(seal_all=seal_all, wait=wait)

    def flush(self) -> None:
        """Seal the whole tail, wait for all merges, try again with what could not be written."""
        self.maintain(seal_all=True)

    def begin_close(self) -> None:
        """Have maintenance that runs on another thread end with the segment it is at. ``close`` must follow."""
        self._upkeep.begin_close()

    def close(self) -> None:
        """Seal the tail and let go of the directory. Appends still work afterwards, in memory only.

        Bounded while others append: what they store after the call is not waited for. Sorts a tail at most, and writes
        it and what could not be written before.
        """
        self._upkeep.close()

    def discard(self) -> None:
        """Forget everything, for good: no snapshot taken from now on holds a token, and nothing is stored any more.

        Files are left to the caller, with no right to write them: see ``remove_directory``. Waits for what is being
        sealed or merged.
        """
        self._upkeep.discard()

    def _read_learned(self, directory: DirectoryReader | None) -> bytes | None:
        if directory is None:
            return None
        try:
            return directory.read_learned()
        except OSError as error:
            self.report_failure("what was learned beside the text was not read", error)
            return None

    def report_failure(self, what: str, error: BaseException) -> None:
        """Count a failure and log the first of its kind: what fails once often fails always."""
        self._state.report_failure(what, error)

    def stats(self) -> CacheStats:
        """Sizes and counters."""
        return self._state.stats()
