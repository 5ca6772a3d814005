"""Lookup: where does the tail of a context occur in a snapshot?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, address, inlined, int32_array, int64_array, kernel
from ssd.retrieval.lanes import (
    LANE_COLUMNS,
    WALKER_COLUMNS,
    ask_to_widen,
    longest_in_lanes,
    num_taken,
    open_lanes,
    search_lanes,
    widen,
)
from ssd.retrieval.pattern import MAX_MATCH_LENGTH, PATTERNS_BYTES, as_context
from ssd.retrieval.scan import MAX_SCAN_HITS, pattern_length, scan
from ssd.retrieval.snapshot import TABLE_COLUMNS, Snapshot

_ALL: Final = 1 << 62  # ranks; more than there are


@inlined
def table_at(snapshot: int) -> Int64s:
    """The segment table of the snapshot whose words lie at an address."""
    words = int64_array(snapshot, 6)
    return int64_array(words[0], words[1] * TABLE_COLUMNS).reshape((words[1], TABLE_COLUMNS))


@inlined
def table_number(table: Int64s) -> int:
    """A number that no other segment table has, 0 for an empty one."""
    return int(table[0, 5]) if len(table) > 0 else 0


@inlined
def num_static(table: Int64s) -> int:
    """How many of the table's segments, the first, are static."""
    return int(table[0, 6]) if len(table) > 0 else 0


@inlined
def tail_at(snapshot: int) -> tuple[TokenIds, int, int]:
    """Ring, begin and end of the tail, of the snapshot whose words lie at an address."""
    words = int64_array(snapshot, 6)
    return int32_array(words[2], words[3]), words[4], words[5]


@kernel
def _longest_match(
    snapshot: int,
    context_address: int,
    context_length: int,
    max_length: int,
    hits: Int64s,
    patterns: int,
    lanes: Int64s,
    walkers: Int64s,
) -> tuple[int, int]:
    table, (ring, tail_start, tail_stop) = table_at(snapshot), tail_at(snapshot)
    num_segments, context = len(table), int32_array(context_address, context_length)
    longest = pattern_length(context, min(max_length, MAX_MATCH_LENGTH))
    found = scan(ring, tail_start, tail_stop, context, longest, hits[0], hits[1])
    length, support = 0, 0
    for i in range(found):
        length = max(length, hits[1, i])
    open_lanes(table, context, longest, patterns, lanes, walkers)
    search_lanes(lanes, num_segments)
    length = max(length, longest_in_lanes(lanes, num_segments))
    if length == 0:
        return 0, 0
    for i in range(found):
        if hits[1, i] >= length:
            support += 1
    for lane in range(num_segments):
        ask_to_widen(lanes, lane, length)
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
    ``drafting.workspace``. Raises CacheError for a context that is no sequence of integers.
    """
    ids, patterns = as_context(context), np.zeros(PATTERNS_BYTES, np.uint8)
    length, support = _longest_match(
        snapshot.address,
        # By address: as an array, a read-only one would have the kernel compiled once more, in the middle of serving.
        address(ids),
        len(ids),
        max_length,
        np.empty((2, MAX_SCAN_HITS), np.int64),
        address(patterns),
        np.empty((len(snapshot.segments), LANE_COLUMNS), np.int64),
        np.empty((2 * len(snapshot.segments), WALKER_COLUMNS), np.int64),
    )
    return Match(length, support)
