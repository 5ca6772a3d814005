"""What a lookup sees: immutable segments and the part of the ring that no segment holds yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SEPARATOR = -1
"""Ends every stored sequence. Never a token id, so no match and no continuation runs across it."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Immutable text with its suffix array; the arrays may be memory-mapped.

    ``tokens`` : int32[n], whole sequences, each closed by ``SEPARATOR``.
    ``suffixes`` : int32[n], start offsets into ``tokens``, ordered by the suffix they start.
    ``start`` : absolute ring position of ``tokens[0]``, or None for a static segment, which the ring never evicts.
    ``segment_id`` : unique name within its directory.
    """

    tokens: npt.NDArray[np.int32]
    suffixes: npt.NDArray[np.int32]
    start: int | None
    segment_id: str

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def stop(self) -> int | None:
        """One past the last absolute ring position, or None for a static segment."""
        return None if self.start is None else self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One generation of an index. Safe to read from any thread.

    Segments never change. The tail lies in the ring, which is overwritten about ``len(ring)`` tokens later: a snapshot
    held that long reads newer tokens there, never anything that was not a token. Take a fresh one for every lookup.

    ``segments`` : static ones first, then those of the ring, oldest first.
    ``segment_table`` : int64[len(segments), 3], for the kernels: address of ``tokens``, address of ``suffixes``, n.
    ``ring`` : int32[power of two]. Absolute position p lies at ``ring[p & (len(ring) - 1)]``. Positions
        [tail_start, tail_stop) are the tail: stored, whole sequences, in no segment yet.
    """

    generation: int
    segments: tuple[Segment, ...]
    segment_table: npt.NDArray[np.int64]
    ring: npt.NDArray[np.int32]
    tail_start: int
    tail_stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens that can be matched, separators included."""
        return sum(len(segment) for segment in self.segments) + self.tail_stop - self.tail_start


def segment_table(segments: Sequence[Segment]) -> npt.NDArray[np.int64]:
    """Addresses and lengths of ``segments`` for the kernels; valid while the segments are alive."""
    rows = [(s.tokens.ctypes.data, s.suffixes.ctypes.data, len(s)) for s in segments]
    return np.array(rows, np.int64).reshape(-1, 3)
