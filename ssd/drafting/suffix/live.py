"""Lookup in what running requests have said so far: their texts in one array, with the places of every pair of tokens.

All of it is written anew before a call that drafts, in time that grows with the texts and is small beside a pass.
So nothing need be taken back when a request ends, and every row is looked up by walking few places.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.compiled.addresses import Int64s, TokenIds, inlined, int32_array, int64_array, kernel
from ssd.compiled.records import Address, Int64, Record, view_of

LEAST_LIVE: Final = 2
"""Tokens that must agree: places of one token are many, and the target's own candidates say as much."""

MAX_LIVE_HITS: Final = 256
"""Places that a lookup walks to, the newest ones."""

LIVE_WIDTH: Final = 4
"""Bytes of a code."""

GUARD_CODES: Final = 64
"""Codes behind the last text: samples are compared some tokens at a time, and past their ends."""


class LiveRecord(Record):
    """Texts as kernels find them.

    ``codes`` : uint32[size + GUARD_CODES], as a segment has them: of a token one more than it, 0 before, between and
    behind texts. ``begins`` : int64[num_texts + 1], where each text begins, and where one more would.
    ``heads`` : int32[num_heads], a power of two, by the hash of a pair of tokens: the last place behind such a pair, 0
    for none. ``previous`` : int32[size], of each place the one before it of the same hash.
    """

    codes: Address
    size: Int64
    begins: Address
    num_texts: Int64
    heads: Address
    num_heads: Int64
    previous: Address


live_at = view_of(LiveRecord)


@inlined
def _head_of(live: LiveRecord, before: int, last: int) -> int:
    """Where the places behind a pair of tokens begin, by their codes."""
    mixed = (np.uint64(before) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(last) * np.uint64(0xD6E8FEB86659FD93))
    return int((mixed >> np.uint64(32)) & np.uint64(live.num_heads - 1))


@inlined
def _code(codes: TokenIds, place: int) -> int:
    return int(np.int64(codes[place]) & 0xFFFFFFFF)


@kernel
def write_live(address: int, tokens: TokenIds, lengths: Int64s, lead_ins: Int64s) -> None:
    """Make these the texts of the record at an address, which has the room.

    ``tokens`` : one text behind another, of ``lengths``. The first ``lead_ins`` of each are matched, never drafted:
    they are a prompt's, and all that continue it would say the same of it. O(tokens).
    """
    live = live_at(address)
    codes, begins = int32_array(live.codes, live.size + GUARD_CODES), int64_array(live.begins, live.num_texts + 1)
    heads, previous = int32_array(live.heads, live.num_heads), int32_array(live.previous, live.size)
    heads[:] = 0
    codes[0] = 0
    place, read = 1, 0
    for number in range(live.num_texts):
        begins[number], first = place, place + max(LEAST_LIVE, lead_ins[number])
        for _ in range(lengths[number]):
            codes[place] = tokens[read] + 1 if tokens[read] >= 0 else 0
            if place >= first and codes[place - 1] != 0 and codes[place - 2] != 0:
                head = _head_of(live, _code(codes, place - 2), _code(codes, place - 1))
                previous[place], heads[head] = heads[head], place
            place += 1
            read += 1
        codes[place] = 0
        place += 1
    begins[live.num_texts] = place
    codes[place : place + GUARD_CODES - 1] = 0


@kernel
def find_live(live: LiveRecord, own: int, context: TokenIds, longest: int, positions: Int64s, lengths: Int64s) -> int:
    """Find where the last tokens of ``context`` stand in the texts, and how much before agrees; how many places.

    ``own`` : the text that is left out, -1 for none. Writes, last text first, the place behind each occurrence and the
    agreeing length (LEAST_LIVE..longest). O(MAX_LIVE_HITS * longest).
    """
    n, found = len(context), 0
    if longest < LEAST_LIVE:
        return 0
    codes, previous = int32_array(live.codes, live.size), int32_array(live.previous, live.size)
    begins, own_begin, own_end = int64_array(live.begins, live.num_texts + 1), np.int64(0), np.int64(0)
    if own >= 0:
        own_begin, own_end = begins[own], begins[own + 1]
    before, last = int(np.int64(context[n - 2])) + 1, int(np.int64(context[n - 1])) + 1
    place = int(np.int64(int32_array(live.heads, live.num_heads)[_head_of(live, before, last)]))
    for _ in range(MAX_LIVE_HITS):
        if place == 0:
            break
        if place < own_begin or place >= own_end:
            length = 0
            while length < longest and _code(codes, place - 1 - length) == np.int64(context[n - 1 - length]) + 1:
                length += 1
            if length >= LEAST_LIVE:
                positions[found], lengths[found] = place, length
                found += 1
        place = int(np.int64(previous[place]))
    return found
