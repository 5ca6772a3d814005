"""Lookup: where does the tail of a context occur in a snapshot?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Int64s, TokenIds, address, dtype_of, int32_array, kernel, leading_zeros
from ssd.retrieval.lanes import (
    MAX_MATCH_LENGTH,
    PATTERNS_BYTES,
    Lane,
    Walker,
    as_context,
    ask_to_widen,
    lanes_at,
    longest_in_lanes,
    num_taken,
    open_lanes,
    search_lanes,
    walkers_at,
    widen,
)
from ssd.retrieval.snapshot import Snapshot, segments_at, snapshot_at

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


_ALL: Final = 1 << 62  # ranks; more than there are


@kernel
def _longest_match(
    snapshot: int,
    context_address: int,
    context_length: int,
    max_length: int,
    hits: Int64s,
    patterns: int,
    lanes_address: int,
    walkers_address: int,
) -> tuple[int, int]:
    searched, context = snapshot_at(snapshot), int32_array(context_address, context_length)
    num_segments, ring = searched.num_segments, int32_array(searched.ring, searched.ring_size)
    lanes, walkers = lanes_at(lanes_address, num_segments), walkers_at(walkers_address, 2 * num_segments)
    longest = pattern_length(context, min(max_length, MAX_MATCH_LENGTH))
    found = scan(ring, searched.tail_start, searched.tail_stop, context, longest, hits[0], hits[1])
    length, support = 0, 0
    for i in range(found):
        length = max(length, hits[1, i])
    open_lanes(segments_at(searched.segments, num_segments), context, longest, patterns, lanes, walkers)
    search_lanes(lanes, num_segments)
    length = max(length, longest_in_lanes(lanes, num_segments))
    if length == 0:
        return 0, 0
    for i in range(found):
        if hits[1, i] >= length:
            support += 1
    for lane in range(num_segments):
        ask_to_widen(lanes[lane], length)
    widen(lanes, walkers, num_segments, _ALL)
    for lane in range(num_segments):
        support += num_taken(walkers, lane)
    return length, support


@dataclass(frozen=True, slots=True)
class Match:
    """The longest tail of a context that occurs: its ``length`` in tokens, and ``support``, how often it occurs."""

    length: int
    support: int


def longest_match(snapshot: Snapshot, context: npt.NDArray[np.integer[Any]], max_length: int) -> Match:
    """Longest tail of ``context`` (integers[n]), at most ``max_length`` tokens, anywhere in ``snapshot``.

    Exact in the segments; in the tail the most recent MAX_SCAN_HITS occurrences of the last token are looked at. No
    match is ``Match(0, 0)``. O(segments * log n + tail). Allocates its scratch memory: for the drafters' own see
    ``drafting.drafter``. Raises CacheError for a context that is no sequence of integers.
    """
    ids, patterns, num_segments = as_context(context), np.zeros(PATTERNS_BYTES, np.uint8), len(snapshot.segments)
    lanes, walkers = np.empty(num_segments, dtype_of(Lane)), np.empty(2 * num_segments, dtype_of(Walker))
    length, support = _longest_match(
        snapshot.address,
        # By address: as an array, a read-only one would have the kernel compiled once more, in the middle of serving.
        address(ids),
        len(ids),
        max_length,
        np.empty((2, MAX_SCAN_HITS), np.int64),
        address(patterns),
        address(lanes),
        address(walkers),
    )
    return Match(length, support)
