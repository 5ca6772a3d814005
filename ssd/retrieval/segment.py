"""Immutable text with the suffix array of its reversal: what is stored, sorted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import SegmentCorrupt
from ssd.retrieval.file_bytes import GuardedMap
from ssd.retrieval.packed import unpack

SEPARATOR = -1
"""Ends every stored sequence. Never a token id, so no match and no continuation runs across it."""

FENCE_STEP = 32
"""One post of a segment's fence for this many positions: a quarter byte a token."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Immutable text with the suffix array of its reversal; the arrays may lie in a file that is mapped.

    ``text`` : uint8, whole sequences, each closed by ``SEPARATOR``, packed in ``width`` bytes a token (see ``packed``).
    ``order`` : int32[n], the positions 1..n of the text ordered by what stands before them, read backwards from the
        position. Positions preceded by the same tokens are neighbours, and the more tokens agree the nearer they are.
    ``fence`` : uint64[ceil(n / FENCE_STEP)], the eight bytes of packed text before every FENCE_STEP-th position of the
        order: a search begins there, in memory that lies together.
    ``start`` : absolute ring position of the first token, or None for a static segment, which the ring never evicts.
    ``segment_id`` : unique name within its directory.
    ``checksum`` : xxh3-64 of ``text`` when it was built or read; what is made of the text later is made of these bytes.
    ``shared`` : the mapped file that the arrays lie in, None for memory that is this process's own.
    """

    text: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int32]
    fence: npt.NDArray[np.uint64]
    width: int
    start: int | None
    segment_id: str
    checksum: int | None = None
    shared: GuardedMap | None = None

    def __len__(self) -> int:
        return len(self.order)

    @property
    def stop(self) -> int | None:
        """One past the last absolute ring position, or None for a static segment."""
        return None if self.start is None else self.start + len(self.order)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32[n], unpacked: a new array at every call. O(n)."""
        return unpack(self.text, len(self.order), self.width)


def concatenate(segments: Sequence[Segment]) -> npt.NDArray[np.int32]:
    """int32: the tokens of ``segments``, one after the other. O(their sum).

    Raises SegmentCorrupt when a text is not what its checksum says: what is made of it would have a right one.
    """
    tokens = np.empty(sum(map(len, segments)), np.int32)
    start = 0
    for segment in segments:
        text = checked_text(segment)
        unpack(text, len(segment), segment.width, tokens[start : start + len(segment)])
        start += len(segment)
    return tokens


def checked_text(segment: Segment) -> npt.NDArray[np.uint8]:
    """The segment's text, or a copy where others can change it; raises SegmentCorrupt when it was changed. O(n)."""
    text = segment.text if segment.shared is None else segment.text.copy()  # what is checked is what is used
    if segment.checksum is not None and text_checksum(text) != segment.checksum:
        raise SegmentCorrupt(
            f"the text of segment {segment.segment_id} was changed in memory after it was checked: it is not used "
            "any more. If its file was not written to, suspect the machine's memory"
        )
    return text


def text_checksum(text: npt.NDArray[np.uint8]) -> int:
    """xxh3-64 of a packed text, its guards included."""
    return xxhash.xxh3_64_intdigest(text.data)
