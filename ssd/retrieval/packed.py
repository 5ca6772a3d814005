"""Token ids in as few bytes as their largest needs, laid out so that texts compare backwards eight bytes at a time.

An id is stored as the code id + 1, ``SEPARATOR`` as 0, little-endian in ``width`` bytes, between two guards of zeros.
The bytes before any position, read from the last to the first, are then the codes before it from the last to the
first, each from its highest byte to its lowest. So one 64-bit number loaded just before a position orders it among
others by the text before it, whatever the width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
