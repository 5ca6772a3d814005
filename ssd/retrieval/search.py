"""Lookup: where does the tail of a context occur in an index or a text, and what followed there?

The kernels allocate nothing, release the GIL and do bounded work however often the pattern occurs. They read every
segment of a snapshot through its ``segment_table`` and the tail through the ring with a mask; a plain array is a ring
with mask -1. Unchecked inside: a snapshot's table, ring and range belong together, which the index guarantees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types
from numba.extending import intrinsic

from ssd.retrieval.snapshot import Snapshot

TokenIds = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
_F = TypeVar("_F", bound=Callable[..., Any])

MAX_SCAN_HITS = 4096
"""A scan looks at this many occurrences of the last token, the most recent ones."""

MAX_SCAN_TOKENS = 1 << 16
"""A scan looks at this many tokens, the most recent ones: a bound on the time, far above the size of a tail."""


def kernel(function: _F) -> _F:
    """Compile ``function`` on its first call, keep the machine code on disk, release the GIL inside."""
    return cast(_F, njit(cache=True, nogil=True)(function))


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.CPointer(types.int32)))

    return types.CPointer(types.int32)(types.int64), generate


@kernel
def int32_array(address: int, length: int) -> TokenIds:
    """View int32[length] at ``address``; the caller keeps the memory alive."""
    return carray(_pointer(address), (length,))  # type: ignore[no-any-return]


@kernel
def compare(tokens: TokenIds, position: int, pattern: TokenIds) -> int:
    """Order of the suffix at ``position`` against ``pattern``: -1, 0 (it starts with the pattern) or 1. O(m)."""
    n = len(tokens)
    for i in range(len(pattern)):
        if position + i >= n:
            return -1
        difference = np.int64(tokens[position + i]) - np.int64(pattern[i])
        if difference < 0:
            return -1
        if difference > 0:
            return 1
    return 0


@kernel
def find_interval(tokens: TokenIds, suffixes: TokenIds, pattern: TokenIds) -> tuple[int, int]:
    """Find all suffixes of ``tokens`` that start with ``pattern``.

    ``tokens`` : int32[n], text of one segment. ``suffixes`` : int32[n], its suffix array. ``pattern`` : int32[m],
    oldest token first, no SEPARATOR; m == 0 matches every suffix. Returns the half-open range ``lo, hi`` of ranks,
    ``lo == hi`` when absent (and ``lo == n`` when the pattern is greater than every suffix). O(m log n). Binary search
    of Manber & Myers (1993, section 2) without their LCP tables, which need two more int32 per position.
    """
    lo, hi, above = 0, len(suffixes), len(suffixes)
    while lo < hi:
        middle = (lo + hi) >> 1
        order = compare(tokens, suffixes[middle], pattern)
        if order < 0:
            lo = middle + 1
        else:
            hi = middle
            if order > 0:
                above = middle
    if lo == above or compare(tokens, suffixes[lo], pattern) != 0:
        return lo, lo
    # The upper end by doubling steps: most matches are few, so it is near.
    first, step, hi = lo, 1, above
    while lo + step < above:
        if compare(tokens, suffixes[lo + step], pattern) == 0:
            lo += step
            step *= 2
        else:
            hi = lo + step
            break
    while lo + 1 < hi:
        middle = (lo + hi) >> 1
        if compare(tokens, suffixes[middle], pattern) == 0:
            lo = middle
        else:
            hi = middle
    return first, hi


@kernel
def segment_interval(table: Int64s, segment: int, pattern: TokenIds) -> tuple[int, int]:
    """``find_interval`` in row ``segment`` of a segment table."""
    n = table[segment, 2]
    return find_interval(int32_array(table[segment, 0], n), int32_array(table[segment, 1], n), pattern)


@kernel
def is_present(table: Int64s, segment: int, pattern: TokenIds) -> bool:
    """Whether ``pattern`` occurs in row ``segment`` of a segment table. O(m log n)."""
    n = table[segment, 2]
    tokens, suffixes = int32_array(table[segment, 0], n), int32_array(table[segment, 1], n)
    lo, hi = 0, n
    while lo < hi:
        middle = (lo + hi) >> 1
        order = compare(tokens, suffixes[middle], pattern)
        if order == 0:
            return True
        if order < 0:
            lo = middle + 1
        else:
            hi = middle
    return False


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
def longest_in_segments(table: Int64s, context: TokenIds, known: int, max_length: int) -> int:
    """Length of the longest tail of ``context``, at most ``max_length``, that some segment holds; at least ``known``.

    Every tail of a tail that occurs occurs too, so each segment takes one search to see that it cannot beat what is
    known, else a bisection over the lengths. ``max_length`` must come from ``pattern_length``.
    """
    n = len(context)
    for segment in range(len(table) - 1, -1, -1):
        if known >= max_length:
            break
        if not is_present(table, segment, context[n - known - 1 :]):
            continue
        low, high = known + 1, max_length
        while low < high:
            middle = (low + high + 1) >> 1
            if is_present(table, segment, context[n - middle :]):
                low = middle
            else:
                high = middle - 1
        known = low
    return known


@kernel
def scan(
    text: TokenIds,
    mask: int,
    start: int,
    stop: int,
    context: TokenIds,
    max_length: int,
    positions: Int64s,
    lengths: Int64s,
) -> int:
    """Find where the last token of ``context`` stands in [start, stop) of ``text`` and how much before agrees.

    Position p lies at ``text[p & mask]``; a plain array takes mask -1. Writes, most recent first, the position after
    each occurrence and the agreeing length (1..max_length), and returns how many, at most ``len(positions)``. Looks at
    the most recent MAX_SCAN_TOKENS positions. O(stop - start + occurrences * max_length).
    """
    n, found = len(context), 0
    if max_length < 1:
        return 0
    last = context[n - 1]
    for position in range(stop - 1, max(start, stop - MAX_SCAN_TOKENS) - 1, -1):
        if text[position & mask] != last:
            continue
        length, longest = 1, min(max_length, position - start + 1)
        while length < longest and text[(position - length) & mask] == context[n - 1 - length]:
            length += 1
        positions[found] = position + 1
        lengths[found] = length
        found += 1
        if found == len(positions):
            break
    return found


@kernel
def _longest_match(
    table: Int64s,
    ring_address: int,
    ring_size: int,
    tail_start: int,
    tail_stop: int,
    context_address: int,
    context_length: int,
    max_length: int,
    hits: Int64s,
) -> tuple[int, int]:
    context, ring = int32_array(context_address, context_length), int32_array(ring_address, ring_size)
    longest = pattern_length(context, max_length)
    found = scan(ring, ring_size - 1, tail_start, tail_stop, context, longest, hits[0], hits[1])
    length, support = 0, 0
    for i in range(found):
        length = max(length, hits[1, i])
    length = longest_in_segments(table, context, length, longest)
    if length == 0:
        return 0, 0
    for i in range(found):
        if hits[1, i] >= length:
            support += 1
    for segment in range(len(table)):
        lo, hi = segment_interval(table, segment, context[context_length - length :])
        support += hi - lo
    return length, support


@dataclass(frozen=True, slots=True)
class Match:
    """The longest tail of a context that occurs: its ``length`` in tokens, and ``support``, how often it occurs."""

    length: int
    support: int


def address(array: TokenIds) -> int:
    """Where the data of ``array`` begin, for ``int32_array``."""
    return int(array.__array_interface__["data"][0])


def longest_match(snapshot: Snapshot, context: TokenIds, max_length: int) -> Match:
    """Longest tail of ``context`` (int32[n]), at most ``max_length`` tokens, anywhere in ``snapshot``.

    Exact in the segments; in the tail the most recent MAX_SCAN_HITS occurrences of the last token are looked at. No
    match is ``Match(0, 0)``. O(segments * max_length * log n + tail).
    """
    context = np.ascontiguousarray(context, np.int32)
    length, support = _longest_match(
        snapshot.segment_table,
        address(snapshot.ring),
        len(snapshot.ring),
        snapshot.tail_start,
        snapshot.tail_stop,
        address(context),
        len(context),
        max_length,
        np.empty((2, MAX_SCAN_HITS), np.int64),
    )
    return Match(length, support)
