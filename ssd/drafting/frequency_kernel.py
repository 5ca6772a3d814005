"""The kernel of the frequency drafter."""

from __future__ import annotations

import numpy as np

from ssd.drafting.continuations import Samples, sample_segments, sample_tail
from ssd.retrieval.search import Int64s, TokenIds, int32_array, kernel, longest_in_segments, pattern_length, scan


@kernel
def _equal(one: TokenIds, other: TokenIds, width: int) -> bool:
    for i in range(width):
        if one[i] != other[i]:
            return False
        if one[i] < 0:
            return True
    return True


@kernel
def most_frequent(samples: Samples, count: int, width: int) -> int:
    """Row of the sample whose continuation of ``width`` tokens weighs most; the most recent wins ties. -1 when none.

    Ended continuations compete as they are; those that end at once do not. Pairwise: O(count^2) first-token compares.
    """
    best, best_weight, best_recency = -1, 0.0, np.int64(-1)
    for i in range(count):
        if samples.continuations[i, 0] < 0:
            continue
        weight, recency, counted = 0.0, samples.recency[i], False
        for j in range(count):
            if _equal(samples.continuations[i], samples.continuations[j], width):
                if j < i:
                    counted = True
                    break
                weight += samples.weights[j]
                recency = max(recency, samples.recency[j])
        if counted:
            continue
        if weight > best_weight or (weight == best_weight and recency > best_recency):
            best, best_weight, best_recency = i, weight, recency
    return best


@kernel
def propose_frequency(
    table: Int64s,
    ring_address: int,
    ring_size: int,
    tail_start: int,
    tail_stop: int,
    rows: Int64s,
    max_length: int,
    min_length: int,
    hits: Int64s,
    intervals: Int64s,
    samples: Samples,
    tokens: TokenIds,
    results: Int64s,
) -> None:
    """Draft for every row (context address, length, limit) of one snapshot.

    Writes ``tokens`` : int32[rows, width] and ``results`` : int64[rows, 3], draft length, match length, 0 (index).
    """
    ring = int32_array(ring_address, ring_size)
    for row in range(len(rows)):
        context, limit = int32_array(rows[row, 0], rows[row, 1]), rows[row, 2]
        results[row] = 0
        longest = pattern_length(context, max_length)
        if limit < 1 or longest < min_length:
            continue
        found = scan(ring, ring_size - 1, tail_start, tail_stop, context, longest, hits[0], hits[1])
        length = 0
        for i in range(found):
            length = max(length, hits[1, i])
        length = longest_in_segments(table, context, length, longest)
        if length < min_length:
            continue
        count = sample_tail(ring, tail_stop, hits, found, length, samples, 0, limit)
        count = sample_segments(table, context[len(context) - length :], intervals, samples, count, limit)
        best = most_frequent(samples, count, limit)
        if best < 0:
            continue
        size = 0
        while size < limit and samples.continuations[best, size] >= 0:
            tokens[row, size] = samples.continuations[best, size]
            size += 1
        results[row, 0] = size
        results[row, 1] = length
