"""Lookup: where does the tail of a context occur in a snapshot?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, address, int32_array, kernel
from ssd.compiled.records import dtype_of
from ssd.retrieval.lanes import (
    Lane,
    Walker,
    ask_to_widen,
    lanes_at,
    longest_in_lanes,
    num_taken,
    open_lanes,
    search_lanes,
    walkers_at,
    widen,
)
from ssd.retrieval.pattern import MAX_MATCH_LENGTH, PATTERNS_BYTES, as_context
from ssd.retrieval.scan import MAX_SCAN_HITS, pattern_length, scan
from ssd.retrieval.snapshot import Snapshot, segments_at, snapshot_at

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
    ``drafting.workspace``. Raises CacheError for a context that is no sequence of integers.
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
