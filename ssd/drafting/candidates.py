"""The tokens that may come next, and what each view of the acceptance model sees of them."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.drafting.acceptance import (
    BEFORE,
    COARSE_LENGTHS,
    COARSE_SHARES,
    INDEX,
    INPUTS,
    LENGTHS,
    LEVEL,
    LEVEL_VIEWS,
    OFFSETS,
    ORIGINS,
    OWN,
    PAIR,
    PREDICTION,
    REQUEST,
    SHARES,
    SUPPORTS,
    TOKEN,
    Model,
    chance_of,
    coarse_length,
    coarse_share,
    hash_of,
    hash_of_pair,
    length_bucket,
    mixed,
    share_bucket,
    support_bucket,
    weight_set,
)
from ssd.drafting.evidence import (
    MAX_LEVELS,
    MAX_SAMPLES,
    NOTHING,
    Levels,
    Pool,
    Texts,
    is_own,
    next_token,
    origin_of,
    own_position,
)
from ssd.retrieval.memory import Int64s, float64_array, inlined, int64_array, kernel

MAX_CANDIDATES: Final = 8
"""Tokens judged at one position: those with the greatest share of the votes at any level of any source."""

_MOST_TOKENS: Final = MAX_SAMPLES + 1
_INDEX_VOTES: Final = 0  # columns of a token's votes: by level of the index, then of own text, then the greatest share
_OWN_VOTES: Final = MAX_LEVELS
_GREATEST: Final = 2 * MAX_LEVELS
_VOTE_COLUMNS: Final = 2 * MAX_LEVELS + 1
_NOWHERE: Final = MAX_LEVELS

CANDIDATES_WORDS: Final = (
    MAX_SAMPLES + _MOST_TOKENS * (1 + _VOTE_COLUMNS) + MAX_CANDIDATES * (INPUTS + 3) + 2 * MAX_LEVELS
)


class Candidates(NamedTuple):
    """Scratch memory, and the candidates of one position.

    ``nexts`` : int64[MAX_SAMPLES], what the samples asked go on with. ``votes`` : float64[tokens, _VOTE_COLUMNS].
    ``support`` : float64[2, MAX_LEVELS], places by source (index, own) and level that agree so far.
    ``tokens`` : int64[n], the candidates first. Of each candidate: ``inputs`` : int64[MAX_CANDIDATES, INPUTS], its
    table entries, ``sets`` : its weight set, ``log_odds`` and ``chances`` : float64, what the model says.
    """

    nexts: Int64s
    tokens: Int64s
    votes: npt.NDArray[np.float64]
    support: npt.NDArray[np.float64]
    inputs: Int64s
    sets: Int64s
    log_odds: npt.NDArray[np.float64]
    chances: npt.NDArray[np.float64]


@inlined
def candidates_at(address: int) -> Candidates:
    """The candidates in the CANDIDATES_WORDS words at ``address``."""
    tokens = address + 8 * MAX_SAMPLES
    votes = tokens + 8 * _MOST_TOKENS
    support = votes + 8 * _MOST_TOKENS * _VOTE_COLUMNS
    inputs = support + 8 * 2 * MAX_LEVELS
    sets = inputs + 8 * MAX_CANDIDATES * INPUTS
    return Candidates(
        int64_array(address, MAX_SAMPLES),
        int64_array(tokens, _MOST_TOKENS),
        float64_array(votes, _MOST_TOKENS * _VOTE_COLUMNS).reshape((_MOST_TOKENS, _VOTE_COLUMNS)),
        float64_array(support, 2 * MAX_LEVELS).reshape((2, MAX_LEVELS)),
        int64_array(inputs, MAX_CANDIDATES * INPUTS).reshape((MAX_CANDIDATES, INPUTS)),
        int64_array(sets, MAX_CANDIDATES),
        float64_array(sets + 8 * MAX_CANDIDATES, MAX_CANDIDATES),
        float64_array(sets + 16 * MAX_CANDIDATES, MAX_CANDIDATES),
    )


class Position(NamedTuple):
    """Where in a draft candidates are sought.

    ``depth`` : draft tokens before it, of which the pool's samples have passed ``passed``. ``before`` : the token
    before it. ``predicted`` : what the client's prediction says, NOTHING where it does not; ``agreed`` : for how many
    tokens it has been right. ``mood`` : how the request's drafts fared, 0..MOODS - 1. ``prompt_length`` : of the
    request.
    """

    depth: int
    passed: int
    before: int
    predicted: int
    agreed: int
    is_fresh: bool
    mood: int
    prompt_length: int


@inlined
def _row_of(token: int, size: int, found: Candidates) -> int:
    """Row of a token among the first ``size``, or ``size``."""
    row = 0
    while row < size and found.tokens[row] != token:
        row += 1
    return row


@kernel
def _keep_greatest(found: Candidates, size: int, num_levels: int, index_top: int, own_top: int, predicted: int) -> int:
    """Move the MAX_CANDIDATES tokens with the greatest share of votes at any level to the front; how many are there."""
    if size <= MAX_CANDIDATES:
        return size
    for row in range(size):
        votes, greatest, sum_votes, sum_support = found.votes[row], 0.0, 0.0, 0.0
        for level in range(num_levels):
            sum_votes += votes[_INDEX_VOTES + level] + votes[_OWN_VOTES + level]
            sum_support += found.support[0, level] + found.support[1, level]
            if sum_support > 0.0:
                greatest = max(greatest, sum_votes / sum_support)
        if index_top < _NOWHERE:
            greatest = max(greatest, votes[_INDEX_VOTES + index_top] / found.support[0, index_top])
        if own_top < _NOWHERE:
            greatest = max(greatest, votes[_OWN_VOTES + own_top] / found.support[1, own_top])
        votes[_GREATEST] = 2.0 if found.tokens[row] == predicted else greatest
    for place in range(MAX_CANDIDATES):
        best = place
        for row in range(place + 1, size):
            if found.votes[row, _GREATEST] > found.votes[best, _GREATEST]:
                best = row
        if best != place:
            found.tokens[place], found.tokens[best] = found.tokens[best], found.tokens[place]
            for column in range(_VOTE_COLUMNS):
                kept = found.votes[place, column]
                found.votes[place, column] = found.votes[best, column]
                found.votes[best, column] = kept
    return MAX_CANDIDATES


@kernel
def find_candidates(
    texts: Texts,
    pool: Pool,
    levels: Levels,
    num_levels: int,
    alive: Int64s,
    num_alive: int,
    at: Position,
    model: Model,
    found: Candidates,
) -> int:
    """Let the samples ``alive[:num_alive]`` vote and judge what they voted for; how many candidates there are.

    ``alive`` : samples that agree with the draft so far, those of longer matches first. A sample whose sequence has
    ended is support for none. O(samples * distinct tokens).
    """
    found.support[:] = 0.0
    size, level = 0, 0
    index_top, own_top = _NOWHERE, _NOWHERE
    index_newest, own_newest, index_says, own_says = np.int64(-1), np.int64(-1), NOTHING, NOTHING
    for i in range(num_alive):
        sample = alive[i]
        while sample >= levels.ends[level]:
            level += 1
        token, weight, recency = next_token(pool, sample, at.passed, texts), pool.weights[sample], pool.recency[sample]
        found.nexts[i] = token
        own = is_own(pool, sample)
        if own:
            found.support[1, level] += weight
            own_top = min(own_top, level)
            if level == own_top and recency > own_newest:
                own_newest, own_says = recency, token
        else:
            found.support[0, level] += weight
            index_top = min(index_top, level)
            if level == index_top and recency > index_newest:
                index_newest, index_says = recency, token
        if token < 0:
            continue
        row = _row_of(token, size, found)
        if row == size:
            found.tokens[row] = token
            found.votes[row, :] = 0.0
            size += 1
        found.votes[row, (_OWN_VOTES if own else _INDEX_VOTES) + level] += weight
    if at.predicted >= 0 and _row_of(at.predicted, size, found) == size:
        found.tokens[size] = at.predicted
        found.votes[size, :] = 0.0
        size += 1
    if size == 0:
        return 0
    size = _keep_greatest(found, size, num_levels, index_top, own_top, at.predicted)

    own_key = index_key = 0
    if own_top < _NOWHERE:
        own_key = length_bucket(levels.lengths[own_top] + at.passed) * SUPPORTS + support_bucket(
            found.support[1, own_top]
        )
    if index_top < _NOWHERE:
        index_key = length_bucket(levels.lengths[index_top] + at.passed) * SUPPORTS + support_bucket(
            found.support[0, index_top]
        )
    origin = origin_of(int(index_newest))
    in_output = own_newest >= 0 and own_position(int(own_newest)) >= at.prompt_length
    for row in range(size):
        token, votes, inputs = found.tokens[row], found.votes[row], found.inputs[row]
        inputs[:] = -1
        if own_top < _NOWHERE:
            share = share_bucket(votes[_OWN_VOTES + own_top], found.support[1, own_top])
            inputs[OWN] = OFFSETS[OWN] + ((own_key * SHARES + share) * 2 + int(own_says == token)) * 2 + int(in_output)
        if index_top < _NOWHERE:
            share = share_bucket(votes[_INDEX_VOTES + index_top], found.support[0, index_top])
            key = (index_key * SHARES + share) * 2 + int(index_says == token)
            inputs[INDEX] = OFFSETS[INDEX] + key * ORIGINS + origin
        if at.predicted >= 0:
            key = length_bucket(at.agreed) * 2 + int(at.is_fresh)
            inputs[PREDICTION] = OFFSETS[PREDICTION] + key * 2 + int(at.predicted == token)
        sum_votes, sum_support, num_filled, length, voted = 0.0, 0.0, 0, 0, 0
        for level in range(num_levels):
            here = found.support[0, level] + found.support[1, level]
            if here <= 0.0:
                continue  # the same places as at the longer match
            sum_votes += votes[_INDEX_VOTES + level] + votes[_OWN_VOTES + level]
            sum_support += here
            bucket, share = length_bucket(levels.lengths[level] + at.passed), share_bucket(sum_votes, sum_support)
            if num_filled < LEVEL_VIEWS:
                view = LEVEL + num_filled
                inputs[view] = OFFSETS[view] + (bucket * SUPPORTS + support_bucket(sum_support)) * SHARES + share
            if voted == 0:
                length, voted = bucket, share
            num_filled += 1
        key = length * SHARES + voted
        inputs[REQUEST] = OFFSETS[REQUEST] + at.mood * LENGTHS * SHARES + key
        coarse = coarse_length(length) * COARSE_SHARES + coarse_share(voted)
        inputs[TOKEN] = OFFSETS[TOKEN] + hash_of(token) * COARSE_LENGTHS * COARSE_SHARES + coarse
        inputs[BEFORE] = OFFSETS[BEFORE] + hash_of(at.before) * COARSE_LENGTHS * COARSE_SHARES + coarse
        inputs[PAIR] = OFFSETS[PAIR] + hash_of_pair(at.before, token) * COARSE_LENGTHS * COARSE_SHARES + coarse
        chosen = weight_set(own_top < _NOWHERE, index_top < _NOWHERE, at.predicted >= 0, num_filled, at.depth)
        found.sets[row], found.log_odds[row] = chosen, mixed(model, inputs, chosen)
        found.chances[row] = chance_of(found.log_odds[row])
    return size


@inlined
def votes_by_source(found: Candidates, row: int) -> tuple[float, float]:
    """A candidate's votes from the index and from the request's own text."""
    index = own = 0.0
    for level in range(MAX_LEVELS):
        index += found.votes[row, _INDEX_VOTES + level]
        own += found.votes[row, _OWN_VOTES + level]
    return index, own
