"""The ring buffer that every stored token enters first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ssd.retrieval.segment import SEPARATOR, Segment, Tokens, unpack


def power_of_two_at_least(n: int) -> int:
    """Return the smallest power of two >= ``n``, for n >= 1."""
    return 1 << (n - 1).bit_length()


class TokenRing:
    """The ring buffer of the memtable: the last ``limit`` tokens that are in no segment yet. For one writing thread.

    ``Snapshot`` describes concurrent reads. Position p, which is absolute and only grows, is in
    ``tokens[p & (len(tokens) - 1)]``::

        [0, memtable_start)               flushed, dropped or evicted; the slots may be overwritten
        [memtable_start, memtable_stop)   the memtable: whole sequences, each closed by ``SEPARATOR``
        [memtable_stop, ...)              not written yet

    An append first increases ``memtable_start`` if there is no room, and then overwrites only slots before it. An
    earlier snapshot stays intact until about ``len(tokens)`` more tokens arrive. A slower reader reads newer tokens,
    but never anything that was not a token.
    """

    def __init__(self, limit: int, position: int = 0) -> None:
        """Create an empty ring buffer for ``limit`` >= 2 tokens; the first one will have position ``position``."""
        assert limit >= 2 and position >= 0
        self.limit = limit
        self.tokens: Tokens = np.zeros(power_of_two_at_least(limit), np.int32)
        self.memtable_start = position
        self.memtable_stop = position
        self._stops: deque[int] = deque()  # the end of each sequence in the memtable, oldest first

    def __len__(self) -> int:
        return self.memtable_stop - self.memtable_start

    def append(self, piece: Tokens) -> int:
        """Store a sequence of fewer than ``limit`` tokens and a separator; return the position of the first token.

        The oldest sequences are dropped if there is no room.
        """
        length = len(piece) + 1
        assert length <= self.limit
        while len(self) + length > self.limit:
            self.memtable_start = self._stops.popleft()
        start = self.memtable_stop
        self._write(start, piece)
        self.tokens[(start + length - 1) & (len(self.tokens) - 1)] = SEPARATOR
        self.memtable_stop = start + length
        self._stops.append(self.memtable_stop)
        return start

    def read(self, start: int, stop: int) -> Tokens:
        """Return a copy of the tokens at positions [start, stop), which must be in the memtable."""
        assert self.memtable_start <= start <= stop <= self.memtable_stop
        first, last = start & (len(self.tokens) - 1), stop & (len(self.tokens) - 1)
        if first <= last and stop - start < len(self.tokens):
            return self.tokens[first:last].copy()
        return np.concatenate([self.tokens[first:], self.tokens[:last]])

    def end_of_sequences(self, max_tokens: int) -> int:
        """Return the ring-buffer position after the oldest whole sequences that have at most ``max_tokens`` in total.

        At least one sequence is included.
        """
        stop = self.memtable_start
        for sequence_stop in self._stops:
            if sequence_stop - self.memtable_start > max_tokens and stop > self.memtable_start:
                break
            stop = sequence_stop
        return stop

    def release(self, stop: int) -> None:
        """Free the ring-buffer positions before ``stop``, because a segment contains their tokens now."""
        while self._stops and self._stops[0] <= stop:
            self.memtable_start = self._stops.popleft()

    def _write(self, start: int, piece: Tokens) -> None:
        first = start & (len(self.tokens) - 1)
        fits = len(self.tokens) - first
        self.tokens[first : first + len(piece)] = piece[:fits]
        if len(piece) > fits:
            self.tokens[: len(piece) - fits] = piece[fits:]


BLOCK_TOKENS: Final = 1 << 16


def iter_blocks(segment: Segment) -> Iterator[Tokens]:
    """Yield the text of a segment in order, separators included, as new arrays of at most BLOCK_TOKENS tokens."""
    for start in range(0, len(segment), BLOCK_TOKENS):
        yield unpack(segment.text, min(BLOCK_TOKENS, len(segment) - start), segment.width, start=start)


def iter_sequences(segments: Sequence[Segment]) -> Iterator[Tokens]:
    """Yield the sequences of segments in order, as int32[n >= 1] without separators.

    It needs memory for one block and the longest sequence.
    """
    for segment in segments:
        begun: list[Tokens] = []
        for block in iter_blocks(segment):
            start = 0
            for stop in np.flatnonzero(block == SEPARATOR).tolist():
                sequence = block[start:stop] if not begun else np.concatenate([*begun, block[start:stop]])
                begun, start = [], stop + 1
                if len(sequence):
                    yield sequence
            if start < len(block):
                begun.append(block[start:])
