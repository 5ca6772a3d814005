"""Whether the order of a segment is what sorting its text gives, without sorting it again.

An order is right if it names every position once and each neighbour's text goes on as the order itself says: of two
positions the one whose last token is smaller comes first, and of equal ones that whose text before that token does
(Burkhardt and Kaerkkaeinen 2003, "Fast lightweight suffix array construction and checking", section 3.3).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.compiled.addresses import TokenIds, address, int32_array, kernel, load_uint32
from ssd.retrieval.packed import GUARD_BYTES
from ssd.retrieval.segment import Segment

RIGHT: Final = -1
"""No rank is wrong."""


@kernel
def _first_wrong(text: int, width: int, order_address: int, n: int, ranks: TokenIds) -> int:
    order, mask = int32_array(order_address, n), (1 << (8 * width)) - 1
    ranks[:] = -1
    for rank in range(n):
        position = np.int64(order[rank])
        if position < 1 or position > n or ranks[position] >= 0:
            return rank
        ranks[position] = rank
    for rank in range(1, n):
        before, here = np.int64(order[rank - 1]), np.int64(order[rank])
        code_before = load_uint32(text + width * int(before - 1)) & mask
        code_here = load_uint32(text + width * int(here - 1)) & mask
        if code_before > code_here:
            return rank
        # ranks[0] is -1: a text that ends precedes those it is the beginning of.
        if code_before == code_here and ranks[before - 1] >= ranks[here - 1]:
            return rank
    return RIGHT


def first_wrong(segment: Segment) -> int:
    """The first rank at which a segment's order is not that of its text, RIGHT where there is none.

    O(n), about 0.1 us a token; 4 bytes a token while it lasts. The guards of the text must be whole, as
    ``open_segment`` checks.
    """
    n = len(segment)
    return int(
        _first_wrong(
            address(segment.text) + GUARD_BYTES,
            segment.width,
            address(segment.order),
            n,
            np.empty(n + 1, np.int32),
        )
    )
