"""Token recycling: draft the target's earlier top-k next tokens after single tokens and after pairs of tokens.

Every position of a forward pass has logits, also the positions of rejected draft tokens. If the token at a position
occurs again, the top-k tokens of that position are drafted. Thus text can be drafted that was never generated before
(Luo et al. 2024, arXiv 2408.08696, section 3.1). The paper keeps one entry per token; here there is also one per pair
of tokens, which is more specific but known less often.

Each namespace has a table, and so has each request without a namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from typing import Annotated, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ssd.drafting.protocol import ScoredPass
from ssd.jit.addresses import Int64, Int64s, Record, TokenIds, address, dtype_of, inlined, kernel, view_of
from ssd.retrieval.cache_state import LearnedState

TOP_K: Final = 8
"""The number of the target's most probable next tokens that token recycling stores per entry."""

NUM_TOKEN_ENTRIES: Final = 1 << 14

NUM_PAIR_ENTRIES: Final = 1 << 16
"""The number of entries for pairs of tokens in a token-recycling table; a hash of the pair selects the entry.

The tokens after a pair replace those of another pair with the same hash. NUM_TOKEN_ENTRIES is the number of entries for
single tokens.
"""

RECYCLED_SHARES: Final = 8
"""The number of buckets for a token's probability among the top-k tokens of its token-recycling entry."""

TYPICAL_SHARE: Final = np.array([0.015, 0.045, 0.09, 0.18, 0.36, 0.62, 0.81, 0.95])
"""For each bucket of `share_level`, the probability that stands for all probabilities in this bucket."""

LEAST_SHARE: Final = 1 / 256
"""Token recycling stores a token only if its probability among the top-k tokens is greater than this."""

NO_ENTRY: Final = -1
Int8s = npt.NDArray[np.int8]
Float32s = npt.NDArray[np.float32]


class RecyclingEntry(Record):
    """The target's top-k next tokens after one token or after one pair of tokens, stored for token recycling.

    Attributes:
        key: The token or the pair; 0 for an empty entry.
        tokens: The top-k tokens, most probable first, padded with -1.
        shares: The bucket of each token's probability among the top-k tokens, 0..RECYCLED_SHARES - 1.
    """

    key: Int64
    tokens: Annotated[TokenIds, np.int32, TOP_K]
    shares: Annotated[Int8s, np.int8, TOP_K]


class RecyclingTable(Record):
    """The table of token recycling: the target's top-k next tokens after tokens and pairs of tokens, for one namespace.

    The first NUM_TOKEN_ENTRIES entries are for single tokens, the further entries for pairs. Zeroed memory is an empty
    table.
    """

    entries: Annotated[Sequence[RecyclingEntry], RecyclingEntry, NUM_TOKEN_ENTRIES + NUM_PAIR_ENTRIES]


recycling_table_at = view_of(RecyclingTable)


@inlined
def _place_of_token(token: int) -> int:
    return ((token * 40503) >> 2) & (NUM_TOKEN_ENTRIES - 1)


@inlined
def _place_of_pair(before: int, token: int) -> int:
    return NUM_TOKEN_ENTRIES + ((((token * 40503) ^ (before * 69069 + (before >> 7))) >> 1) & (NUM_PAIR_ENTRIES - 1))


@inlined
def _key(token: int) -> int:
    return token + 1


@inlined
def _pair_key(before: int, token: int) -> int:
    return ((before << 32) | token) + 1


@inlined
def entry_after_token(table: RecyclingTable, token: int) -> int:
    """Return the index of the entry with the top-k tokens that followed ``token``; NO_ENTRY if there is none."""
    if token < 0:
        return NO_ENTRY
    place = _place_of_token(token)
    return place if table.entries[place].key == _key(token) else NO_ENTRY


@inlined
def entry_after_pair(table: RecyclingTable, before: int, token: int) -> int:
    """Return the index of the entry with the top-k tokens after the pair ``before``, ``token``; NO_ENTRY if none."""
    if before < 0 or token < 0:
        return NO_ENTRY
    place = _place_of_pair(before, token)
    return place if table.entries[place].key == _pair_key(before, token) else NO_ENTRY


@inlined
def share_level(share: float) -> int:
    """Return the bucket of a token's probability among the top-k tokens, from 0 up; -1 if it is too small to store.

    ``share`` is the token's probability divided by the sum over the top-k tokens. The bounds are LEAST_SHARE, 1/32,
    1/16, 1/8, 1/4, 1/2, 3/4 and 7/8. From 1/32 to 1/2 each bound is twice the bound before it. From 1/2 on, each bound
    leaves half as much for all other tokens. A share at a bound belongs to the bucket below.
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
def _write(entry: RecyclingEntry, key: int, ids: TokenIds, logits: Float32s) -> bool:
    """Store top-k tokens in an entry, and return True; leave the entry unchanged if no token has a share."""
    total = 0.0
    for i in range(TOP_K):
        if ids[i] >= 0:
            total += exp(float(logits[i]) - float(logits[0]))
    size = 0
    for i in range(TOP_K):
        level = share_level(exp(float(logits[i]) - float(logits[0])) / total) if ids[i] >= 0 else -1
        if level < 0:
            break
        entry.tokens[size], entry.shares[size] = ids[i], level
        size += 1
    if size:
        entry.key = key
        entry.tokens[size:] = -1
    return size > 0


@inlined
def _copy(source: RecyclingEntry, entry: RecyclingEntry, key: int) -> None:
    entry.key = key
    for i in range(TOP_K):
        entry.tokens[i], entry.shares[i] = source.tokens[i], source.shares[i]


@kernel
def learn_top_tokens(
    tables: Int64s,
    previous_ids: TokenIds,
    input_ids: Int64s,
    num_positions: Int64s,
    parents: Int64s,
    is_tree: bool,
    top_ids: TokenIds,
    top_logits: Float32s,
) -> None:
    """Write the target's top-k tokens at every position of a forward pass into token-recycling tables.

    ``tables`` (int64[B]) holds for each row the address of the `RecyclingTable` that learns from the row; 0 for none.
    The other arguments are fields of `ScoredPass`; ``parents`` is used only if ``is_tree``.
    """
    for b in range(len(tables)):
        if tables[b] == 0:
            continue
        table = recycling_table_at(tables[b])
        for t in range(num_positions[b]):
            token, previous = input_ids[b, t], int(previous_ids[b])
            if t > 0:
                previous = input_ids[b, parents[b, t] if is_tree else t - 1]
            ids, logits = top_ids[b, t], top_logits[b, t]
            if token < 0:
                continue
            entry = table.entries[_place_of_token(token)]
            if _write(entry, _key(token), ids, logits) and previous >= 0:
                _copy(entry, table.entries[_place_of_pair(previous, token)], _pair_key(previous, token))


T = TypeVar("T")
MAX_TABLES: Final = 16

IDLE_PASSES: Final = 64
"""The table of a namespace may be replaced only after this many forward passes in which no request used the table.

Without this limit, if a few more namespaces than tables are busy, every table would be replaced before it is read.
"""


class NamespaceTables(Generic[T]):
    """A collection of at most MAX_TABLES tables, such as token-recycling tables, one per namespace; for one thread.

    A table is deleted with its namespace. If there are too many tables, the least recently used one is replaced, unless
    it was used in the last IDLE_PASSES passes. ``make`` creates a table.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._tables: WeakKeyDictionary[LearnedState, T] = WeakKeyDictionary()
        self._last_passes: WeakKeyDictionary[LearnedState, int] = WeakKeyDictionary()
        self._num_passes = self._full_until = 0

    def begin_pass(self) -> None:
        """Increment the number of forward passes, by which the age of unused tables is measured."""
        self._num_passes += 1

    def get(self, learned: LearnedState) -> T | None:
        """Return a namespace's table and mark it as recently used; return None if the namespace has no table."""
        table = self._tables.get(learned)
        if table is not None:
            self._last_passes[learned] = self._num_passes
        return table

    def get_or_create(self, learned: LearnedState) -> T | None:
        """Return a namespace's table, created if necessary, and mark it as recently used.

        Returns None if a new table would exceed MAX_TABLES and no table may be replaced yet.
        """
        if learned not in self._tables and self._has_room():
            self._tables[learned] = self._make()
        return self.get(learned)

    def _has_room(self) -> bool:
        """Return whether there is room for another table; delete the longest unused table if needed and allowed."""
        if len(self._tables) < MAX_TABLES:
            return True
        if self._num_passes < self._full_until:
            return False
        oldest = min(self._tables, key=self._last_passes.__getitem__)
        self._full_until = self._last_passes[oldest] + IDLE_PASSES
        if self._num_passes < self._full_until:
            return False
        del self._tables[oldest]
        return True


class _ZeroedTable:
    """A token-recycling table in zeroed memory that the operating system allocates only as it is written."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, dtype_of(RecyclingTable))
        self.address = address(self._memory)


class NamespaceRecyclingTables:
    """The token-recycling tables of namespaces and of requests without namespace, for the drafter's thread only.

    Tokens of one namespace are never drafted in another one, even if the two share a retrieval cache. A request without
    a namespace learns only from itself, and its table is deleted when it ends. A request that does not allow caching
    drafts from its namespace's table and adds nothing to it. Nothing is stored on disk, because a few forward passes
    fill a table again.

    The tables of namespaces take at most 63 MB, and the tables of requests without a namespace take at most 63 MB more.
    """

    def __init__(self) -> None:
        self._tables = NamespaceTables(_ZeroedTable)
        self._own: dict[str, _ZeroedTable] = {}

    def table_address(self, learned: LearnedState | None, request_id: str) -> int:
        """Return the address of the token-recycling table that a request drafts from; 0 if it uses none.

        The address is valid until the next call of ``learn`` or ``ended``.
        """
        found = self._own.get(request_id) if learned is None else self._tables.get(learned)
        return 0 if found is None else found.address

    def learn(self, scored: ScoredPass) -> None:
        """Store the target's top-k tokens at all positions of a forward pass in each request's recycling table."""
        self._tables.begin_pass()
        tables, table = list[int](), 0
        last: LearnedState | None = None
        for count, *place in zip(
            scored.num_positions.tolist(),
            scored.learned,
            scored.request_ids,
            scored.allow_caching.tolist(),
            strict=True,
        ):
            learned, _, allow_caching = place
            if not count:
                table, last = 0, None
            elif (
                learned is None or not allow_caching or learned is not last
            ):  # else the table of the row before: most rows belong to one namespace
                table, last = self._table_for(*place), learned if allow_caching else None
            tables.append(table)
        parents = scored.input_ids if scored.parents is None else scored.parents
        learn_top_tokens(
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
        """Delete the token-recycling table of a request that has ended; tables of namespaces stay."""
        self._own.pop(request_id, None)

    def _table_for(self, learned: LearnedState | None, request_id: str, allow_caching: bool) -> int:
        if learned is None:
            own = self._own.get(request_id)
            if own is None and len(self._own) < MAX_TABLES:
                own = self._own[request_id] = _ZeroedTable()
            return 0 if own is None else own.address
        if not allow_caching:
            return 0
        table = self._tables.get_or_create(learned)
        return 0 if table is None else table.address
