"""The kernel of the frequency drafter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, int32_array, kernel
from ssd.drafting.suffix.extend import MAX_DRAFT
from ssd.drafting.suffix.gather import MAX_SAMPLES, NOTHING, Texts, gather, next_token, no_hits
from ssd.drafting.suffix.workspace import frame_at
from ssd.retrieval.lanes import open_lanes, search_lanes
from ssd.retrieval.scan import pattern_length
from ssd.retrieval.snapshot import segments_at, snapshot_at


@kernel
def _equal(one: TokenIds, other: TokenIds, width: int) -> bool:
    for i in range(width):
        if one[i] != other[i]:
            return False
        if one[i] < 0:
            return True
    return True


@kernel
def most_frequent(
    continuations: TokenIds, weights: npt.NDArray[np.float64], recency: Int64s, count: int, width: int
) -> int:
    """Row of the continuation of ``width`` tokens that weighs most; the most recent wins ties. -1 when none.

    Ended continuations compete as they are; those that end at once do not. Pairwise: O(count^2) first-token compares.
    """
    best, best_weight, best_recency = -1, 0.0, np.int64(-1)
    for i in range(count):
        if continuations[i, 0] < 0:
            continue
        weight, latest, counted = 0.0, recency[i], False
        for j in range(count):
            if _equal(continuations[i], continuations[j], width):
                if j < i:
                    counted = True
                    break
                weight += weights[j]
                latest = max(latest, recency[j])
        if counted:
            continue
        if weight > best_weight or (weight == best_weight and latest > best_recency):
            best, best_weight, best_recency = i, weight, latest
    return best


@kernel
def propose_frequency(
    workspace: int, snapshot: int, num_rows: int, max_length: int, min_length: int, continuations: TokenIds
) -> None:
    """Draft for the first ``num_rows`` rows of the workspace at an address, all of the snapshot at an address.

    Writes tokens and results. ``continuations`` : int32[MAX_SAMPLES, MAX_DRAFT], scratch.
    """
    frame = frame_at(workspace)
    searched = snapshot_at(snapshot)
    ring = int32_array(searched.ring, searched.ring_size)
    lanes, walkers, rows, pool, levels = frame.lanes, frame.walkers, frame.rows, frame.pool, frame.levels
    own, num_segments, num_static = no_hits(), searched.num_segments, searched.num_static
    segments = segments_at(searched.segments, num_segments)
    for row in range(num_rows):
        context, limit = int32_array(rows[row, 0], rows[row, 1]), rows[row, 2]
        frame.results[row] = 0
        longest = pattern_length(context, max_length)
        if limit < 1 or longest < min_length:
            continue
        open_lanes(segments, context, longest, frame.patterns, lanes, walkers)
        search_lanes(lanes, num_segments)
        texts = Texts(context, ring, searched.tail_start, searched.tail_stop)
        num_levels = gather(
            texts, lanes, walkers, num_segments, num_static, longest, min_length, 1, own, frame.tail, pool, levels
        )
        if num_levels == 0:
            continue
        for sample in range(levels.ends[0]):
            depth = 0
            while depth < limit:
                token = next_token(pool, sample, depth, texts)
                continuations[sample, depth] = token
                if token < 0:
                    break
                depth += 1
            continuations[sample, depth:limit] = NOTHING
        best = most_frequent(continuations, pool.weights, pool.recency, levels.ends[0], limit)
        if best < 0:
            continue
        size = 0
        while size < limit and continuations[best, size] >= 0:
            frame.tokens[row, size] = continuations[best, size]
            size += 1
        frame.results[row, 0] = size
        frame.results[row, 1] = levels.lengths[0]


def make_continuations() -> TokenIds:
    """The scratch memory that ``propose_frequency`` asks for."""
    return np.empty((MAX_SAMPLES, MAX_DRAFT), np.int32)
