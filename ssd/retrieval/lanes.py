"""The kernels of lookup: one context in many segments, searched in step.

A lane is one context in one segment. In a segment all positions lie ordered by the text before them. One binary search
finds where the context would stand among them; what stands next to that place agrees with the context longest, and the
places where only ``length`` tokens agree lie around those where more do. So one search answers for every length, and
widening it answers for shorter ones. (Suffix array of Manber & Myers, 1993, over the reversed text; its intervals are
nested by length of the match.)

Lanes go in step, one probe of each in turn: none depends on another, so the processor waits for memory once per step
and not once per probe. The kernels allocate nothing and release the GIL.

A segment may lie in a file that somebody overwrites meanwhile. Then what is found means nothing, but nothing is read
outside: positions are bounded where they are read, and zeros lie around a segment's memory (``file_bytes``).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.compiled.addresses import Int64s, TokenIds, inlined, kernel, load_uint32, load_uint64
from ssd.retrieval.packed import WIDTHS
from ssd.retrieval.pattern import PATTERN_BYTES, agrees, num_agreeing, pack_context, precedes
from ssd.retrieval.snapshot import FENCE_STEP

_NARROWEST: Final = WIDTHS[0]

# Columns of a lane: one context in one segment.
_LOW: Final = 0  # while searching: the rank looked for is in [low, high]; then low is the rank
_HIGH: Final = 1
_TEXT: Final = 2  # address of the first code
_ORDER: Final = 3  # address of the order
_FENCE: Final = 4  # address of the fence
_NUM_TOKENS: Final = 5
_WIDTH: Final = 6
_PATTERN: Final = 7  # address just after the packed context
_PATTERN_BYTES: Final = 8
_ABOVE: Final = 9  # tokens that agree at the rank found, and just below it
_BELOW: Final = 10
_LENGTH: Final = 11  # what ``widen`` is to widen to; 0 leaves the lane alone
_PROBE: Final = 12  # scratch, by place in the list of active lanes
_WORD: Final = 13
_ACTIVE: Final = 14
LANE_COLUMNS: Final = 16

# Columns of a walker: one side of a lane, 2 * lane going up in rank, 2 * lane + 1 going down.
_TAKEN: Final = 0  # ranks taken on this side
_HAD: Final = 1  # how many were before the last ``widen``
_STEP: Final = 2  # doubles while every probe agrees
_CEILING: Final = 3  # no more than this can be taken
_IS_STEPPING: Final = 4
_W_PROBE: Final = 5
_W_WORD: Final = 6
_W_ACTIVE: Final = 7
WALKER_COLUMNS: Final = 8


@inlined
def position_at(lanes: Int64s, lane: int, rank: int) -> int:
    """The position of rank ``rank`` in the segment of ``lane``, within 0..n whatever the bytes of the order are now."""
    return min(load_uint32(lanes[lane, _ORDER] + 4 * rank), lanes[lane, _NUM_TOKENS])  # type: ignore[no-any-return]


@inlined
def code_address(lanes: Int64s, lane: int, position: int) -> int:
    """Where the code at ``position`` lies, in the segment of ``lane``."""
    return int(lanes[lane, _TEXT] + lanes[lane, _WIDTH] * position)


@inlined
def width_of(lanes: Int64s, lane: int) -> int:
    """Bytes a token of the segment of ``lane``."""
    return int(lanes[lane, _WIDTH])


@inlined
def longest_in_lane(lanes: Int64s, lane: int) -> int:
    """The longest match of a searched lane, in tokens."""
    return max(lanes[lane, _ABOVE], lanes[lane, _BELOW])  # type: ignore[no-any-return]


@kernel
def open_lanes(table: Int64s, context: TokenIds, length: int, patterns: int, lanes: Int64s, walkers: Int64s) -> None:
    """Make one lane for each segment: to search the last ``length`` tokens of ``context`` there.

    ``patterns`` : address of PATTERNS_BYTES, which must stay until the lanes are done with.
    """
    first, second, third = np.int64(-1), np.int64(-1), np.int64(-1)
    for lane in range(len(table)):
        width = table[lane, 3]
        which = width - _NARROWEST
        pattern = patterns + (which + 1) * PATTERN_BYTES
        num_bytes = first if which == 0 else (second if which == 1 else third)
        if num_bytes < 0:
            num_bytes = np.int64(pack_context(context, length, width, pattern))
            if which == 0:
                first = num_bytes
            elif which == 1:
                second = num_bytes
            else:
                third = num_bytes
        lanes[lane, _TEXT] = table[lane, 0]
        lanes[lane, _ORDER] = table[lane, 1]
        lanes[lane, _NUM_TOKENS] = table[lane, 2]
        lanes[lane, _WIDTH] = width
        lanes[lane, _FENCE] = table[lane, 4]
        lanes[lane, _PATTERN] = pattern
        lanes[lane, _PATTERN_BYTES] = num_bytes
        lanes[lane, _ABOVE], lanes[lane, _BELOW] = 0, 0
        walkers[2 * lane, _TAKEN], walkers[2 * lane + 1, _TAKEN] = 0, 0


@kernel
def _search_fences(lanes: Int64s, num_lanes: int) -> None:
    """Narrow each lane to the ranks between two posts of its fence."""
    active = 0
    for lane in range(num_lanes):
        lanes[lane, _WORD] = np.int64(load_uint64(lanes[lane, _PATTERN] - 8))
        lanes[lane, _LOW], lanes[lane, _HIGH] = 0, (lanes[lane, _NUM_TOKENS] + FENCE_STEP - 1) // FENCE_STEP
        lanes[active, _ACTIVE] = lane
        active += lanes[lane, _PATTERN_BYTES] > 0
    while active > 0:
        kept = 0
        for i in range(active):
            lane = lanes[i, _ACTIVE]
            low, high = lanes[lane, _LOW], lanes[lane, _HIGH]
            middle = (low + high) >> 1
            is_less = load_uint64(lanes[lane, _FENCE] + 8 * middle) < np.uint64(lanes[lane, _WORD])
            low, high = (middle + 1, high) if is_less else (low, middle)
            lanes[lane, _LOW], lanes[lane, _HIGH] = low, high
            lanes[kept, _ACTIVE] = lane
            kept += low < high
        active = kept
    for lane in range(num_lanes):
        n, post = lanes[lane, _NUM_TOKENS], lanes[lane, _LOW]
        if lanes[lane, _PATTERN_BYTES] == 0:
            lanes[lane, _LOW], lanes[lane, _HIGH] = n, n
            continue
        num_posts, beyond, step = (n + FENCE_STEP - 1) // FENCE_STEP, post, 1
        wanted, fence = np.uint64(lanes[lane, _WORD]), lanes[lane, _FENCE]
        while beyond < num_posts and load_uint64(fence + 8 * beyond) == wanted:
            beyond += step  # the same eight bytes say nothing about what is before them
            step *= 2
        lanes[lane, _LOW] = max(0, (post - 1) * FENCE_STEP + 1)
        lanes[lane, _HIGH] = min(n, beyond * FENCE_STEP)


@kernel
def search_lanes(lanes: Int64s, num_lanes: int) -> None:
    """Find in each lane the first rank whose text is not less than the context, and how much its neighbours agree.

    O(log n) steps for all lanes together, each of one probe a lane; their memory accesses overlap.
    """
    _search_fences(lanes, num_lanes)
    active = 0
    for lane in range(num_lanes):
        lanes[active, _ACTIVE] = lane
        active += lanes[lane, _LOW] < lanes[lane, _HIGH]
    while active > 0:
        for i in range(active):
            lane = lanes[i, _ACTIVE]
            lanes[i, _PROBE] = position_at(lanes, lane, (lanes[lane, _LOW] + lanes[lane, _HIGH]) >> 1)
        for i in range(active):
            lane = lanes[i, _ACTIVE]
            lanes[i, _WORD] = np.int64(load_uint64(code_address(lanes, lane, lanes[i, _PROBE]) - 8))
        kept = 0
        for i in range(active):
            lane = lanes[i, _ACTIVE]
            word, pattern = np.uint64(lanes[i, _WORD]), lanes[lane, _PATTERN]
            wanted = load_uint64(pattern - 8)
            is_less = word < wanted
            if word == wanted:
                end = code_address(lanes, lane, lanes[i, _PROBE])
                is_less = precedes(end - 8, pattern - 8, lanes[lane, _PATTERN_BYTES] - 8)
            low, high = lanes[lane, _LOW], lanes[lane, _HIGH]
            middle = (low + high) >> 1
            low, high = (middle + 1, high) if is_less else (low, middle)
            lanes[lane, _LOW], lanes[lane, _HIGH] = low, high
            lanes[kept, _ACTIVE] = lane
            kept += low < high
        active = kept
    for lane in range(num_lanes):
        rank = lanes[lane, _LOW]
        lanes[lane, _PROBE] = position_at(lanes, lane, rank) if rank < lanes[lane, _NUM_TOKENS] else -1
        lanes[lane, _WORD] = position_at(lanes, lane, rank - 1) if rank > 0 else -1
    for lane in range(num_lanes):
        pattern, num_bytes, width = lanes[lane, _PATTERN], lanes[lane, _PATTERN_BYTES], lanes[lane, _WIDTH]
        above, below = lanes[lane, _PROBE], lanes[lane, _WORD]
        if above >= 0:
            lanes[lane, _ABOVE] = num_agreeing(code_address(lanes, lane, above), pattern, num_bytes, width)
        if below >= 0:
            lanes[lane, _BELOW] = num_agreeing(code_address(lanes, lane, below), pattern, num_bytes, width)


@kernel
def longest_in_lanes(lanes: Int64s, num_lanes: int) -> int:
    """The longest match of all searched lanes, in tokens."""
    length = 0
    for lane in range(num_lanes):
        length = max(length, longest_in_lane(lanes, lane))
    return length


@inlined
def ask_to_widen(lanes: Int64s, lane: int, length: int) -> None:
    """Have the next ``widen`` take the places of a searched lane where at least ``length`` >= 1 tokens agree."""
    lanes[lane, _LENGTH] = length if longest_in_lane(lanes, lane) >= length else 0


@inlined
def num_taken(walkers: Int64s, lane: int) -> int:
    """How many ranks ``widen`` has taken so far."""
    return int(walkers[2 * lane, _TAKEN] + walkers[2 * lane + 1, _TAKEN])


@inlined
def num_new(walkers: Int64s, lane: int) -> int:
    """How many of them it took the last time."""
    return num_taken(walkers, lane) - int(walkers[2 * lane, _HAD] + walkers[2 * lane + 1, _HAD])


@inlined
def new_rank(lanes: Int64s, walkers: Int64s, lane: int, i: int) -> int:
    """The ``i``-th of those, in order of rank."""
    down = walkers[2 * lane + 1, _TAKEN]
    new_down = down - walkers[2 * lane + 1, _HAD]
    if i < new_down:
        return int(lanes[lane, _LOW] - down + i)
    return int(lanes[lane, _LOW] + walkers[2 * lane, _HAD] + i - new_down)


@kernel
def widen(lanes: Int64s, walkers: Int64s, num_lanes: int, exact: int) -> None:
    """Take the ranks where as many tokens agree as each lane was asked for; they lie around the rank found.

    Called with ever smaller lengths. On each side steps double outwards from what is taken, then close in on the end;
    all sides go in step. A side that has taken ``exact`` ranks or more does not close in: it takes what the doubling
    steps reached, more than half of what there is. O(log of what is new) steps of one probe a side.
    """
    active = 0
    for lane in range(num_lanes):
        length = lanes[lane, _LENGTH]
        for side in range(2):
            walker = 2 * lane + side
            taken = walkers[walker, _TAKEN]
            walkers[walker, _HAD] = taken
            if length == 0 or (taken == 0 and lanes[lane, _ABOVE + side] < length):
                continue
            walkers[walker, _TAKEN] = max(1, taken)
            walkers[walker, _STEP] = 1
            walkers[walker, _CEILING] = lanes[lane, _LOW] if side else lanes[lane, _NUM_TOKENS] - lanes[lane, _LOW]
            walkers[walker, _IS_STEPPING] = 1
            if walkers[walker, _TAKEN] < walkers[walker, _CEILING]:
                walkers[active, _W_ACTIVE] = walker
                active += 1
    while active > 0:
        for i in range(active):
            walker = walkers[i, _W_ACTIVE]
            lane, taken, ceiling = walker >> 1, walkers[walker, _TAKEN], walkers[walker, _CEILING]
            if walkers[walker, _IS_STEPPING]:
                probe = min(taken + walkers[walker, _STEP], ceiling) - 1
            else:
                probe = (taken + ceiling) >> 1
            walkers[i, _W_PROBE] = probe
            rank = lanes[lane, _LOW] - 1 - probe if walker & 1 else lanes[lane, _LOW] + probe
            walkers[i, _W_WORD] = code_address(lanes, lane, position_at(lanes, lane, rank))
        kept = 0
        for i in range(active):
            walker, probe = walkers[i, _W_ACTIVE], walkers[i, _W_PROBE]
            lane = walker >> 1
            if agrees(walkers[i, _W_WORD], lanes[lane, _PATTERN], lanes[lane, _LENGTH] * lanes[lane, _WIDTH]):
                walkers[walker, _TAKEN] = probe + 1
                walkers[walker, _STEP] *= 2
            else:
                walkers[walker, _CEILING] = probe
                walkers[walker, _IS_STEPPING] = 0
                if walkers[walker, _TAKEN] - walkers[walker, _HAD] >= exact:
                    continue
            if walkers[walker, _TAKEN] < walkers[walker, _CEILING]:
                walkers[kept, _W_ACTIVE] = walker
                kept += 1
        active = kept
