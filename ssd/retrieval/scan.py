"""Scan a text without a suffix array, such as the memtable, for occurrences of the last tokens of a context."""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.jit.addresses import Int64s, TokenIds, kernel, leading_zeros

MAX_SCAN_HITS: Final = 4096
"""The maximum number of occurrences of a context's last token that a scan of a text examines, most recent first."""

MAX_SCAN_TOKENS: Final = 1 << 16
"""The maximum number of tokens, the most recent ones, that a scan of a text examines; it bounds the time of a scan."""

_BLOCK: Final = 64  # tokens per comparison, one bit each; the loop compiles to vector instructions


@kernel
def pattern_length(context: TokenIds, max_length: int) -> int:
    """Return the number of tokens at the end of a context to search for: at most ``max_length``, all with ids >= 0."""
    n = len(context)
    longest = min(n, max_length)
    for length in range(longest):
        if context[n - 1 - length] < 0:
            return length
    return longest


@kernel
def scan(
    text: TokenIds, start: int, stop: int, context: TokenIds, max_length: int, positions: Int64s, lengths: Int64s
) -> int:
    """Find the occurrences of a context's last token in positions [start, stop) of a text; return their number.

    ``text`` is a ring buffer whose length is a power of two, with position p at ``text[p & (len(text) - 1)]``, or a
    plain array if stop <= len(text). ``positions`` is filled with the position after each occurrence, the most recent
    first, and ``lengths`` with the match lengths, 1..max_length.

    Examines at most the MAX_SCAN_TOKENS most recent positions. O(stop - start + occurrences * max_length); the first
    term takes a fraction of a CPU cycle per token.
    """
    n, found = len(context), 0
    if max_length < 1:
        return 0
    size = len(text)
    mask = -1 if stop <= size else size - 1  # a plain array needs no mask
    last = context[n - 1]
    lowest = max(start, stop - MAX_SCAN_TOKENS)
    block_stop = stop
    while block_stop > lowest:
        # A block never crosses the end of the ring, so that it is contiguous.
        at = ((block_stop - 1) & mask) + 1
        count = min(_BLOCK, block_stop - lowest, at)
        block = text[at - count : at]
        equal = np.uint64(0)
        for i in range(count):
            equal |= np.uint64(block[i] == last) << np.uint64(i)
        while equal != np.uint64(0):
            i = 63 - leading_zeros(equal)
            equal ^= np.uint64(1) << np.uint64(i)
            position = block_stop - count + i
            length, longest = 1, min(max_length, position - start + 1)
            while length < longest and text[(position - length) & mask] == context[n - 1 - length]:
                length += 1
            positions[found] = position + 1
            lengths[found] = length
            found += 1
            if found == len(positions):
                return found
        block_stop -= count
    return found
