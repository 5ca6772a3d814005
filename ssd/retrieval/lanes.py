"""The kernels of lookup: one context in many segments, searched in step.

A lane is one context in one segment. In a segment all positions lie ordered by the text before them. One binary search
finds where the context would stand among them; what stands next to that place agrees with the context longest, and the
places where only ``length`` tokens agree lie around those where more do. So one search answers for every length, and
widening it answers for shorter ones. (Suffix array of Manber & Myers, 1993, over the reversed text; its intervals are
nested by length of the match.)

Lanes go in step, one probe of each in turn: none depends on another, so the processor waits for memory once per step
and not once per probe. The kernels allocate nothing and release the GIL.

Nobody checks that the order of a file is right. Where it is not, what is found means nothing, but nothing is read
outside: positions are bounded where they are read, and zeros lie around a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.errors import CacheError
from ssd.jit.addresses import (
    Address,
    Int64,
    Record,
    TokenIds,
    Uint64,
    inlined,
    kernel,
    leading_zeros,
    load_uint32,
    load_uint64,
    prefetch,
    select_int64,
    uint8_array,
    views_of,
)
from ssd.retrieval.segment import FENCE_STEP, WIDTHS
from ssd.retrieval.snapshot import SegmentRecord

MAX_MATCH_LENGTH: Final = 256
"""No longer match is looked up."""

PATTERN_BYTES: Final = (MAX_MATCH_LENGTH + 4) * WIDTHS[-1]
"""Room for one context, packed in one width."""

PATTERNS_BYTES: Final = len(WIDTHS) * PATTERN_BYTES
"""Room for it in every width."""

_INT32: Final = np.dtype(np.int32)
_LARGEST_ID: Final = np.iinfo(np.int32).max


def as_context(context: npt.NDArray[Any]) -> TokenIds:
    """``context``, integers[n], as the kernels take it: int32, contiguous, aligned; itself when it is so already.

    An id that int32 cannot hold is stored nowhere: it becomes -1, and only what comes after it is looked up. Raises
    CacheError for what is no sequence of integers. O(1), or O(n) when it must be copied.
    """
    if context.dtype is _INT32 and context.ndim == 1 and context.flags.carray:
        return context
    if context.ndim != 1 or context.dtype.kind not in "iu":
        raise CacheError(
            f"a context is one sequence of integers, got {context.dtype}{list(context.shape)}: pass int32[n]"
        )
    if context.dtype.itemsize > 4 or context.dtype.kind == "u":
        context = np.where((context >= 0) & (context <= _LARGEST_ID), context, -1)
    return np.require(context, np.int32, ["C", "A"])


@kernel
def pack_context(context: TokenIds, length: int, width: int, pattern: int) -> int:
    """Pack the last ``length`` tokens (ids >= 0) so that they end at address ``pattern``; returns how many bytes.

    Fewer when a code does not fit ``width``: no segment of that width holds such a token. A zero word precedes them.
    """
    n = len(context)
    out = uint8_array(pattern - PATTERN_BYTES, PATTERN_BYTES)
    at = PATTERN_BYTES
    for i in range(length):
        code = np.int64(context[n - 1 - i]) + 1
        if code >> (8 * width) != 0:
            break
        at -= width
        for byte in range(width):
            out[at + byte] = (code >> (8 * byte)) & 0xFF
    out[at - 8 : at] = 0
    return PATTERN_BYTES - at


@inlined
def num_agreeing(text: int, pattern: int, num_bytes: int, width: int) -> int:
    """Whole tokens on which the text before ``text`` agrees with all ``num_bytes`` before ``pattern``."""
    agreeing = 0
    while agreeing < num_bytes:
        different = load_uint64(text - agreeing - 8) ^ load_uint64(pattern - agreeing - 8)
        if different != np.uint64(0):
            agreeing += leading_zeros(different) >> 3
            break
        agreeing += 8
    return min(agreeing, num_bytes) // width


_NARROWEST: Final = WIDTHS[0]


class Lane(Record):
    """One context in one segment.

    ``low``, ``high`` : while searching, the rank looked for is in [low, high]; then ``low`` is the rank. ``text`` to
    ``width`` : of the segment, see SegmentRecord. ``pattern`` : just after the packed context, of ``pattern_bytes``.
    ``word`` : its last eight bytes. ``probe`` : what is compared next, ``offset`` : how far before it; ``low_offset``,
    ``high_offset`` : the same where what is below ``low`` and at ``high`` differed. ``above``, ``below`` : tokens that
    agree at the rank found, and just below it. ``length`` : what ``widen`` is to widen to; 0 leaves the lane alone.
    ``beside`` : scratch. ``active`` : also scratch, by place in the list of active lanes.
    """

    low: Int64
    high: Int64
    text: Address
    order: Address
    fence: Address
    num_tokens: Int64
    width: Int64
    pattern: Address
    pattern_bytes: Int64
    above: Int64
    below: Int64
    length: Int64
    probe: Int64
    beside: Int64
    word: Uint64
    active: Int64
    offset: Int64
    low_offset: Int64
    high_offset: Int64


class Walker(Record):
    """One side of a lane: 2 * lane going up in rank, 2 * lane + 1 going down.

    ``taken`` : ranks taken on this side. ``had`` : how many were before the last ``widen``. ``step`` : doubles while
    every probe agrees. ``ceiling`` : no more than this can be taken. ``probe`` : the rank compared next, outwards;
    ``target`` : where its position lies, then the text compared, ``offset`` before its end. ``active`` : scratch, by
    place in the list of active walkers.
    """

    taken: Int64
    had: Int64
    step: Int64
    ceiling: Int64
    is_stepping: Int64
    probe: Int64
    target: Address
    offset: Int64
    active: Int64


Lanes = Sequence[Lane]
Walkers = Sequence[Walker]

lanes_at = views_of(Lane)
walkers_at = views_of(Walker)


@inlined
def position_at(lane: Lane, rank: int) -> int:
    """The position of rank ``rank`` in the lane's segment, within 0..n whatever the bytes of the order are now."""
    return min(load_uint32(lane.order + 4 * rank), lane.num_tokens)


@inlined
def rank_address(lane: Lane, rank: int) -> int:
    """Where the position of rank ``rank`` lies."""
    return lane.order + 4 * rank


@inlined
def code_address(lane: Lane, position: int) -> int:
    """Where the code at ``position`` lies, in the lane's segment."""
    return lane.text + lane.width * position


@inlined
def longest_in_lane(lane: Lane) -> int:
    """The longest match of a searched lane, in tokens."""
    return max(lane.above, lane.below)


@kernel
def open_lanes(
    segments: Sequence[SegmentRecord], context: TokenIds, length: int, patterns: int, lanes: Lanes, walkers: Walkers
) -> None:
    """Make one lane for each segment: to search the last ``length`` tokens of ``context`` there.

    ``patterns`` : address of PATTERNS_BYTES, which must stay until the lanes are done with.
    """
    first, second, third = -1, -1, -1
    for number in range(len(segments)):
        segment, lane = segments[number], lanes[number]
        which = segment.width - _NARROWEST
        pattern = patterns + (which + 1) * PATTERN_BYTES
        num_bytes = first if which == 0 else (second if which == 1 else third)
        if num_bytes < 0:
            num_bytes = pack_context(context, length, segment.width, pattern)
            if which == 0:
                first = num_bytes
            elif which == 1:
                second = num_bytes
            else:
                third = num_bytes
        lane.text, lane.order, lane.fence = segment.text, segment.order, segment.fence
        lane.num_tokens, lane.width = segment.num_tokens, segment.width
        lane.pattern, lane.pattern_bytes = pattern, num_bytes
        lane.above, lane.below = 0, 0
        walkers[2 * number].taken, walkers[2 * number + 1].taken = 0, 0


@kernel
def _search_fences(lanes: Lanes, num_lanes: int) -> None:
    """Narrow each lane to the ranks between two posts of its fence.

    While searching, the post looked for is in [low, low + high]. No branch depends on what is read: what a processor
    guesses wrong costs more than the steps of a lane that is done before another.
    """
    most = 0
    for number in range(num_lanes):
        lane = lanes[number]
        lane.word = load_uint64(lane.pattern - 8)
        lane.low, lane.high = 0, (lane.num_tokens + FENCE_STEP - 1) // FENCE_STEP
        most = max(most, lane.high)
    while most > 1:
        most -= most >> 1
        for number in range(num_lanes):
            lane = lanes[number]
            half = lane.high >> 1
            middle = lane.low + half
            is_less = load_uint64(lane.fence + 8 * (middle - (half > 0))) < lane.word
            low, left = select_int64(is_less, middle, lane.low), lane.high - half
            lane.low, lane.high = low, left
            prefetch(lane.fence + 8 * (low + (left >> 1)) - 8)
    for number in range(num_lanes):
        lane = lanes[number]
        n, fence = lane.num_tokens, lane.fence
        if lane.pattern_bytes == 0:
            lane.low, lane.high = n, n
            continue
        post = lane.low + (load_uint64(fence + 8 * lane.low) < lane.word)
        num_posts, beyond, step = (n + FENCE_STEP - 1) // FENCE_STEP, post, 1
        while beyond < num_posts and load_uint64(fence + 8 * beyond) == lane.word:
            beyond += step  # the same eight bytes say nothing about what is before them
            step *= 2
        lane.low = max(0, (post - 1) * FENCE_STEP + 1)
        lane.high = min(n, beyond * FENCE_STEP)
        prefetch(lane.order + 4 * lane.low)
        prefetch(lane.order + 2 * (lane.low + lane.high))
        prefetch(lane.order + 4 * lane.low + 124)


@inlined
def _aim(lane: Lane) -> None:
    """Have the text of the rank between ``low`` and ``high`` brought near: it is compared one step later."""
    lane.probe = code_address(lane, position_at(lane, min((lane.low + lane.high) >> 1, lane.num_tokens - 1))) - 8
    prefetch(lane.probe - lane.offset)


@kernel
def search_lanes(lanes: Lanes, num_lanes: int) -> None:
    """Find in each lane the first rank whose text is not less than the context, and how much its neighbours agree.

    O(log n) steps for all lanes together, and a few for what agrees; their memory accesses overlap. A step of a lane
    compares eight bytes: where they are the same the next one compares those before them, else the ranks are halved.
    Bytes that agree at both ends of the ranks left are not compared again.
    """
    _search_fences(lanes, num_lanes)
    active = 0
    for number in range(num_lanes):
        lane = lanes[number]
        lanes[active].active = number
        active += lane.low < lane.high
        lane.offset, lane.low_offset, lane.high_offset = 0, 0, 0
        _aim(lane)
    while active > 0:
        kept = 0
        for i in range(active):
            number = lanes[i].active
            lane = lanes[number]
            offset, low, high = lane.offset, lane.low, lane.high
            word, wanted = load_uint64(lane.probe - offset), load_uint64(lane.pattern - 8 - offset)
            middle, passed = (low + high) >> 1, offset + 8
            is_same = (word == wanted) & (passed < lane.pattern_bytes)
            is_less = (word < wanted) & (not is_same)
            is_not_less = (not is_less) & (not is_same)
            low, high = select_int64(is_less, middle + 1, low), select_int64(is_not_less, middle, high)
            low_offset = select_int64(is_less, offset, lane.low_offset)
            high_offset = select_int64(is_not_less, offset, lane.high_offset)
            lane.low, lane.high, lane.low_offset, lane.high_offset = low, high, low_offset, high_offset
            lane.offset = select_int64(is_same, passed, min(low_offset, high_offset))
            _aim(lane)
            lanes[kept].active = number
            kept += low < high
        active = kept
    for number in range(num_lanes):
        lane = lanes[number]
        rank = lane.low
        lane.probe = position_at(lane, rank) if rank < lane.num_tokens else -1
        lane.beside = position_at(lane, rank - 1) if rank > 0 else -1
    for number in range(num_lanes):
        lane = lanes[number]
        pattern, num_bytes, width = lane.pattern, lane.pattern_bytes, lane.width
        above, below = lane.probe, lane.beside
        if above >= 0:
            lane.above = num_agreeing(code_address(lane, above), pattern, num_bytes, width)
        if below >= 0:
            lane.below = num_agreeing(code_address(lane, below), pattern, num_bytes, width)


@kernel
def longest_in_lanes(lanes: Lanes, num_lanes: int) -> int:
    """The longest match of all searched lanes, in tokens."""
    length = 0
    for lane in range(num_lanes):
        length = max(length, longest_in_lane(lanes[lane]))
    return length


@inlined
def ask_to_widen(lane: Lane, length: int) -> None:
    """Have the next ``widen`` take the places of a searched lane where at least ``length`` >= 1 tokens agree."""
    lane.length = length if longest_in_lane(lane) >= length else 0


@inlined
def num_taken(walkers: Walkers, lane: int) -> int:
    """How many ranks ``widen`` has taken so far."""
    return walkers[2 * lane].taken + walkers[2 * lane + 1].taken


@inlined
def num_new(walkers: Walkers, lane: int) -> int:
    """How many of them it took the last time."""
    return num_taken(walkers, lane) - (walkers[2 * lane].had + walkers[2 * lane + 1].had)


@inlined
def new_rank(lanes: Lanes, walkers: Walkers, lane: int, i: int) -> int:
    """The ``i``-th of those, in order of rank."""
    down = walkers[2 * lane + 1].taken
    new_down = down - walkers[2 * lane + 1].had
    if i < new_down:
        return lanes[lane].low - down + i
    return lanes[lane].low + walkers[2 * lane].had + i - new_down


@inlined
def _aim_walker(lane: Lane, walker: Walker, side: int) -> None:
    """Choose the next rank to be compared, and have its position brought near."""
    taken, ceiling = walker.taken, walker.ceiling
    probe = select_int64(walker.is_stepping != 0, min(taken + walker.step, ceiling) - 1, (taken + ceiling) >> 1)
    walker.probe = probe
    walker.target = rank_address(lane, select_int64(side != 0, lane.low - 1 - probe, lane.low + probe))
    prefetch(walker.target)


@kernel
def widen(lanes: Lanes, walkers: Walkers, num_lanes: int, exact: int) -> None:
    """Take the ranks where as many tokens agree as each lane was asked for; they lie around the rank found.

    Called with ever smaller lengths. On each side steps double outwards from what is taken, then close in on the end;
    all sides go in step. A side that has taken ``exact`` ranks or more does not close in: it takes what the doubling
    steps reached, more than half of what there is. O(log of what is new) steps of one probe a side.
    """
    active = 0
    for number in range(num_lanes):
        lane = lanes[number]
        for side in range(2):
            walker = walkers[2 * number + side]
            taken = walker.taken
            walker.had = taken
            if lane.length == 0 or (taken == 0 and (lane.below if side else lane.above) < lane.length):
                continue
            walker.taken = max(1, taken)
            walker.step, walker.offset = 1, 0
            walker.ceiling = lane.low if side else lane.num_tokens - lane.low
            walker.is_stepping = 1
            if walker.taken < walker.ceiling:
                _aim_walker(lane, walker, side)
                walkers[active].active = 2 * number + side
                active += 1
    while active > 0:
        for i in range(active):
            number = walkers[i].active
            lane, walker = lanes[number >> 1], walkers[number]
            walker.target = code_address(lane, min(load_uint32(walker.target), lane.num_tokens)) - 8 - walker.offset
            prefetch(walker.target)
        kept = 0
        for i in range(active):
            number = walkers[i].active
            lane, walker = lanes[number >> 1], walkers[number]
            offset, probe, taken, ceiling = walker.offset, walker.probe, walker.taken, walker.ceiling
            left = lane.length * lane.width - offset - 8
            different = load_uint64(walker.target) ^ load_uint64(lane.pattern - 8 - offset)
            is_same = different >> np.uint64(8 * max(0, -left)) == np.uint64(0)
            is_agreed = is_same & (left <= 0)
            taken, ceiling = select_int64(is_agreed, probe + 1, taken), select_int64(is_same, ceiling, probe)
            walker.taken, walker.ceiling = taken, ceiling
            walker.step = select_int64(is_agreed, 2 * walker.step, walker.step)
            walker.is_stepping = select_int64(is_same, walker.is_stepping, 0)
            walker.offset = select_int64(is_same & (left > 0), offset + 8, 0)
            _aim_walker(lane, walker, number & 1)
            walkers[kept].active = number
            kept += (taken < ceiling) & (is_same | (taken - walker.had < exact))
        active = kept
