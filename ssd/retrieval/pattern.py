"""The tail of a context, packed as the text of a segment is, and its comparison with the text before a position."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import TokenIds, inlined, kernel, leading_zeros, load_uint64, uint8_array
from ssd.errors import CacheError
from ssd.retrieval.packed import WIDTHS

MAX_MATCH_LENGTH: Final = 256
"""No longer match is looked up."""

PATTERN_BYTES: Final = (MAX_MATCH_LENGTH + 4) * WIDTHS[-1]
"""Room for one context, packed in one width."""

PATTERNS_BYTES: Final = len(WIDTHS) * PATTERN_BYTES
"""Room for it in every width."""

_INT32: Final = np.dtype(np.int32)
_LARGEST_ID: Final = np.iinfo(np.int32).max


def as_context(context: npt.NDArray[Any]) -> TokenIds:
    """``context``, integers[n], as the kernels take it: int32, contiguous, aligned; itself when it is so already.

    An id that int32 cannot hold is stored nowhere: it becomes -1, and only what comes after it is looked up. Raises
    CacheError for what is no sequence of integers. O(1), or O(n) when it must be copied.
    """
    if context.dtype is _INT32 and context.ndim == 1 and context.flags.carray:
        return context
    if context.ndim != 1 or context.dtype.kind not in "iu":
        raise CacheError(
            f"a context is one sequence of integers, got {context.dtype}{list(context.shape)}: pass int32[n]"
        )
    if context.dtype.itemsize > 4 or context.dtype.kind == "u":
        context = np.where((context >= 0) & (context <= _LARGEST_ID), context, -1)
    return np.require(context, np.int32, ["C", "A"])


@kernel
def pack_context(context: TokenIds, length: int, width: int, pattern: int) -> int:
    """Pack the last ``length`` tokens (ids >= 0) so that they end at address ``pattern``; returns how many bytes.

    Fewer when a code does not fit ``width``: no segment of that width holds such a token. A zero word precedes them.
    """
    n = len(context)
    out = uint8_array(pattern - PATTERN_BYTES, PATTERN_BYTES)
    at = PATTERN_BYTES
    for i in range(length):
        code = np.int64(context[n - 1 - i]) + 1
        if code >> (8 * width) != 0:
            break
        at -= width
        for byte in range(width):
            out[at + byte] = (code >> (8 * byte)) & 0xFF
    out[at - 8 : at] = 0
    return PATTERN_BYTES - at


@inlined
def num_agreeing(text: int, pattern: int, num_bytes: int, width: int) -> int:
    """Whole tokens on which the text before ``text`` agrees with all ``num_bytes`` before ``pattern``."""
    agreeing = 0
    while agreeing < num_bytes:
        different = load_uint64(text - agreeing - 8) ^ load_uint64(pattern - agreeing - 8)
        if different != np.uint64(0):
            agreeing += leading_zeros(different) >> 3
            break
        agreeing += 8
    return min(agreeing, num_bytes) // width
