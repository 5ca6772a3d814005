"""The kernels that search for one context in many segments of the retrieval cache simultaneously.

A segment's suffix array orders all positions of its text by the text before them. One binary search finds the rank at
which the context would be inserted. The neighbours of that rank have the longest matches. Ranks with shorter matches
surround ranks with longer ones, so one search serves every match length: expanding its range of ranks gives the
shorter matches. (Suffix array of Manber & Myers, 1993, over the reversed text; its intervals are nested by match
length.)

The searches of all segments (`SegmentSearch`) advance together, one memory access each per step. No access depends on
another search, so the processor waits for memory once per step instead of once per access. The kernels allocate nothing
and release the GIL.

The sort order in a segment file is not verified. If it is wrong, the results are meaningless, but nothing outside the
segment is read: positions are bounded where they are loaded, and each text is surrounded by zeros.
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
from ssd.retrieval.segment import SPARSE_INDEX_STEP, WIDTHS
from ssd.retrieval.snapshot import SegmentRecord

MAX_MATCH_LENGTH: Final = 256
"""The maximum match length of a lookup, in tokens."""

PATTERN_BYTES: Final = (MAX_MATCH_LENGTH + 4) * WIDTHS[-1]
"""The size in bytes of a buffer for the context tokens to search for, packed in one token width."""

PATTERNS_BYTES: Final = len(WIDTHS) * PATTERN_BYTES
"""The size in bytes of a buffer for the context tokens to search for, packed once in every token width."""

_INT32: Final = np.dtype(np.int32)
_LARGEST_ID: Final = np.iinfo(np.int32).max


def as_context(context: npt.NDArray[Any]) -> TokenIds:
    """Convert token ids to the array that the search kernels require: int32, contiguous, aligned.

    An id that int32 cannot represent becomes -1. Only the tokens after such an id are looked up, because no text
    contains it. Raises CacheError unless ``context`` is a sequence of integers.
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
    """Pack the last ``length`` context tokens so that they end at address ``pattern``; return the number of bytes.

    The last token is packed first. Packing stops before a token that does not fit in ``width`` bytes, because no
    segment of that width contains it. A zero word precedes the packed tokens.
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
def num_matching_tokens(text: int, pattern: int, num_bytes: int, width: int) -> int:
    """Compare packed text and packed context backwards from two addresses; return the number of equal whole tokens."""
    agreeing = 0
    while agreeing < num_bytes:
        different = load_uint64(text - agreeing - 8) ^ load_uint64(pattern - agreeing - 8)
        if different != np.uint64(0):
            agreeing += leading_zeros(different) >> 3
            break
        agreeing += 8
    return min(agreeing, num_bytes) // width


_NARROWEST: Final = WIDTHS[0]


class SegmentSearch(Record):
    """The state of the binary search for a context in one segment's suffix array; a rank is an index in this array.

    Attributes:
        low: During the search, the lower bound of the rank; afterwards the rank found.
        high: During the search, the upper bound of the rank.
        pattern: The address just after the packed context, of ``pattern_bytes`` bytes; ``word`` holds its last eight.
        match_above: The number of context tokens that match the text at the rank found.
        match_below: The number of context tokens that match the text at the next lower rank.
        length: The match length to which ``expand_ranges`` is to expand; 0 skips this search.
        probe: The address of the text that is compared next, ``offset`` bytes before it.
        position_below: The text position at the next lower rank; -1 if there is none.
        active: Scratch, the indices of the searches that have not ended.
        low_offset: The number of bytes before the position at rank ``low`` - 1 that are known to match the context.
        high_offset: The number of bytes before the position at rank ``high`` that are known to match the context.
    """

    low: Int64
    high: Int64
    text: Address
    order: Address
    sparse_index: Address
    num_tokens: Int64
    width: Int64
    pattern: Address
    pattern_bytes: Int64
    match_above: Int64
    match_below: Int64
    length: Int64
    probe: Int64
    position_below: Int64
    word: Uint64
    active: Int64
    offset: Int64
    low_offset: Int64
    high_offset: Int64


class RangeExpander(Record):
    """The state of finding further matches in one direction of a segment's suffix array, after the binary search.

    Matches of the same length have neighbouring ranks in a suffix array, so the range of ranks of the longest match is
    expanded to find shorter matches. Record 2 * i expands search i to higher ranks, and 2 * i + 1 to lower ranks.

    Attributes:
        num_ranks: The number of ranks in the range in this direction.
        step: The distance to the next compared rank, doubled after each rank whose text matches.
        is_stepping: Whether the compared ranks still move outwards, before the binary search between the last two.
        probe: The rank to compare next, as its distance from the rank where the search ended.
        target: First the address of the suffix array's entry for the next rank, then the address of the text there.
        offset: The number of bytes at the end of the text that match and are not compared again.
        active: Scratch, the indices of the expanders that have not ended.
    """

    num_ranks: Int64
    num_ranks_before: Int64
    step: Int64
    max_ranks: Int64
    is_stepping: Int64
    probe: Int64
    target: Address
    offset: Int64
    active: Int64


SegmentSearches = Sequence[SegmentSearch]
RangeExpanders = Sequence[RangeExpander]

searches_at = views_of(SegmentSearch)
expanders_at = views_of(RangeExpander)


@inlined
def position_at(search: SegmentSearch, rank: int) -> int:
    """Return the text position at a rank of the suffix array, clipped to 0..n because the file may be damaged."""
    return min(load_uint32(search.order + 4 * rank), search.num_tokens)


@inlined
def rank_address(search: SegmentSearch, rank: int) -> int:
    return search.order + 4 * rank


@inlined
def code_address(search: SegmentSearch, position: int) -> int:
    return search.text + search.width * position


@inlined
def longest_match_in(search: SegmentSearch) -> int:
    return max(search.match_above, search.match_below)


@kernel
def start_searches(
    segments: Sequence[SegmentRecord],
    context: TokenIds,
    length: int,
    patterns: int,
    searches: SegmentSearches,
    expanders: RangeExpanders,
) -> None:
    """Start a search in each segment for the last ``length`` tokens of ``context``.

    ``patterns`` is the address of PATTERNS_BYTES bytes, which must stay allocated until the searches end.
    """
    first, second, third = -1, -1, -1
    for number in range(len(segments)):
        segment, search = segments[number], searches[number]
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
        search.text, search.order, search.sparse_index = segment.text, segment.order, segment.sparse_index
        search.num_tokens, search.width = segment.num_tokens, segment.width
        search.pattern, search.pattern_bytes = pattern, num_bytes
        search.match_above, search.match_below = 0, 0
        expanders[2 * number].num_ranks, expanders[2 * number + 1].num_ranks = 0, 0


@kernel
def _search_sparse_indexes(searches: SegmentSearches, num_searches: int) -> None:
    """Narrow each segment's binary search to the ranks between two entries of the segment's sparse index.

    No branch depends on loaded data, because a mispredicted branch costs more than the superfluous steps of searches
    that have ended.
    """
    most = 0
    for number in range(num_searches):
        search = searches[number]
        search.word = load_uint64(search.pattern - 8)
        search.low, search.high = 0, (search.num_tokens + SPARSE_INDEX_STEP - 1) // SPARSE_INDEX_STEP
        most = max(most, search.high)
    while most > 1:
        most -= most >> 1
        for number in range(num_searches):
            search = searches[number]
            half = search.high >> 1
            middle = search.low + half
            is_less = load_uint64(search.sparse_index + 8 * (middle - (half > 0))) < search.word
            low, left = select_int64(is_less, middle, search.low), search.high - half
            search.low, search.high = low, left
            prefetch(search.sparse_index + 8 * (low + (left >> 1)) - 8)
    for number in range(num_searches):
        search = searches[number]
        n, sparse_index = search.num_tokens, search.sparse_index
        if search.pattern_bytes == 0:
            search.low, search.high = n, n
            continue
        sample = search.low + (load_uint64(sparse_index + 8 * search.low) < search.word)
        num_samples, beyond, step = (n + SPARSE_INDEX_STEP - 1) // SPARSE_INDEX_STEP, sample, 1
        while beyond < num_samples and load_uint64(sparse_index + 8 * beyond) == search.word:
            beyond += step  # equal samples do not order the text before them
            step *= 2
        search.low = max(0, (sample - 1) * SPARSE_INDEX_STEP + 1)
        search.high = min(n, beyond * SPARSE_INDEX_STEP)
        prefetch(search.order + 4 * search.low)
        prefetch(search.order + 2 * (search.low + search.high))
        prefetch(search.order + 4 * search.low + 124)


@inlined
def _prefetch_probe(search: SegmentSearch) -> None:
    """Prefetch the text at the middle rank of a binary search, because the next step compares this text."""
    search.probe = (
        code_address(search, position_at(search, min((search.low + search.high) >> 1, search.num_tokens - 1))) - 8
    )
    prefetch(search.probe - search.offset)


@kernel
def binary_search_all(searches: SegmentSearches, num_searches: int) -> None:
    """Find where the context would be inserted in each segment's suffix array, and the match lengths at that rank.

    All searches together take O(log n) steps, plus a few for matching text; their memory accesses overlap. A step of a
    search compares eight bytes. If they are equal, the next step compares the bytes before them, and otherwise the
    range of ranks is halved. Bytes that match at both ends of the range are not compared again.
    """
    _search_sparse_indexes(searches, num_searches)
    active = 0
    for number in range(num_searches):
        search = searches[number]
        searches[active].active = number
        active += search.low < search.high
        search.offset, search.low_offset, search.high_offset = 0, 0, 0
        _prefetch_probe(search)
    while active > 0:
        num_active = 0
        for i in range(active):
            number = searches[i].active
            search = searches[number]
            offset, low, high = search.offset, search.low, search.high
            word, wanted = load_uint64(search.probe - offset), load_uint64(search.pattern - 8 - offset)
            middle, passed = (low + high) >> 1, offset + 8
            is_same = (word == wanted) & (passed < search.pattern_bytes)
            is_less = (word < wanted) & (not is_same)
            is_not_less = (not is_less) & (not is_same)
            low, high = select_int64(is_less, middle + 1, low), select_int64(is_not_less, middle, high)
            low_offset = select_int64(is_less, offset, search.low_offset)
            high_offset = select_int64(is_not_less, offset, search.high_offset)
            search.low, search.high, search.low_offset, search.high_offset = low, high, low_offset, high_offset
            search.offset = select_int64(is_same, passed, min(low_offset, high_offset))
            _prefetch_probe(search)
            searches[num_active].active = number
            num_active += low < high
        active = num_active
    for number in range(num_searches):
        search = searches[number]
        rank = search.low
        search.probe = position_at(search, rank) if rank < search.num_tokens else -1
        search.position_below = position_at(search, rank - 1) if rank > 0 else -1
    for number in range(num_searches):
        search = searches[number]
        pattern, num_bytes, width = search.pattern, search.pattern_bytes, search.width
        above, below = search.probe, search.position_below
        if above >= 0:
            search.match_above = num_matching_tokens(code_address(search, above), pattern, num_bytes, width)
        if below >= 0:
            search.match_below = num_matching_tokens(code_address(search, below), pattern, num_bytes, width)


@kernel
def longest_match_of_all(searches: SegmentSearches, num_searches: int) -> int:
    length = 0
    for search in range(num_searches):
        length = max(length, longest_match_in(searches[search]))
    return length


@inlined
def request_range(search: SegmentSearch, length: int) -> None:
    """Set the minimum match length that the next ``expand_ranges`` looks for in one segment."""
    search.length = length if longest_match_in(search) >= length else 0


@inlined
def range_size(expanders: RangeExpanders, search: int) -> int:
    """Return the number of matches in one segment that ``expand_ranges`` has found so far."""
    return expanders[2 * search].num_ranks + expanders[2 * search + 1].num_ranks


@inlined
def num_added(expanders: RangeExpanders, search: int) -> int:
    """Return the number of matches in one segment that the last ``expand_ranges`` added."""
    return range_size(expanders, search) - (
        expanders[2 * search].num_ranks_before + expanders[2 * search + 1].num_ranks_before
    )


@inlined
def added_rank(searches: SegmentSearches, expanders: RangeExpanders, search: int, i: int) -> int:
    """Return the suffix-array rank of the ``i``-th match that the last ``expand_ranges`` added."""
    down = expanders[2 * search + 1].num_ranks
    new_down = down - expanders[2 * search + 1].num_ranks_before
    if i < new_down:
        return searches[search].low - down + i
    return searches[search].low + expanders[2 * search].num_ranks_before + i - new_down


@inlined
def _prefetch_next_probe(search: SegmentSearch, expander: RangeExpander, side: int) -> None:
    """Choose the next rank that ``expand_ranges`` compares, and prefetch the entry of the suffix array at that rank."""
    num_ranks, max_ranks = expander.num_ranks, expander.max_ranks
    probe = select_int64(
        expander.is_stepping != 0, min(num_ranks + expander.step, max_ranks) - 1, (num_ranks + max_ranks) >> 1
    )
    expander.probe = probe
    expander.target = rank_address(search, select_int64(side != 0, search.low - 1 - probe, search.low + probe))
    prefetch(expander.target)


@kernel
def expand_ranges(searches: SegmentSearches, expanders: RangeExpanders, num_searches: int, exact: int) -> None:
    """In each segment, find all matches of at least the length that ``request_range`` has set.

    The ranks of all matches of at least some length are neighbours in the suffix array. A smaller length gives a wider
    range of ranks, so call this function with ever smaller lengths. In each direction, the distance of the compared
    ranks doubles, and then a binary search finds the end of the range. If ``exact`` or more ranks have been added, the
    binary search is left out: the range then ends at the last compared match and has more than half of the matches.
    All directions and segments advance together, in O(log of the added ranks) steps.
    """
    active = 0
    for number in range(num_searches):
        search = searches[number]
        for side in range(2):
            expander = expanders[2 * number + side]
            num_ranks = expander.num_ranks
            expander.num_ranks_before = num_ranks
            if search.length == 0 or (
                num_ranks == 0 and (search.match_below if side else search.match_above) < search.length
            ):
                continue
            expander.num_ranks = max(1, num_ranks)
            expander.step, expander.offset = 1, 0
            expander.max_ranks = search.low if side else search.num_tokens - search.low
            expander.is_stepping = 1
            if expander.num_ranks < expander.max_ranks:
                _prefetch_next_probe(search, expander, side)
                expanders[active].active = 2 * number + side
                active += 1
    while active > 0:
        for i in range(active):
            number = expanders[i].active
            search, expander = searches[number >> 1], expanders[number]
            expander.target = (
                code_address(search, min(load_uint32(expander.target), search.num_tokens)) - 8 - expander.offset
            )
            prefetch(expander.target)
        num_active = 0
        for i in range(active):
            number = expanders[i].active
            search, expander = searches[number >> 1], expanders[number]
            offset, probe = expander.offset, expander.probe
            num_ranks, max_ranks = expander.num_ranks, expander.max_ranks
            left = search.length * search.width - offset - 8
            different = load_uint64(expander.target) ^ load_uint64(search.pattern - 8 - offset)
            is_same = different >> np.uint64(8 * max(0, -left)) == np.uint64(0)
            is_agreed = is_same & (left <= 0)
            num_ranks = select_int64(is_agreed, probe + 1, num_ranks)
            max_ranks = select_int64(is_same, max_ranks, probe)
            expander.num_ranks, expander.max_ranks = num_ranks, max_ranks
            expander.step = select_int64(is_agreed, 2 * expander.step, expander.step)
            expander.is_stepping = select_int64(is_same, expander.is_stepping, 0)
            expander.offset = select_int64(is_same & (left > 0), offset + 8, 0)
            _prefetch_next_probe(search, expander, number & 1)
            expanders[num_active].active = number
            num_active += (num_ranks < max_ranks) & (is_same | (num_ranks - expander.num_ranks_before < exact))
        active = num_active
