"""The circular buffer that every stored token enters first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ssd.retrieval.segment import SEPARATOR, Segment, Tokens, unpack


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two >= ``n``, for n >= 1."""
    return 1 << (n - 1).bit_length()


class TokenRing:
    """The last ``limit`` appended tokens that no segment holds yet. One writer; see ``Snapshot`` for readers.

    Position p, absolute and ever growing, lies at ``tokens[p & (len(tokens) - 1)]``::

        [0, tail_start)            sealed, dropped or evicted; the slots are free to be overwritten
        [tail_start, tail_stop)    the tail: whole sequences, each closed by ``SEPARATOR``
        [tail_stop, ...)           not yet a token

    An append overwrites slots below ``tail_start`` only, after moving ``tail_start`` when it must. A snapshot taken
    earlier keeps its tail intact until about ``len(tokens)`` more tokens arrive; a reader slower than that reads newer
    tokens, never anything that was not a token.
    """

    def __init__(self, limit: int, position: int = 0) -> None:
        """An empty ring for ``limit`` >= 2 tokens whose first token will have absolute position ``position``."""
        assert limit >= 2 and position >= 0
        self.limit = limit
        self.tokens: Tokens = np.zeros(power_of_two_at_least(limit), np.int32)
        self.tail_start = position
        self.tail_stop = position
        self._stops: deque[int] = deque()  # where each sequence of the tail ends, oldest first

    def __len__(self) -> int:
        """Tokens in the tail."""
        return self.tail_stop - self.tail_start

    def append(self, piece: Tokens) -> int:
        """Store ``piece`` (int32[n], n < ``limit``) and a separator, dropping the oldest sequences if they are in the
        way.

        Returns the position of its first token. O(n) plus O(1) for each dropped sequence.
        """
        length = len(piece) + 1
        assert length <= self.limit
        while len(self) + length > self.limit:
            self.tail_start = self._stops.popleft()
        start = self.tail_stop
        self._write(start, piece)
        self.tokens[(start + length - 1) & (len(self.tokens) - 1)] = SEPARATOR
        self.tail_stop = start + length
        self._stops.append(self.tail_stop)
        return start

    def read(self, start: int, stop: int) -> Tokens:
        """A copy of positions [start, stop), which must lie in the tail."""
        assert self.tail_start <= start <= stop <= self.tail_stop
        first, last = start & (len(self.tokens) - 1), stop & (len(self.tokens) - 1)
        if first <= last and stop - start < len(self.tokens):
            return self.tokens[first:last].copy()
        return np.concatenate([self.tokens[first:], self.tokens[:last]])

    def sequences_within(self, max_tokens: int) -> int:
        """Where the longest run of oldest sequences with at most ``max_tokens`` tokens ends; at least one sequence."""
        stop = self.tail_start
        for sequence_stop in self._stops:
            if sequence_stop - self.tail_start > max_tokens and stop > self.tail_start:
                break
            stop = sequence_stop
        return stop

    def release(self, stop: int) -> None:
        """Positions below ``stop``, the end of a sequence, are held by a segment from now on."""
        while self._stops and self._stops[0] <= stop:
            self.tail_start = self._stops.popleft()

    def _write(self, start: int, piece: Tokens) -> None:
        first = start & (len(self.tokens) - 1)
        fits = len(self.tokens) - first
        self.tokens[first : first + len(piece)] = piece[:fits]
        if len(piece) > fits:
            self.tokens[: len(piece) - fits] = piece[fits:]


BLOCK_TOKENS: Final = 1 << 16


def blocks_of(segment: Segment) -> Iterator[Tokens]:
    """int32[n <= BLOCK_TOKENS], arrays of the caller's own: the segment's text in order, separators included. O(n)."""
    for start in range(0, len(segment), BLOCK_TOKENS):
        yield unpack(segment.text, min(BLOCK_TOKENS, len(segment) - start), segment.width, start=start)


def sequences_of(segments: Sequence[Segment]) -> Iterator[Tokens]:
    """int32[n >= 1] each: the sequences of ``segments`` in order, without separators.

    O(tokens), in memory of a block and the longest sequence.
    """
    for segment in segments:
        begun: list[Tokens] = []
        for block in blocks_of(segment):
            start = 0
            for stop in np.flatnonzero(block == SEPARATOR).tolist():
                sequence = block[start:stop] if not begun else np.concatenate([*begun, block[start:stop]])
                begun, start = [], stop + 1
                if len(sequence):
                    yield sequence
            if start < len(block):
                begun.append(block[start:])
