"""Cache the token that was sampled with each key of shared Gumbel noise, per namespace.

Requests that share their noise (coupled sampling) sample the same token with the same key as often as their
distributions allow (Daliri, Musco, Suresh 2024, arXiv 2408.07978). A key also identifies the last tokens of the text
and how often they have occurred. So the tokens sampled in one request are good drafts for the next request of the
stream, for as long as their texts agree.

The table consists of buckets of one cache line each, so a lookup waits for memory once. An entry holds 38 bits of its
key. A lookup in a full table confuses two keys once in 250,000 times; the target verifies the draft in any case.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.drafting.noise import SequenceNoise, UInt, drawn_tokens, noise_at, num_drawn
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.token_recycling import NamespaceTables
from ssd.jit.addresses import (
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
from ssd.retrieval.cache_state import LearnedState

BUCKET_SIZE: Final = 8
FIRST_BUCKETS: Final = 1 << 13

MAX_BUCKETS: Final = 1 << 17
"""The maximum number of hash buckets of a namespace's sample cache, which then takes 8 MB.

A new table has FIRST_BUCKETS buckets, 0.5 MB. A new token in a full bucket replaces an entry, preferably one without
confirmations.
"""

GROWTH: Final = 4
"""The factor by which a sample cache grows once half of its entries are used."""

MAX_CONFIRMED: Final = 3
_TOKEN_BITS: Final = 24
_KEY_AT: Final = _TOKEN_BITS + 2
_KEY_BITS: Final = 64 - _KEY_AT
NO_SAMPLE: Final = 0


class SampleTable(Record):
    """The hash table of one namespace's sample cache, which maps a Gumbel noise key to the token sampled with it.

    The lowest 24 bits of an entry are the token, and the next two bits count how often in a row the token was
    confirmed. The other 38 bits are the lowest 38 bits of the key. The lowest bits of the key also select the bucket. 0
    is an empty entry. ``entries`` is the address of uint64[num_buckets, BUCKET_SIZE], aligned to a cache line;
    ``num_buckets`` is a power of two.
    """

    num_buckets: Int64
    num_entries: Int64
    entries: Address


sample_table_at = view_of(SampleTable)


@inlined
def _entry_key(key: UInt) -> UInt:
    return max(key & np.uint64((1 << _KEY_BITS) - 1), np.uint64(1))


@inlined
def _first_of(table: SampleTable, known_by: UInt) -> int:
    return int(np.int64(known_by & np.uint64(table.num_buckets - 1)) * BUCKET_SIZE)


@inlined
def _place_of(entries: UInt64s, first: int, known_by: UInt) -> int:
    for place in range(first, first + BUCKET_SIZE):
        if entries[place] >> np.uint64(_KEY_AT) == known_by:
            return place
    return -1


@inlined
def cached_sample_at(table: SampleTable, key: UInt) -> UInt:
    """Return the sample cache's entry for a Gumbel noise key; NO_SAMPLE if there is none."""
    known_by = _entry_key(key)
    entries = uint64_array(table.entries, table.num_buckets * BUCKET_SIZE)
    place = _place_of(entries, _first_of(table, known_by), known_by)
    return entries[place] if place >= 0 else np.uint64(NO_SAMPLE)


@inlined
def sampled_token(sample: UInt) -> int:
    return int(np.int64(sample & np.uint64((1 << _TOKEN_BITS) - 1)))


@inlined
def times_confirmed(sample: UInt) -> int:
    """Return how many times in a row the token of a sample-cache entry was sampled again, at most MAX_CONFIRMED."""
    return int(np.int64((sample >> np.uint64(_TOKEN_BITS)) & np.uint64(MAX_CONFIRMED)))


@inlined
def _free_place(table: SampleTable, entries: UInt64s, first: int, key: UInt) -> int:
    """Return the index at which to write a new entry into the bucket of the sample cache that begins at ``first``.

    A full bucket replaces an entry without confirmations. If all its entries have confirmations, each entry loses one,
    and one entry is replaced.
    """
    for place in range(first, first + BUCKET_SIZE):
        if entries[place] == np.uint64(NO_SAMPLE):
            table.num_entries += 1
            return place
    # The first entry to look at depends on the key, so that no entry is preferred.
    begin = int(np.int64(key >> np.uint64(_KEY_BITS)) % BUCKET_SIZE)
    for i in range(BUCKET_SIZE):
        place = first + (begin + i) % BUCKET_SIZE
        if times_confirmed(entries[place]) == 0:
            return place
    for place in range(first, first + BUCKET_SIZE):
        entries[place] -= np.uint64(1 << _TOKEN_BITS)
    return first + begin


@inlined
def _insert(table: SampleTable, key: UInt, token: int) -> None:
    if token < 0 or token >= 1 << _TOKEN_BITS:
        return
    known_by = _entry_key(key)
    entries = uint64_array(table.entries, table.num_buckets * BUCKET_SIZE)
    first, confirmed = _first_of(table, known_by), 0
    place = _place_of(entries, first, known_by)
    if place < 0:
        place = _free_place(table, entries, first, key)
    elif sampled_token(entries[place]) == token:
        confirmed = min(MAX_CONFIRMED, times_confirmed(entries[place]) + 1)
    entries[place] = (known_by << np.uint64(_KEY_AT)) | np.uint64((confirmed << _TOKEN_BITS) | token)


@kernel
def learn_samples(table_address: int, noise_address: int, allow_caching: bool) -> None:
    """Add the tokens that a request sampled since the last call to its namespace's sample cache.

    It also counts how many of the latest tokens in a row equal their cached sample. Without ``allow_caching``, the
    tokens are only compared with the cache.
    """
    table, noise = sample_table_at(table_address), noise_at(noise_address)
    drawn, known = drawn_tokens(noise), num_drawn(noise)
    for number in range(noise.num_learned, known):
        key, token = drawn[2 * number], int(np.int64(drawn[2 * number + 1]))
        sample = cached_sample_at(table, key)
        was_known = sample != np.uint64(NO_SAMPLE) and sampled_token(sample) == token
        noise.run_length = noise.run_length + 1 if was_known else 0
        if allow_caching:
            _insert(table, key, token)
    noise.num_learned = known


@kernel
def _rehash(entries: UInt64s, grown: int) -> None:
    table = sample_table_at(grown)
    places = uint64_array(table.entries, table.num_buckets * BUCKET_SIZE)
    for entry in entries:
        if entry != np.uint64(NO_SAMPLE):
            place = _first_of(table, entry >> np.uint64(_KEY_AT))
            while places[place] != np.uint64(NO_SAMPLE):
                place += 1  # a new bucket gets entries of one old bucket only, so they fit
            places[place] = entry


def warm_up() -> None:
    table, noise = SampleCache(), SequenceNoise.coupled(0, 0, prompt_length=0)
    noise.advance(np.zeros(1, np.int32))
    learn_samples(table.address, noise.address, True)
    table.spread(FIRST_BUCKETS)


class SampleCache:
    """A cache of the tokens that requests of one namespace sampled, keyed by the Gumbel noise that the requests share.

    ``address`` is the memory address of the `SampleTable` for numba kernels. It never changes.
    """

    def __init__(self) -> None:
        self._memory = Records(SampleTable)
        self._table, self.address = self._memory[0], self._memory.address
        self._make_buckets(FIRST_BUCKETS)

    def make_room(self) -> None:
        """Enlarge the sample cache's hash table if it is half full and below its maximum size."""
        table = self._table
        if 2 * table.num_entries > BUCKET_SIZE * table.num_buckets and table.num_buckets < MAX_BUCKETS:
            self.spread(GROWTH * table.num_buckets)

    def spread(self, num_buckets: int) -> None:
        """Redistribute the sample cache's entries over ``num_buckets`` hash buckets, not fewer than before."""
        before = self._entries
        self._make_buckets(num_buckets)
        _rehash(before, self.address)

    def _make_buckets(self, count: int) -> None:
        memory = np.zeros(BUCKET_SIZE * (count + 1), np.uint64)
        first = -address(memory) % 64 // 8
        self._entries = memory[first : first + BUCKET_SIZE * count]
        self._table.num_buckets, self._table.entries = count, address(self._entries)


class NamespaceSampleCaches:
    """The sample caches of all namespaces, at most 128 MB. Not thread-safe: only the drafter's thread may use it.

    A request with shared Gumbel noise drafts from the sample cache of its namespace. The tokens of a request that does
    not allow caching are not added to it. Nothing is stored on disk.
    """

    def __init__(self) -> None:
        self._tables = NamespaceTables(SampleCache)
        self._running: dict[str, tuple[SequenceNoise, LearnedState, bool]] = {}

    def begin_pass(self) -> None:
        """Increment the number of drafter calls, by which the age of unused sample caches is measured."""
        self._tables.begin_pass()

    def table_address(self, request: DraftRequest) -> int:
        """Return the address of the sample cache that a request drafts from; 0 if it uses none.

        The address is valid until the next call of ``begin_pass`` or ``ended``. The request's noise is kept alive until
        the request ends.
        """
        sampling, learned = request.sampling, request.learned
        if sampling is None or learned is None or not sampling.noise.is_coupled:
            return 0
        self._running[request.request_id] = sampling.noise, learned, request.allow_caching
        table = self._table_for(learned, request.allow_caching)
        return 0 if table is None else table.address

    def ended(self, request_id: str) -> None:
        """Add the last tokens of a request that has ended to its namespace's sample cache, and drop its state."""
        found = self._running.pop(request_id, None)
        if found is None:
            return
        noise, learned, allow_caching = found
        table = self._table_for(learned, allow_caching)
        if table is not None:
            learn_samples(table.address, noise.address, allow_caching)

    def _table_for(self, learned: LearnedState, allow_caching: bool) -> SampleCache | None:
        table = self._tables.get_or_create(learned) if allow_caching else self._tables.get(learned)
        if table is not None:
            table.make_room()
        return table
