"""The sequences that segments hold, read a block at a time: of a text of any length, a few hundred KB are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.retrieval.packed import Tokens, unpack
from ssd.retrieval.segment import SEPARATOR, Segment

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


def sequence_lengths(segments: Sequence[Segment]) -> npt.NDArray[np.int64]:
    """int64: how long each of ``sequences_of(segments)`` is. O(tokens), in memory of a block and the result."""
    found = [np.empty(0, np.int64)]
    for segment in segments:
        ends, offset = [np.array([-1])], 0
        for block in blocks_of(segment):
            ends.append(np.flatnonzero(block == SEPARATOR) + offset)
            offset += len(block)
        found.append(np.diff(np.concatenate(ends)) - 1)
    lengths = np.concatenate(found)
    return lengths[lengths > 0]
