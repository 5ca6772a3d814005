"""Lookup in a text that is not sorted: the ring's tail, a request's own text."""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.compiled.addresses import Int64s, TokenIds, kernel, leading_zeros

MAX_SCAN_HITS: Final = 4096
"""A scan looks at this many occurrences of the last token, the most recent ones."""

MAX_SCAN_TOKENS: Final = 1 << 16
"""A scan looks at this many tokens, the most recent ones: a bound on the time, far above the size of a tail."""

_BLOCK: Final = 64  # tokens compared at once, a bit each, in a loop that compiles to vector instructions


@kernel
def pattern_length(context: TokenIds, max_length: int) -> int:
    """Tokens of the context's tail that can be looked up: up to ``max_length``, before the first id that is no
    token's."""
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
    """Find where the last token of ``context`` stands in [start, stop) of ``text`` and how much before agrees.

    ``text`` : a ring of a power of two, position p at ``text[p & (len(text) - 1)]``; or a plain array, when stop <=
    len(text). Writes, most recent first, the position after each occurrence and the agreeing length (1..max_length),
    and returns how many, at most ``len(positions)``. Looks at the most recent MAX_SCAN_TOKENS positions.
    O(stop - start + occurrences * max_length), the first term at several tokens a cycle.
    """
    n, found = len(context), 0
    if max_length < 1:
        return 0
    size = len(text)
    mask = -1 if stop <= size else size - 1  # a plain array has no mask
    last = context[n - 1]
    lowest = max(start, stop - MAX_SCAN_TOKENS)
    block_stop = stop
    while block_stop > lowest:
        # A block never crosses the ring's end, so that it is contiguous.
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
