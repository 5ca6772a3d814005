"""The most probable successors that the target gave lately, after single tokens and after pairs of them.

Token recycling (Luo et al. 2024, arXiv 2408.08696, section 3.1): every scored position says what the target holds
likely after a token, also where the token was a rejected candidate; kept for the next time, it drafts text that was
never said before. There one entry a token; here another for each pair of tokens, which says more and is known less
often.
"""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, inlined
from ssd.compiled.records import Record, view_of

SUCCESSORS: Final = 8
"""Kept of each entry, the most probable first."""

AFTER_ONE: Final = 1 << 14
AFTER_TWO: Final = 1 << 16
"""Entries; the newest of those that share a place takes it."""

SHARES: Final = 8
"""Of the probability of all kept together, on a logarithmic scale: 0 the least, 7 nearly all."""

NO_ENTRY: Final = -1

Int8s = npt.NDArray[np.int8]


class SuccessorTable(Record):
    """What the target said lately in one namespace.

    Row i of ``tokens`` and ``shares`` belongs to ``keys[i]``; NO_ENTRY where nothing is. The first AFTER_ONE rows are
    keyed by a token, the others by a pair. ``tokens`` : -1 where fewer are known. ``shares`` : 0..SHARES - 1.
    """

    keys: Annotated[Int64s, np.int64, AFTER_ONE + AFTER_TWO]
    tokens: Annotated[TokenIds, np.int32, (AFTER_ONE + AFTER_TWO, SUCCESSORS)]
    shares: Annotated[Int8s, np.int8, (AFTER_ONE + AFTER_TWO, SUCCESSORS)]


successors_at = view_of(SuccessorTable)


@inlined
def _row_after_one(token: int) -> int:
    return ((token * 40503) >> 2) & (AFTER_ONE - 1)


@inlined
def _row_after_two(before: int, token: int) -> int:
    return AFTER_ONE + ((((token * 40503) ^ (before * 69069 + (before >> 7))) >> 1) & (AFTER_TWO - 1))


@inlined
def _pair_key(before: int, token: int) -> int:
    return (before << 32) | token


@inlined
def row_after_one(table: SuccessorTable, token: int) -> int:
    """The row of what follows ``token``, NO_ENTRY where that is not known. O(1)."""
    row = _row_after_one(token)
    return row if table.keys[row] == token else NO_ENTRY


@inlined
def row_after_two(table: SuccessorTable, before: int, token: int) -> int:
    """The row of what follows ``token`` behind ``before``, NO_ENTRY where that is not known. O(1)."""
    row = _row_after_two(before, token)
    return row if table.keys[row] == _pair_key(before, token) else NO_ENTRY
