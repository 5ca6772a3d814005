"""The kernel of the suffix drafter: evidence at several match lengths, a chain of its most probable tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.drafting.acceptance import Weights, acceptance_logit
from ssd.drafting.continuations import (
    MAX_SAMPLES,
    Samples,
    is_own,
    make_samples,
    sample_own,
    sample_segments,
    sample_tail,
)
from ssd.retrieval.search import (
    MAX_SCAN_HITS,
    Int64s,
    TokenIds,
    int32_array,
    kernel,
    longest_in_segments,
    pattern_length,
    scan,
)

MAX_LEVELS = 6
"""Match lengths whose evidence is compared: the longest of each source, then shorter ones by thirds."""

ENOUGH_SUPPORT = 64.0
"""No shorter match is looked up once one has this many occurrences: it would only be less specific."""

_TABLE = MAX_SAMPLES


class Scratch(NamedTuple):
    """Preallocated memory of the kernel, owned by one drafter.

    ``levels`` : the samples of every level. ``alive`` : int32[levels, MAX_SAMPLES], rows that agree with the draft so
    far;
    ``num_alive`` : int64[levels]. ``lengths`` : int64[levels], match length of the level.
    """

    levels: tuple[Samples, Samples, Samples, Samples, Samples, Samples]
    alive: TokenIds
    num_alive: Int64s
    lengths: Int64s
    own_hits: Int64s
    tail_hits: Int64s
    candidates: TokenIds
    votes: npt.NDArray[np.float64]


def make_scratch(width: int) -> Scratch:
    """Scratch for drafts of up to ``width`` tokens."""
    levels = tuple(make_samples(width) for _ in range(MAX_LEVELS))
    return Scratch(
        levels,  # type: ignore[arg-type]
        np.empty((MAX_LEVELS, MAX_SAMPLES), np.int32),
        np.empty(MAX_LEVELS, np.int64),
        np.empty(MAX_LEVELS, np.int64),
        np.empty((2, MAX_SCAN_HITS), np.int64),
        np.empty((2, MAX_SCAN_HITS), np.int64),
        np.empty(_TABLE, np.int32),
        np.empty((3, _TABLE), np.float64),
    )


@kernel
def _longest(hits: Int64s, found: int) -> int:
    length = 0
    for i in range(found):
        length = max(length, hits[1, i])
    return length


@kernel
def top_token(
    samples: Samples, alive: TokenIds, num_alive: int, depth: int, candidates: TokenIds, votes: npt.NDArray[np.float64]
) -> tuple[int, float, float, float]:
    """Next token with most votes among the agreeing samples, ties to the most recent: token, votes, own votes, support.

    Token -1 when none goes on. Support counts all that agree, the ended ones too.
    """
    distinct, support = 0, 0.0
    for i in range(num_alive):
        row = alive[i]
        weight, token = samples.weights[row], samples.continuations[row, depth]
        support += weight
        if token < 0:
            continue
        at = 0
        while at < distinct and candidates[at] != token:
            at += 1
        if at == distinct:
            candidates[at] = token
            votes[0, at], votes[1, at], votes[2, at] = 0.0, 0.0, -1.0
            distinct += 1
        votes[0, at] += weight
        if is_own(samples, row):
            votes[1, at] += weight
        votes[2, at] = max(votes[2, at], float(samples.recency[row]))
    best = -1
    for at in range(distinct):
        if (
            best < 0
            or votes[0, at] > votes[0, best]
            or (votes[0, at] == votes[0, best] and votes[2, at] > votes[2, best])
        ):
            best = at
    if best < 0:
        return -1, 0.0, 0.0, support
    return int(candidates[best]), votes[0, best], votes[1, best], support


@kernel
def gather(
    table: Int64s,
    ring: TokenIds,
    tail_start: int,
    tail_stop: int,
    context: TokenIds,
    limit: int,
    max_length: int,
    min_length: int,
    intervals: Int64s,
    scratch: Scratch,
) -> int:
    """Collect the evidence of up to MAX_LEVELS match lengths, longest first; returns how many levels."""
    n = len(context)
    longest = pattern_length(context, max_length)
    if limit < 1 or longest < min_length:
        return 0
    own = scan(context, -1, 0, n - 1, context, longest, scratch.own_hits[0], scratch.own_hits[1])
    tail = scan(
        ring, len(ring) - 1, tail_start, tail_stop, context, longest, scratch.tail_hits[0], scratch.tail_hits[1]
    )
    own_length = _longest(scratch.own_hits, own)
    index_length = longest_in_segments(table, context, _longest(scratch.tail_hits, tail), longest)
    length, num_levels, below = max(own_length, index_length), 0, min(own_length, index_length)
    while length >= max(1, min_length) and num_levels < MAX_LEVELS:
        samples = scratch.levels[num_levels]
        count = sample_own(context, scratch.own_hits, own, length, samples, 0, limit)
        if length <= index_length:
            count = sample_tail(ring, tail_stop, scratch.tail_hits, tail, length, samples, count, limit)
            count = sample_segments(table, context[n - length :], intervals, samples, count, limit)
        support = 0.0
        for i in range(count):
            scratch.alive[num_levels, i] = i
            support += samples.weights[i]
        scratch.num_alive[num_levels] = count
        scratch.lengths[num_levels] = length
        num_levels += 1
        if support >= ENOUGH_SUPPORT:
            break
        shorter = min(length - 1, length * 2 // 3)
        # The other source's own longest match is a level of its own: nothing more specific is known from there.
        length = below if shorter < below < length else shorter
    return num_levels


@kernel
def chain(
    num_levels: int,
    limit: int,
    bias: float,
    threshold: float,
    weights: Weights,
    scratch: Scratch,
    tokens: TokenIds,
    probabilities: npt.NDArray[np.float64],
    result: Int64s,
) -> None:
    """Extend the draft by the token of the level with the highest estimate, while the product of estimates is
    enough."""
    result[:] = 0
    product = 1.0
    for depth in range(limit):
        best_token, best_logit, best_level, best_own = -1, -1e30, 0, False
        for level in range(num_levels):
            if scratch.num_alive[level] == 0:
                continue
            token, votes, own_votes, support = top_token(
                scratch.levels[level],
                scratch.alive[level],
                scratch.num_alive[level],
                depth,
                scratch.candidates,
                scratch.votes,
            )
            if token < 0:
                continue
            logit = acceptance_logit(weights, scratch.lengths[level] + depth, support, votes, own_votes, depth)
            if logit > best_logit:
                best_token, best_logit, best_level, best_own = token, logit, level, 2.0 * own_votes >= votes
        if best_token < 0:
            break
        probability = 1.0 / (1.0 + math.exp(-(best_logit + bias)))
        product *= probability
        if product < threshold:
            break
        tokens[depth] = best_token
        probabilities[depth] = probability
        if depth == 0:
            result[1] = scratch.lengths[best_level]
            result[2] = 1 if best_own else 0
        result[0] = depth + 1
        for level in range(num_levels):
            kept = 0
            for i in range(scratch.num_alive[level]):
                row = scratch.alive[level, i]
                if scratch.levels[level].continuations[row, depth] == best_token:
                    scratch.alive[level, kept] = row
                    kept += 1
            scratch.num_alive[level] = kept


@kernel
def propose_suffix(
    table: Int64s,
    ring_address: int,
    ring_size: int,
    tail_start: int,
    tail_stop: int,
    rows: Int64s,
    biases: npt.NDArray[np.float64],
    max_length: int,
    min_length: int,
    threshold: float,
    weights: Weights,
    intervals: Int64s,
    scratch: Scratch,
    tokens: TokenIds,
    probabilities: npt.NDArray[np.float64],
    results: Int64s,
) -> None:
    """Draft for every row (context address, length, limit) of one snapshot.

    Writes ``tokens`` : int32[rows, width], ``probabilities`` : float64 of that shape, the estimate of each, and
    ``results`` : int64[rows, 3], draft length, match length, 1 when most of the first token's evidence is own text.
    """
    ring = int32_array(ring_address, ring_size)
    for row in range(len(rows)):
        context, limit = int32_array(rows[row, 0], rows[row, 1]), rows[row, 2]
        num_levels = gather(
            table, ring, tail_start, tail_stop, context, limit, max_length, min_length, intervals, scratch
        )
        chain(
            num_levels, limit, biases[row], threshold, weights, scratch, tokens[row], probabilities[row], results[row]
        )
