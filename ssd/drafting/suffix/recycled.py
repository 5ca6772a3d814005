"""The target's own candidates at a position of a draft, as it gave them where the same tokens stood before."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Int64s, inlined
from ssd.compiled.records import Int64, Record
from ssd.drafting.suffix.successors import NO_ENTRY, SUCCESSORS, row_after_one, row_after_two, successors_at

NOT_ASKED: Final = -1
"""The number of candidates where they were not looked up."""


class Recycled(Record):
    """One entry of a `SuccessorTable`.

    ``count`` : its tokens, 0 where there is no entry, NOT_ASKED where none was sought. ``is_pair`` : it is known after
    two tokens. ``tokens``, ``shares`` : as there.
    """

    count: Int64
    is_pair: Int64
    tokens: Annotated[Int64s, np.int64, SUCCESSORS]
    shares: Annotated[Int64s, np.int64, SUCCESSORS]


@inlined
def recall(successors: int, earlier: int, before: int, recycled: Recycled) -> None:
    """Make the entry after two tokens, else after the last one, ``recycled``; ``earlier`` is NOTHING for no token.

    ``successors`` : address of the table. O(1).
    """
    recycled.count = 0
    if before < 0:
        return
    table = successors_at(successors)
    row = row_after_two(table, earlier, before) if earlier >= 0 else NO_ENTRY
    recycled.is_pair = int(row != NO_ENTRY)
    if row == NO_ENTRY:
        row = row_after_one(table, before)
    if row == NO_ENTRY:
        return
    entry, count = table.entries[row], 0
    while count < SUCCESSORS and entry.tokens[count] >= 0:
        recycled.tokens[count], recycled.shares[count] = entry.tokens[count], entry.shares[count]
        count += 1
    recycled.count = count


@inlined
def rank_of(recycled: Recycled, token: int) -> int:
    """Where in the entry a token stands, SUCCESSORS where it does not."""
    for rank in range(recycled.count):
        if recycled.tokens[rank] == token:
            return rank
    return SUCCESSORS
