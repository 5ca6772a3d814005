"""Immutable text with the suffix array of its reversal: what is stored, sorted once.

The text is packed: token ids in as few bytes as their largest needs, laid out so that texts compare backwards eight
bytes at a time. An id is stored as the code id + 1, ``SEPARATOR`` as 0, little-endian in ``width`` bytes, between two
guards of zeros. The bytes before any position, read from the last to the first, are then the codes before it from the
last to the first, each from its highest byte to its lowest. So one 64-bit number loaded just before a position orders
it among others by the text before it, whatever the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import SegmentCorrupt
from ssd.retrieval.file_bytes import GuardedMap

Tokens = npt.NDArray[np.int32]
"""Token ids, and ``SEPARATOR`` where sequences end."""
Bytes = npt.NDArray[np.uint8]

WIDTHS = (2, 3, 4)
GUARD_BYTES = 64
"""Zeros before the first code and at least as many after the last: a compare may read on without looking."""

_BLOCK_TOKENS = 1 << 16  # converted at a time, so that no copy of the whole text is needed


def width_for(largest_id: int) -> int:
    """The narrowest width, in bytes, that holds the code of ``largest_id`` >= -1."""
    if largest_id + 1 < 1 << 16:
        return 2
    return 3 if largest_id + 1 < 1 << 24 else 4


def packed_size(num_tokens: int, width: int) -> int:
    """Bytes of a packed text with its guards, a multiple of 64."""
    return 2 * GUARD_BYTES + -(-num_tokens * width // GUARD_BYTES) * GUARD_BYTES


def pack(tokens: Tokens, width: int) -> Bytes:
    """uint8[packed_size(n, width)] of ``tokens`` : int32[n], each >= -1 with a code that fits ``width``. O(n)."""
    packed = np.zeros(packed_size(len(tokens), width), np.uint8)
    codes = packed[GUARD_BYTES : GUARD_BYTES + width * len(tokens)].reshape(-1, width)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS].astype("<u4") + np.uint32(1)
        codes[start : start + len(block)] = block.view(np.uint8).reshape(-1, 4)[:, :width]
    return packed


def unpack(packed: Bytes, num_tokens: int, width: int, out: Tokens | None = None, *, start: int = 0) -> Tokens:
    """``num_tokens`` of the tokens that ``pack`` was given, from the ``start``-th on. O(num_tokens).

    ``out`` : int32[num_tokens] that is filled and returned; None makes a new array.
    """
    first = GUARD_BYTES + width * start
    codes = packed[first : first + width * num_tokens].reshape(-1, width)
    tokens = np.empty(num_tokens, np.int32) if out is None else out
    for done in range(0, num_tokens, _BLOCK_TOKENS):
        block = codes[done : done + _BLOCK_TOKENS]
        wide = np.zeros((len(block), 4), np.uint8)
        wide[:, :width] = block
        tokens[done : done + len(block)] = (wide.view("<u4")[:, 0] - np.uint32(1)).view(np.int32)
    return tokens


SEPARATOR = -1
"""Ends every stored sequence. Never a token id, so no match and no continuation runs across it."""

FENCE_STEP = 32
"""One post of a segment's fence for this many positions: a quarter byte a token."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Immutable text with the suffix array of its reversal; the arrays may lie in a file that is mapped.

    ``text`` : uint8, whole sequences, each closed by ``SEPARATOR``, packed in ``width`` bytes a token, see above.
    ``order`` : int32[n], the positions 1..n of the text ordered by what stands before them, read backwards from the
        position. Positions preceded by the same tokens are neighbours, and the more tokens agree the nearer they are.
    ``fence`` : uint64[ceil(n / FENCE_STEP)], the eight bytes of packed text before every FENCE_STEP-th position of the
        order: a search begins there, in memory that lies together.
    ``start`` : absolute ring position of the first token, or None for a static segment, which the ring never evicts.
    ``segment_id`` : unique name within its directory.
    ``checksum`` : xxh3-64 of ``text`` when it was built or read; what is made of the text later is made of these bytes.
    ``shared`` : the mapped file that the arrays lie in, None for memory that is this process's own.
    """

    text: Bytes
    order: Tokens
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
    def tokens(self) -> Tokens:
        """int32[n], unpacked: a new array at every call. O(n)."""
        return unpack(self.text, len(self.order), self.width)


def concatenate(segments: Sequence[Segment]) -> Tokens:
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


def checked_text(segment: Segment) -> Bytes:
    """The segment's text, or a copy where others can change it; raises SegmentCorrupt when it was changed. O(n)."""
    text = segment.text if segment.shared is None else segment.text.copy()  # what is checked is what is used
    if segment.checksum is not None and text_checksum(text) != segment.checksum:
        raise SegmentCorrupt(
            f"the text of segment {segment.segment_id} was changed in memory after it was checked: it is not used "
            "any more. If its file was not written to, suspect the machine's memory"
        )
    return text


def text_checksum(text: Bytes) -> int:
    """xxh3-64 of a packed text, its guards included."""
    return xxhash.xxh3_64_intdigest(text.data)
