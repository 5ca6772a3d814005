"""What the places that agree with a draft so far go on with: counted by token, source and match length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Float64, Float64s, Int64, Int64s, Record, inlined, kernel
from ssd.drafting.lookup import MAX_LEVELS, MAX_SAMPLES, NOTHING, Evidence, Texts, is_own, next_token
from ssd.drafting.offered import MAX_GUESSED, Forest, child_of, has_children
from ssd.drafting.protocol import MAX_PROPOSED_TOKENS

MAX_VOTED: Final = 12
"""Most tokens judged at one position that places say or other sources offer: those with the greatest share of the votes
at any level of any source, or the greatest chance."""

MAX_RECYCLED: Final = 6
"""Of the target's own candidates beside them."""

MAX_CANDIDATES: Final = MAX_VOTED + MAX_RECYCLED
"""Most tokens judged at one position."""

NOWHERE: Final = MAX_LEVELS
"""The level of a source that has no place left."""

_MOST_TOKENS: Final = MAX_SAMPLES + 2 + MAX_PROPOSED_TOKENS + MAX_GUESSED


class TokenVotes(Record):
    """Of one token, by level. ``greatest`` : its greatest share of the votes, or a greater chance that is offered."""

    index: Annotated[Float64s, np.float64, MAX_LEVELS]
    own: Annotated[Float64s, np.float64, MAX_LEVELS]
    greatest: Float64


class Votes(Record):
    """A count, kept until the next one.

    ``nexts`` : what each place asked goes on with. ``tokens`` : those voted for. ``by_token`` : their votes.
    ``index_support``, ``own_support`` : places, by level.

    ``index_top``, ``own_top`` : the level of the longest match that still has a place, NOWHERE where none has.
    ``index_newest``, ``own_newest`` : recency of its newest place, -1 where there is none. ``index_says``,
    ``own_says`` : what that place goes on with.
    """

    nexts: Annotated[Int64s, np.int64, MAX_SAMPLES]
    tokens: Annotated[Int64s, np.int64, _MOST_TOKENS]
    by_token: Annotated[Sequence[TokenVotes], TokenVotes, _MOST_TOKENS]
    index_support: Annotated[Float64s, np.float64, MAX_LEVELS]
    own_support: Annotated[Float64s, np.float64, MAX_LEVELS]
    index_top: Int64
    own_top: Int64
    index_newest: Int64
    own_newest: Int64
    index_says: Int64
    own_says: Int64


@inlined
def votes_by_source(votes: Votes, row: int) -> tuple[float, float]:
    """A token's votes from the index and from the request's own text."""
    index = own = 0.0
    cast = votes.by_token[row]
    for level in range(MAX_LEVELS):
        index += cast.index[level]
        own += cast.own[level]
    return index, own


@inlined
def _add_token(votes: Votes, row: int, token: int) -> None:
    votes.tokens[row] = token
    votes.by_token[row].index[:] = 0.0
    votes.by_token[row].own[:] = 0.0


@inlined
def _exchange(votes: Votes, one: int, other: int) -> None:
    """Let two tokens change places."""
    votes.tokens[one], votes.tokens[other] = votes.tokens[other], votes.tokens[one]
    here, there = votes.by_token[one], votes.by_token[other]
    here.greatest, there.greatest = there.greatest, here.greatest
    for level in range(MAX_LEVELS):
        here.index[level], there.index[level] = there.index[level], here.index[level]
        here.own[level], there.own[level] = there.own[level], here.own[level]


@inlined
def _row_of(token: int, size: int, votes: Votes) -> int:
    """Row of a token among the first ``size``, or ``size``."""
    row = 0
    while row < size and votes.tokens[row] != token:
        row += 1
    return row


@inlined
def add_voteless(token: int, size: int, votes: Votes) -> int:
    """Add a token without votes to the first ``size``, where it is not among them; how many they are then."""
    if _row_of(token, size, votes) < size:
        return size
    _add_token(votes, size, token)
    return size + 1


@kernel
def keep_greatest(
    votes: Votes, size: int, most: int, num_levels: int, predicted: int, keyed: int, forest: Forest, offered: int
) -> int:
    """Move the ``most`` tokens with the greatest share of votes at any level to the front; how many are there.

    A chance offered behind the node ``offered`` counts as a share. The predicted token is always among them, and that
    which the same noise chose before, ``keyed``.
    """
    if size <= most:
        return size
    index_top, own_top = votes.index_top, votes.own_top
    for row in range(size):
        cast, greatest, sum_votes, sum_support = votes.by_token[row], 0.0, 0.0, 0.0
        for level in range(num_levels):
            here = cast.index[level] + cast.own[level]
            sum_support += votes.index_support[level] + votes.own_support[level]
            if here > 0.0:  # without a vote the share does not grow
                sum_votes += here
                greatest = max(greatest, sum_votes / sum_support)
        if index_top < NOWHERE and cast.index[index_top] > 0.0:
            greatest = max(greatest, cast.index[index_top] / votes.index_support[index_top])
        if own_top < NOWHERE and cast.own[own_top] > 0.0:
            greatest = max(greatest, cast.own[own_top] / votes.own_support[own_top])
        child = child_of(forest, offered, votes.tokens[row])
        if child >= 0:
            greatest = max(greatest, forest.chances[child])
        token = votes.tokens[row]
        cast.greatest = 2.0 if token in (predicted, keyed) else greatest
    for place in range(most):
        best = place
        for row in range(place + 1, size):
            if votes.by_token[row].greatest > votes.by_token[best].greatest:
                best = row
        if best != place:
            _exchange(votes, place, best)
    return most


@inlined
def count_votes(
    texts: Texts,
    evidence: Evidence,
    alive: Int64s,
    num_alive: int,
    passed: int,
    predicted: int,
    votes: Votes,
) -> int:
    """Let the samples ``alive[:num_alive]`` vote for what stands ``passed`` places on; how many tokens there are.

    ``alive`` : samples that agree with the draft so far, those of longer matches first. A sample whose sequence has
    ended is support for none. ``predicted`` : a token without votes, NOTHING for none. O(samples * tokens).
    """
    votes.index_support[:] = 0.0
    votes.own_support[:] = 0.0
    size, level, index_top, own_top = 0, 0, NOWHERE, NOWHERE
    index_newest, own_newest, index_says, own_says = -1, -1, NOTHING, NOTHING
    for i in range(num_alive):
        sample = alive[i]
        while sample >= evidence.ends[level]:
            level += 1
        token, weight, recency = (
            next_token(evidence, sample, passed, texts),
            evidence.weights[sample],
            evidence.recency[sample],
        )
        votes.nexts[i] = token
        own = is_own(evidence, sample)
        if own:
            votes.own_support[level] += weight
            own_top = min(own_top, level)
            if level == own_top and recency > own_newest:
                own_newest, own_says = recency, token
        else:
            votes.index_support[level] += weight
            index_top = min(index_top, level)
            if level == index_top and recency > index_newest:
                index_newest, index_says = recency, token
        if token < 0:
            continue
        row = _row_of(token, size, votes)
        if row == size:
            _add_token(votes, row, token)
            size += 1
        if own:
            votes.by_token[row].own[level] += weight
        else:
            votes.by_token[row].index[level] += weight
    if predicted >= 0:
        size = add_voteless(predicted, size, votes)
    votes.index_top, votes.own_top = index_top, own_top
    votes.index_newest, votes.own_newest = index_newest, own_newest
    votes.index_says, votes.own_says = index_says, own_says
    return size


@inlined
def add_offered(forest: Forest, offered: int, size: int, votes: Votes) -> int:
    """Add what is offered behind a node to the first ``size`` tokens; how many they are then."""
    child = forest.first[offered] if has_children(forest, offered) else NOTHING
    while child >= 0:
        size = add_voteless(forest.tokens[child], size, votes)
        child = forest.next[child]
    return size
