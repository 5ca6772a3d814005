"""What the same noise chose before, a table a namespace.

Kept is which token was chosen last under a key of coupled noise: under the same key the target mostly chooses it
again. Who draws with the same noise chooses the same token as often as the distributions allow (Daliri, Musco, Suresh
2024, arXiv 2408.07978), and a key says more than the noise: the last tokens stood there, as often as here. So what one
request of a stream was told is what the next one will be, token by token, for as long as they say the same.

The table is one of buckets, a cache line each: a lookup waits for memory once. A key is known by 38 of its bits, so
that another one is taken for it once in 250 000 lookups of a full table; the target verifies what is drafted.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.compiled.addresses import (
    Address,
    Int64,
    Record,
    Records,
    UInt64s,
    address,
    inlined,
    kernel,
    uint64_array,
    view_of,
)
from ssd.drafting.noise import SequenceNoise, UInt, drawn_tokens, noise_at, num_drawn
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.successors import NamespaceTables
from ssd.retrieval.cache_state import LearnedState

IN_BUCKET: Final = 8
FIRST_BUCKETS: Final = 1 << 13

MOST_BUCKETS: Final = 1 << 17
"""Half a megabyte at first, 8 MB at most. A full bucket forgets what was confirmed least."""

GROWTH: Final = 4
"""Times as many buckets, once half of the places are taken."""

MOST_CONFIRMED: Final = 3
_TOKEN_BITS: Final = 24
_KEY_AT: Final = _TOKEN_BITS + 2
_KEY_BITS: Final = 64 - _KEY_AT
NO_CHOICE: Final = 0


class ChoiceTable(Record):
    """``entries`` : uint64[num_buckets, IN_BUCKET], beginning with a cache line; ``num_buckets`` is a power of two.

    Of an entry, 0 for none, the lowest 24 bits are the token, the next two how often in a row it was confirmed, the
    others the lowest 38 of the key, and the lowest of these say the bucket. ``num_held`` : entries.
    """

    num_buckets: Int64
    num_held: Int64
    entries: Address


choices_at = view_of(ChoiceTable)


@inlined
def _known_by(key: UInt) -> UInt:
    """What an entry has of a key, not 0."""
    return max(key & np.uint64((1 << _KEY_BITS) - 1), np.uint64(1))


@inlined
def _first_of(table: ChoiceTable, known_by: UInt) -> int:
    """Where in the entries the bucket begins."""
    return int(np.int64(known_by & np.uint64(table.num_buckets - 1)) * IN_BUCKET)


@inlined
def _place_of(entries: UInt64s, first: int, known_by: UInt) -> int:
    """Where in its bucket a key has its entry, -1 where it has none. O(IN_BUCKET)."""
    for place in range(first, first + IN_BUCKET):
        if entries[place] >> np.uint64(_KEY_AT) == known_by:
            return place
    return -1


@inlined
def choice_at(table: ChoiceTable, key: UInt) -> UInt:
    """The entry of a key, NO_CHOICE where nothing is known. O(1)."""
    known_by = _known_by(key)
    entries = uint64_array(table.entries, table.num_buckets * IN_BUCKET)
    place = _place_of(entries, _first_of(table, known_by), known_by)
    return entries[place] if place >= 0 else np.uint64(NO_CHOICE)


@inlined
def token_of(choice: UInt) -> int:
    """The token of an entry."""
    return int(np.int64(choice & np.uint64((1 << _TOKEN_BITS) - 1)))


@inlined
def times_confirmed(choice: UInt) -> int:
    """How often in a row the token of an entry was chosen again, 0..MOST_CONFIRMED."""
    return int(np.int64((choice >> np.uint64(_TOKEN_BITS)) & np.uint64(MOST_CONFIRMED)))


@inlined
def _free_place(table: ChoiceTable, entries: UInt64s, first: int, key: UInt) -> int:
    """A place of a bucket for an entry to come. Where none is left it is one never confirmed; else all lose one."""
    for place in range(first, first + IN_BUCKET):
        if entries[place] == np.uint64(NO_CHOICE):
            table.num_held += 1
            return place
    begin = int(np.int64(key >> np.uint64(_KEY_BITS)) % IN_BUCKET)  # nobody's entries are preferred
    for i in range(IN_BUCKET):
        place = first + (begin + i) % IN_BUCKET
        if times_confirmed(entries[place]) == 0:
            return place
    for place in range(first, first + IN_BUCKET):
        entries[place] -= np.uint64(1 << _TOKEN_BITS)
    return first + begin


@inlined
def _enter(table: ChoiceTable, key: UInt, token: int) -> None:
    """Note that a token was chosen under a key. Ids of 24 bits or more are left out. O(1)."""
    if token < 0 or token >= 1 << _TOKEN_BITS:
        return
    known_by = _known_by(key)
    entries = uint64_array(table.entries, table.num_buckets * IN_BUCKET)
    first, confirmed = _first_of(table, known_by), 0
    place = _place_of(entries, first, known_by)
    if place < 0:
        place = _free_place(table, entries, first, key)
    elif token_of(entries[place]) == token:
        confirmed = min(MOST_CONFIRMED, times_confirmed(entries[place]) + 1)
    entries[place] = (known_by << np.uint64(_KEY_AT)) | np.uint64((confirmed << _TOKEN_BITS) | token)


@kernel
def learn_choices(choices: int, noise_address: int, allow_caching: bool) -> None:
    """Take up what a request was told since the last call: which of it was known, and, if it may teach, what it is.

    ``choices`` : address of the table. O(new tokens).
    """
    table, noise = choices_at(choices), noise_at(noise_address)
    drawn, known = drawn_tokens(noise), num_drawn(noise)
    for number in range(noise.taken, known):
        key, token = drawn[2 * number], int(np.int64(drawn[2 * number + 1]))
        choice = choice_at(table, key)
        was_known = choice != np.uint64(NO_CHOICE) and token_of(choice) == token
        noise.run = noise.run + 1 if was_known else 0
        if allow_caching:
            _enter(table, key, token)
    noise.taken = known


@kernel
def _spread(entries: UInt64s, grown: int) -> None:
    """Put entries into the empty table at an address, which has as many buckets or more."""
    table = choices_at(grown)
    places = uint64_array(table.entries, table.num_buckets * IN_BUCKET)
    for entry in entries:
        if entry != np.uint64(NO_CHOICE):
            place = _first_of(table, entry >> np.uint64(_KEY_AT))
            while places[place] != np.uint64(NO_CHOICE):
                place += 1  # a bucket's entries are at most those of one before
            places[place] = entry


def warm_up() -> None:
    """Compile the kernels, so that the first request compiles nothing."""
    table, noise = KeyedChoices(), SequenceNoise.coupled(0, 0, prompt_length=0)
    noise.advance(np.zeros(1, np.int32))
    learn_choices(table.address, noise.address, True)
    table.spread(FIRST_BUCKETS)


class KeyedChoices:
    """The table of one namespace. ``address`` : of its `ChoiceTable`, which stays where it is."""

    def __init__(self) -> None:
        """With room for FIRST_BUCKETS."""
        self._memory = Records(ChoiceTable)
        self._table, self.address = self._memory[0], self._memory.address
        self._make_buckets(FIRST_BUCKETS)

    def make_room(self) -> None:
        """Grow, if it is half full and may. O(entries) then."""
        table = self._table
        if 2 * table.num_held > IN_BUCKET * table.num_buckets and table.num_buckets < MOST_BUCKETS:
            self.spread(GROWTH * table.num_buckets)

    def spread(self, num_buckets: int) -> None:
        """Spread the entries over as many buckets as there are or more, a power of two. O(buckets)."""
        before = self._entries
        self._make_buckets(num_buckets)
        _spread(before, self.address)

    def _make_buckets(self, count: int) -> None:
        memory = np.zeros(IN_BUCKET * (count + 1), np.uint64)
        first = -address(memory) % 64 // 8
        self._entries = memory[first : first + IN_BUCKET * count]
        self._table.num_buckets, self._table.entries = count, address(self._entries)


class NamespaceChoices:
    """Keyed choices by namespace, 128 MB at most. No locks: owned by the drafter's thread.

    A request that draws with coupled noise drafts from what its namespace knows; one that may not teach adds nothing.
    Nothing is kept on disk.
    """

    def __init__(self) -> None:
        self._tables = NamespaceTables(KeyedChoices)
        self._running: dict[str, tuple[SequenceNoise, LearnedState, bool]] = {}

    def begin_pass(self) -> None:
        """Another call for drafts begins."""
        self._tables.begin_pass()

    def of(self, request: DraftRequest) -> int:
        """Address of what a request drafts from, 0 for nothing; its noise, if it has one, is held until it ends. O(1).

        Holds until the next ``begin_pass`` or ``ended``.
        """
        sampling, learned = request.sampling, request.learned
        if sampling is None or learned is None or not sampling.noise.is_coupled:
            return 0
        self._running[request.request_id] = sampling.noise, learned, request.allow_caching
        table = self._table_for(learned, request.allow_caching)
        return 0 if table is None else table.address

    def ended(self, request_id: str) -> None:
        """Take up what a request was told last and forget it."""
        found = self._running.pop(request_id, None)
        if found is None:
            return
        noise, learned, allow_caching = found
        table = self._table_for(learned, allow_caching)
        if table is not None:
            learn_choices(table.address, noise.address, allow_caching)

    def _table_for(self, learned: LearnedState, allow_caching: bool) -> KeyedChoices | None:
        table = self._tables.used(learned) if allow_caching else self._tables.get(learned)
        if table is not None:
            table.make_room()
        return table
