"""Samples of what followed a pattern: bounded, evenly strided over all its occurrences, the most recent where cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.retrieval.search import Int64s, TokenIds, int32_array, kernel, segment_interval

NOTHING = -1
"""Fills a continuation after its sequence has ended. Equal to SEPARATOR and to no token."""

MAX_SCANNED_SAMPLES = 32
"""Samples taken from one scanned text (tail or own), the most recent."""

MAX_SEGMENT_SAMPLES = 64
"""Samples taken from all segments together, or one of each where there are more segments than that."""

MAX_SAMPLES = 2 * MAX_SCANNED_SAMPLES + 2 * MAX_SEGMENT_SAMPLES

_OWN_RECENCY = 1 << 62
_TAIL_RECENCY = 1 << 61
_SEGMENT_BITS = 40


class Samples(NamedTuple):
    """Places where a pattern occurs, in preallocated arrays of MAX_SAMPLES rows.

    ``continuations`` : int32[MAX_SAMPLES, width], filled up with NOTHING. ``weights`` : float64, occurrences a row
    stands for. ``recency`` : int64, greater is later; own text after tail after segments.
    """

    continuations: TokenIds
    weights: npt.NDArray[np.float64]
    recency: Int64s


def make_samples(width: int) -> Samples:
    """Room for MAX_SAMPLES continuations of ``width`` tokens."""
    return Samples(
        np.empty((MAX_SAMPLES, width), np.int32), np.empty(MAX_SAMPLES, np.float64), np.empty(MAX_SAMPLES, np.int64)
    )


@kernel
def is_own(samples: Samples, row: int) -> bool:
    """Whether a sample comes from the request's own text."""
    return bool(samples.recency[row] >= _OWN_RECENCY)


@kernel
def _copy(text: TokenIds, mask: int, position: int, stop: int, row: TokenIds, width: int) -> None:
    for i in range(width):
        token = text[(position + i) & mask] if position + i < stop else np.int32(NOTHING)
        row[i] = token
        if token < 0:
            row[i:width] = NOTHING
            return


@kernel
def sample_own(
    context: TokenIds, hits: Int64s, found: int, length: int, samples: Samples, start: int, width: int
) -> int:
    """Add samples of the own text's ``found`` hits that agree on ``length`` tokens. Returns the new number of samples.

    A continuation that reaches the context's end goes on from its own begin, as in LZ77: repetition is taken to go on.
    """
    n, count, total = len(context), start, 0
    for i in range(found):
        if hits[1, i] < length:
            continue
        total += 1
        if count - start == MAX_SCANNED_SAMPLES:
            continue
        position, row = hits[0, i], samples.continuations[count]
        _copy(context, -1, position, n, row, width)
        period = n - position
        for j in range(period, width):
            row[j] = row[j - period]
        samples.recency[count] = _OWN_RECENCY + position
        count += 1
    for i in range(start, count):
        samples.weights[i] = total / (count - start)
    return count


@kernel
def sample_tail(
    ring: TokenIds, stop: int, hits: Int64s, found: int, length: int, samples: Samples, start: int, width: int
) -> int:
    """Add samples of the tail's ``found`` hits that agree on ``length`` tokens. Returns the new number of samples."""
    count, total = start, 0
    for i in range(found):
        if hits[1, i] < length:
            continue
        total += 1
        if count - start == MAX_SCANNED_SAMPLES:
            continue
        _copy(ring, len(ring) - 1, hits[0, i], stop, samples.continuations[count], width)
        samples.recency[count] = _TAIL_RECENCY + hits[0, i]
        count += 1
    for i in range(start, count):
        samples.weights[i] = total / (count - start)
    return count


@kernel
def sample_segments(
    table: Int64s, pattern: TokenIds, intervals: Int64s, samples: Samples, start: int, width: int
) -> int:
    """Add samples of ``pattern``'s occurrences in all segments, evenly strided over the ranks of each.

    Neighbouring ranks go on alike, so a stride takes each continuation in proportion. ``intervals`` : int64[2, >=
    segments], scratch. Returns the new number of samples. O(segments * m log n + MAX_SEGMENT_SAMPLES * width).
    """
    count, total, length = start, 0, len(pattern)
    for segment in range(len(table)):
        lo, hi = segment_interval(table, segment, pattern)
        intervals[0, segment], intervals[1, segment] = lo, hi
        total += hi - lo
    stride = max(1, (total + MAX_SEGMENT_SAMPLES - 1) // MAX_SEGMENT_SAMPLES)
    for segment in range(len(table) - 1, -1, -1):
        lo, hi = intervals[0, segment], intervals[1, segment]
        taken = (hi - lo + stride - 1) // stride
        if taken == 0 or count + taken > start + 2 * MAX_SEGMENT_SAMPLES:
            continue
        n = table[segment, 2]
        tokens, suffixes = int32_array(table[segment, 0], n), int32_array(table[segment, 1], n)
        for i in range(taken):
            position = suffixes[lo + i * (hi - lo) // taken] + length
            _copy(tokens, -1, position, n, samples.continuations[count], width)
            samples.weights[count] = (hi - lo) / taken
            samples.recency[count] = (segment << _SEGMENT_BITS) + position
            count += 1
    return count
