"""What the places that agree with a draft so far go on with: counted by token, source and match length."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, float64_array, inlined, int64_array, kernel
from ssd.drafting.suffix.gather import MAX_LEVELS, MAX_SAMPLES, NOTHING, Levels, Pool, Texts, is_own, next_token

MAX_CANDIDATES: Final = 8
"""Most tokens judged at one position: those with the greatest share of the votes at any level of any source."""

NOWHERE: Final = MAX_LEVELS
"""The level of a source that has no place left."""

INDEX_VOTES: Final = 0  # columns of a token's votes: by level of the index, then of own text, then the greatest share
OWN_VOTES: Final = MAX_LEVELS
_GREATEST: Final = 2 * MAX_LEVELS
_COLUMNS: Final = 2 * MAX_LEVELS + 1
_MOST_TOKENS: Final = MAX_SAMPLES + 1
_SIZE: Final = 0  # words of a summary
_INDEX_TOP: Final = 1
_OWN_TOP: Final = 2
_INDEX_NEWEST: Final = 3
_OWN_NEWEST: Final = 4
_INDEX_SAYS: Final = 5
_OWN_SAYS: Final = 6
_SUMMARY_WORDS: Final = 7
VOTES_WORDS: Final = MAX_SAMPLES + _MOST_TOKENS * (1 + _COLUMNS) + 2 * MAX_LEVELS + _SUMMARY_WORDS


class Votes(NamedTuple):
    """A count, kept until the next one.

    ``nexts`` : int64[MAX_SAMPLES], what each place asked goes on with. ``tokens`` : int64, those voted for.
    ``by_token`` : float64[tokens, 2 * MAX_LEVELS + 1], their votes. ``support`` : float64[2, MAX_LEVELS], places by
    source (index, own) and level. ``summary`` : see its readers below.
    """

    nexts: Int64s
    tokens: Int64s
    by_token: npt.NDArray[np.float64]
    support: npt.NDArray[np.float64]
    summary: Int64s


@inlined
def votes_at(address: int) -> Votes:
    """The votes in the VOTES_WORDS words at ``address``."""
    tokens = address + 8 * MAX_SAMPLES
    by_token = tokens + 8 * _MOST_TOKENS
    support = by_token + 8 * _MOST_TOKENS * _COLUMNS
    return Votes(
        int64_array(address, MAX_SAMPLES),
        int64_array(tokens, _MOST_TOKENS),
        float64_array(by_token, _MOST_TOKENS * _COLUMNS).reshape((_MOST_TOKENS, _COLUMNS)),
        float64_array(support, 2 * MAX_LEVELS).reshape((2, MAX_LEVELS)),
        int64_array(support + 8 * 2 * MAX_LEVELS, _SUMMARY_WORDS),
    )


@inlined
def tops(votes: Votes) -> tuple[int, int]:
    """The level of the longest match that still has a place, in the index and in own text; NOWHERE where none has."""
    return votes.summary[_INDEX_TOP], votes.summary[_OWN_TOP]


@inlined
def newest(votes: Votes) -> tuple[int, int]:
    """Recency of the newest place of the index's and of own text's longest match; -1 where there is none."""
    return votes.summary[_INDEX_NEWEST], votes.summary[_OWN_NEWEST]


@inlined
def newest_say(votes: Votes) -> tuple[int, int]:
    """What these places go on with."""
    return votes.summary[_INDEX_SAYS], votes.summary[_OWN_SAYS]


@inlined
def votes_by_source(votes: Votes, row: int) -> tuple[float, float]:
    """A token's votes from the index and from the request's own text."""
    index = own = 0.0
    for level in range(MAX_LEVELS):
        index += votes.by_token[row, INDEX_VOTES + level]
        own += votes.by_token[row, OWN_VOTES + level]
    return index, own


@inlined
def _row_of(token: int, size: int, votes: Votes) -> int:
    """Row of a token among the first ``size``, or ``size``."""
    row = 0
    while row < size and votes.tokens[row] != token:
        row += 1
    return row


@kernel
def _keep_greatest(votes: Votes, size: int, most: int, num_levels: int, predicted: int) -> int:
    """Move the ``most`` tokens with the greatest share of votes at any level to the front; how many are there."""
    if size <= most:
        return size
    index_top, own_top = tops(votes)
    for row in range(size):
        cast, greatest, sum_votes, sum_support = votes.by_token[row], 0.0, 0.0, 0.0
        for level in range(num_levels):
            here = cast[INDEX_VOTES + level] + cast[OWN_VOTES + level]
            sum_support += votes.support[0, level] + votes.support[1, level]
            if here > 0.0:  # without a vote the share does not grow
                sum_votes += here
                greatest = max(greatest, sum_votes / sum_support)
        if index_top < NOWHERE and cast[INDEX_VOTES + index_top] > 0.0:
            greatest = max(greatest, cast[INDEX_VOTES + index_top] / votes.support[0, index_top])
        if own_top < NOWHERE and cast[OWN_VOTES + own_top] > 0.0:
            greatest = max(greatest, cast[OWN_VOTES + own_top] / votes.support[1, own_top])
        cast[_GREATEST] = 2.0 if votes.tokens[row] == predicted else greatest
    for place in range(most):
        best = place
        for row in range(place + 1, size):
            if votes.by_token[row, _GREATEST] > votes.by_token[best, _GREATEST]:
                best = row
        if best != place:
            votes.tokens[place], votes.tokens[best] = votes.tokens[best], votes.tokens[place]
            for column in range(_COLUMNS):
                kept = votes.by_token[place, column]
                votes.by_token[place, column] = votes.by_token[best, column]
                votes.by_token[best, column] = kept
    return most


@inlined
def count_votes(
    texts: Texts,
    pool: Pool,
    levels: Levels,
    num_levels: int,
    alive: Int64s,
    num_alive: int,
    passed: int,
    predicted: int,
    most: int,
    votes: Votes,
) -> int:
    """Let the samples ``alive[:num_alive]`` vote for what stands ``passed`` places on; how many tokens are candidates.

    ``alive`` : samples that agree with the draft so far, those of longer matches first. A sample whose sequence has
    ended is support for none. ``predicted`` : a candidate without votes, NOTHING for none. ``most`` : candidates,
    at most MAX_CANDIDATES. O(samples * tokens).
    """
    votes.support[:] = 0.0
    size, level, index_top, own_top = 0, 0, NOWHERE, NOWHERE
    index_newest, own_newest, index_says, own_says = np.int64(-1), np.int64(-1), NOTHING, NOTHING
    for i in range(num_alive):
        sample = alive[i]
        while sample >= levels.ends[level]:
            level += 1
        token, weight, recency = next_token(pool, sample, passed, texts), pool.weights[sample], pool.recency[sample]
        votes.nexts[i] = token
        own = is_own(pool, sample)
        if own:
            votes.support[1, level] += weight
            own_top = min(own_top, level)
            if level == own_top and recency > own_newest:
                own_newest, own_says = recency, token
        else:
            votes.support[0, level] += weight
            index_top = min(index_top, level)
            if level == index_top and recency > index_newest:
                index_newest, index_says = recency, token
        if token < 0:
            continue
        row = _row_of(token, size, votes)
        if row == size:
            votes.tokens[row] = token
            votes.by_token[row, :] = 0.0
            size += 1
        votes.by_token[row, (OWN_VOTES if own else INDEX_VOTES) + level] += weight
    if predicted >= 0 and _row_of(predicted, size, votes) == size:
        votes.tokens[size] = predicted
        votes.by_token[size, :] = 0.0
        size += 1
    summary = votes.summary
    summary[_INDEX_TOP], summary[_OWN_TOP] = index_top, own_top
    summary[_INDEX_NEWEST], summary[_OWN_NEWEST] = index_newest, own_newest
    summary[_INDEX_SAYS], summary[_OWN_SAYS] = index_says, own_says
    summary[_SIZE] = _keep_greatest(votes, size, most, num_levels, predicted)
    return int(summary[_SIZE])


@inlined
def count_again(token: int, votes: Votes) -> None:
    """Where the last count was of the same samples and found one token: all of them say ``token`` now."""
    votes.tokens[0] = token
    summary = votes.summary
    summary[_INDEX_SAYS] = token if summary[_INDEX_TOP] < NOWHERE else NOTHING
    summary[_OWN_SAYS] = token if summary[_OWN_TOP] < NOWHERE else NOTHING
