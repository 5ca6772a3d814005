"""What the target held likely lately, a table a namespace, and one for a request that shares with nobody.

Kept are the most probable successors that the target gave lately, after single tokens and after pairs of them.

Token recycling (Luo et al. 2024, arXiv 2408.08696, section 3.1): every scored position says what the target holds
likely after a token, also where the token was a rejected candidate; kept for the next time, it drafts text that was
never said before. There one entry a token; here another for each pair of tokens, which says more and is known less
often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from typing import Annotated, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64, Int64s, Record, TokenIds, address, dtype_of, inlined, kernel, view_of
from ssd.drafting.protocol import ScoredPass
from ssd.retrieval.cache_state import LearnedState

SUCCESSORS: Final = 8
"""Kept of each entry, the most probable first."""

AFTER_ONE: Final = 1 << 14

AFTER_TWO: Final = 1 << 16
"""Entries; the newest of those that share a place takes it."""

SHARES: Final = 8
"""Of the probability of all kept together, see `share_level`."""

LEAST_SHARE: Final = 1 / 256
"""Tokens that have no more are left out."""

NO_ENTRY: Final = -1
Int8s = npt.NDArray[np.int8]
Float32s = npt.NDArray[np.float32]


class SuccessorEntry(Record):
    """What is likely after a token or a pair of them, in one place of memory.

    ``key`` : of which, 0 of none. ``tokens`` : -1 where fewer are known. ``shares`` : 0..SHARES - 1.
    """

    key: Int64
    tokens: Annotated[TokenIds, np.int32, SUCCESSORS]
    shares: Annotated[Int8s, np.int8, SUCCESSORS]


class SuccessorTable(Record):
    """What the target said lately in one namespace. Memory that is all zero holds nothing.

    The first AFTER_ONE ``entries`` are keyed by a token, the others by a pair.
    """

    entries: Annotated[Sequence[SuccessorEntry], SuccessorEntry, AFTER_ONE + AFTER_TWO]


successors_at = view_of(SuccessorTable)


@inlined
def _row_after_one(token: int) -> int:
    return ((token * 40503) >> 2) & (AFTER_ONE - 1)


@inlined
def _row_after_two(before: int, token: int) -> int:
    return AFTER_ONE + ((((token * 40503) ^ (before * 69069 + (before >> 7))) >> 1) & (AFTER_TWO - 1))


@inlined
def _key(token: int) -> int:
    return token + 1


@inlined
def _pair_key(before: int, token: int) -> int:
    return ((before << 32) | token) + 1


@inlined
def row_after_one(table: SuccessorTable, token: int) -> int:
    """The row of what follows ``token``, NO_ENTRY where that is not known. O(1)."""
    if token < 0:
        return NO_ENTRY
    row = _row_after_one(token)
    return row if table.entries[row].key == _key(token) else NO_ENTRY


@inlined
def row_after_two(table: SuccessorTable, before: int, token: int) -> int:
    """The row of what follows ``token`` behind ``before``, NO_ENTRY where that is not known. O(1)."""
    if before < 0 or token < 0:
        return NO_ENTRY
    row = _row_after_two(before, token)
    return row if table.entries[row].key == _pair_key(before, token) else NO_ENTRY


@inlined
def share_level(share: float) -> int:
    """A share on a scale that is logarithmic at both ends, 0..SHARES - 1; -1 where it is left out.

    The bounds are LEAST_SHARE, 1/32, 1/16, 1/8, 1/4, 1/2, 3/4 and 7/8, none of which reaches the level above it: below
    a half each level doubles the chance of the token, above it halves that of all others. NaN is left out.
    """
    if not share > LEAST_SHARE:
        return -1
    return (
        (share > 1 / 32)
        + (share > 1 / 16)
        + (share > 1 / 8)
        + (share > 1 / 4)
        + (share > 1 / 2)
        + (share > 3 / 4)
        + (share > 7 / 8)
    )


@inlined
def _write(entry: SuccessorEntry, key: int, ids: TokenIds, logits: Float32s) -> None:
    """Make ``entry`` that of ``key``; where nothing is known, leave what is there."""
    total = 0.0
    for i in range(SUCCESSORS):
        if ids[i] >= 0:
            total += exp(float(logits[i]) - float(logits[0]))
    size = 0
    for i in range(SUCCESSORS):
        level = share_level(exp(float(logits[i]) - float(logits[0])) / total) if ids[i] >= 0 else -1
        if level < 0:
            break
        entry.tokens[size], entry.shares[size] = ids[i], level
        size += 1
    if size:
        entry.key = key
        entry.tokens[size:] = -1


@kernel
def learn_successors(
    tables: Int64s,
    before: TokenIds,
    fed: Int64s,
    counts: Int64s,
    parents: Int64s,
    is_tree: bool,
    top_ids: TokenIds,
    top_logits: Float32s,
) -> None:
    """Enter what a pass said, in order of rows and positions. O(positions), two entries each.

    ``tables`` : int64[B], of each row the address of the table that learns from it, 0 for none. ``parents`` : looked at
    where ``is_tree``. The others as in ``ScoredPass``.
    """
    for b in range(len(tables)):
        if tables[b] == 0:
            continue
        table = successors_at(tables[b])
        for t in range(counts[b]):
            token, previous = fed[b, t], int(before[b])
            if t > 0:
                previous = fed[b, parents[b, t] if is_tree else t - 1]
            ids, logits = top_ids[b, t], top_logits[b, t]
            if token >= 0:
                _write(table.entries[_row_after_one(token)], _key(token), ids, logits)
                if previous >= 0:
                    row, key = _row_after_two(previous, token), _pair_key(previous, token)
                    _write(table.entries[row], key, ids, logits)


T = TypeVar("T")
MOST_TABLES: Final = 16

IDLE_PASSES: Final = 64
"""Passes that a namespace must not have been part of before another's table takes the place of its own: were there a
few more busy namespaces than tables, all would lose theirs before they are read."""


class NamespaceTables(Generic[T]):
    """Tables by namespace, MOST_TABLES at most. No locks: owned by one thread.

    A table is forgotten with its namespace; where there are too many, the one used longest ago gives way, and none that
    is in use.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        """``make`` : a new table."""
        self._make = make
        self._tables: WeakKeyDictionary[LearnedState, T] = WeakKeyDictionary()
        self._last_passes: WeakKeyDictionary[LearnedState, int] = WeakKeyDictionary()
        self._num_passes = self._full_until = 0

    def begin_pass(self) -> None:
        """Another pass has been: by passes it is told how long ago a table was used."""
        self._num_passes += 1

    def get(self, learned: LearnedState) -> T | None:
        """The table of a namespace, if it has one, which is in use in this pass. O(1)."""
        table = self._tables.get(learned)
        if table is not None:
            self._last_passes[learned] = self._num_passes
        return table

    def used(self, learned: LearnedState) -> T | None:
        """The table of a namespace that has something to enter, made if there is room. O(1) but for a new one."""
        if learned not in self._tables and self._has_room():
            self._tables[learned] = self._make()
        return self.get(learned)

    def _has_room(self) -> bool:
        """Whether there may be another table, one having been forgotten for it if need be."""
        if len(self._tables) < MOST_TABLES:
            return True
        if self._num_passes < self._full_until:
            return False
        oldest = min(self._tables, key=self._last_passes.__getitem__)
        self._full_until = self._last_passes[oldest] + IDLE_PASSES
        if self._num_passes < self._full_until:
            return False
        del self._tables[oldest]
        return True


class _Table:
    """Memory of zeros, which the system gives as far as it is written."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, dtype_of(SuccessorTable))
        self.address = address(self._memory)


class NamespaceSuccessors:
    """Tables by namespace, and of requests that have none by request. No locks: owned by the drafter's thread.

    What one namespace said is drafted in no other, not where its index is lent either. A request without a namespace
    learns from itself alone, and is forgotten when it ends; one that is not to be learned from drafts from what its
    namespace knows and adds nothing. Nothing is kept on disk: a few passes make it anew. All tables of namespaces
    take 63 MB at most, as far as they are written, and there are as many again of requests of their own.
    """

    def __init__(self) -> None:
        self._tables = NamespaceTables(_Table)
        self._own: dict[str, _Table] = {}

    def of(self, learned: LearnedState | None, request_id: str) -> int:
        """Address of what a request drafts from, 0 for nothing; holds until the next ``learn`` or ``ended``. O(1)."""
        found = self._own.get(request_id) if learned is None else self._tables.get(learned)
        return 0 if found is None else found.address

    def learn(self, scored: ScoredPass) -> None:
        """Enter what a pass said, each row in the table that its request drafts from. O(positions)."""
        self._tables.begin_pass()
        tables, table = list[int](), 0
        last: LearnedState | None = None
        for count, *row in zip(
            scored.num_positions.tolist(),
            scored.learned,
            scored.request_ids,
            scored.allow_caching.tolist(),
            strict=True,
        ):
            learned, _, allow_caching = row
            if not count:
                table, last = 0, None
            elif (
                learned is None or not allow_caching or learned is not last
            ):  # else as the row before: most are of one namespace
                table, last = self._table_for(*row), learned if allow_caching else None
            tables.append(table)
        parents = scored.input_ids if scored.parents is None else scored.parents
        learn_successors(
            np.array(tables, np.int64),
            scored.previous_ids,
            scored.input_ids,
            scored.num_positions,
            parents,
            scored.parents is not None,
            scored.top_ids,
            scored.top_logits,
        )

    def ended(self, request_id: str) -> None:
        """Forget what is a request's own."""
        self._own.pop(request_id, None)

    def _table_for(self, learned: LearnedState | None, request_id: str, allow_caching: bool) -> int:
        """Address of the table that a row is entered in, made if there is room; 0 for none."""
        if learned is None:
            own = self._own.get(request_id)
            if own is None and len(self._own) < MOST_TABLES:
                own = self._own[request_id] = _Table()
            return 0 if own is None else own.address
        if not allow_caching:
            return 0
        table = self._tables.used(learned)
        return 0 if table is None else table.address
