"""Search of a snapshot for the longest match of a context, as a reference for measurements and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Int64s, address, dtype_of, int32_array, kernel
from ssd.retrieval.scan import MAX_SCAN_HITS, pattern_length, scan
from ssd.retrieval.snapshot import Snapshot, segments_at, snapshot_at
from ssd.retrieval.suffix_array_search import (
    MAX_MATCH_LENGTH,
    PATTERNS_BYTES,
    RangeExpander,
    SegmentSearch,
    as_context,
    binary_search_all,
    expand_ranges,
    expanders_at,
    longest_match_of_all,
    range_size,
    request_range,
    searches_at,
    start_searches,
)

_ALL: Final = 1 << 62  # more ranks than any segment has


@kernel
def _longest_match(
    snapshot: int,
    context_address: int,
    context_length: int,
    max_length: int,
    hits: Int64s,
    patterns: int,
    searches_address: int,
    expanders_address: int,
) -> tuple[int, int]:
    searched, context = snapshot_at(snapshot), int32_array(context_address, context_length)
    num_segments, ring = searched.num_segments, int32_array(searched.ring, searched.ring_size)
    searches, expanders = searches_at(searches_address, num_segments), expanders_at(expanders_address, 2 * num_segments)
    longest = pattern_length(context, min(max_length, MAX_MATCH_LENGTH))
    found = scan(ring, searched.memtable_start, searched.memtable_stop, context, longest, hits[0], hits[1])
    length, support = 0, 0
    for i in range(found):
        length = max(length, hits[1, i])
    start_searches(segments_at(searched.segments, num_segments), context, longest, patterns, searches, expanders)
    binary_search_all(searches, num_segments)
    length = max(length, longest_match_of_all(searches, num_segments))
    if length == 0:
        return 0, 0
    for i in range(found):
        if hits[1, i] >= length:
            support += 1
    for search in range(num_segments):
        request_range(searches[search], length)
    expand_ranges(searches, expanders, num_segments, _ALL)
    for search in range(num_segments):
        support += range_size(expanders, search)
    return length, support


@dataclass(frozen=True, slots=True)
class Match:
    """The longest suffix of a context that occurs in a snapshot of the cache.

    Attributes:
        length: The length of the suffix in tokens.
        support: The number of its occurrences.
    """

    length: int
    support: int


def longest_match(snapshot: Snapshot, context: npt.NDArray[np.integer[Any]], max_length: int) -> Match:
    """Find the longest suffix of ``context`` (integers[n]), of at most ``max_length`` tokens, anywhere in ``snapshot``.

    The result is exact in segments; in the memtable only the MAX_SCAN_HITS most recent occurrences of the last token
    are examined. Without a match, returns ``Match(0, 0)``. O(segments * log n + memtable). It allocates its buffers,
    unlike ``drafting.drafter``. Raises CacheError if the context is not a sequence of integers.
    """
    ids, patterns, num_segments = as_context(context), np.zeros(PATTERNS_BYTES, np.uint8), len(snapshot.segments)
    searches, expanders = (
        np.empty(num_segments, dtype_of(SegmentSearch)),
        np.empty(2 * num_segments, dtype_of(RangeExpander)),
    )
    length, support = _longest_match(
        snapshot.address,
        # Passed by address: a read-only array has another type, for which the kernel would be compiled while serving.
        address(ids),
        len(ids),
        max_length,
        np.empty((2, MAX_SCAN_HITS), np.int64),
        address(patterns),
        address(searches),
        address(expanders),
    )
    return Match(length, support)
