"""Count which tokens follow the sampled matches of a context, by kind of text and by match length.

Every match that agrees with the draft so far votes for the token that follows the match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np

from ssd.drafting.lookup import (
    MAX_LEVELS,
    MAX_SAMPLES,
    NO_TOKEN,
    MatchSamples,
    SearchedTexts,
    is_from_context,
    next_token,
)
from ssd.drafting.proposal_tree import MAX_LOOKAHEAD, ProposalTree, child_of, has_children
from ssd.drafting.protocol import MAX_PROPOSED_TOKENS
from ssd.jit.addresses import Float64, Float64s, Int64, Int64s, Record, inlined, kernel

MAX_VOTED_CANDIDATES: Final = 12
"""The maximum number of candidate tokens per draft position that come from text matches or from other drafters.

The candidates with the greatest share of the matches, at any match length and in any kind of text, or with the greatest
proposed probability are chosen.
"""

MAX_RECYCLED_CANDIDATES: Final = 6
"""The maximum number of candidate tokens that token recycling alone adds at each draft position."""

MAX_CANDIDATES: Final = MAX_VOTED_CANDIDATES + MAX_RECYCLED_CANDIDATES
"""The maximum number of candidate tokens per draft position."""

NO_LEVEL: Final = MAX_LEVELS
"""The value of ``Votes.index_top`` and ``Votes.context_top`` if no match in the cache or in the context agrees any
more.
"""

_MAX_TOKENS: Final = MAX_SAMPLES + 2 + MAX_PROPOSED_TOKENS + MAX_LOOKAHEAD


class TokenVotes(Record):
    """The number of text matches that continue with one candidate token.

    Attributes:
        index: The number of such matches in the retrieval cache, by match length.
        context: The number of such matches in the request's context, by match length.
        greatest: The token's greatest share of the matches, or its proposed probability if that is greater.
    """

    index: Annotated[Float64s, np.float64, MAX_LEVELS]
    context: Annotated[Float64s, np.float64, MAX_LEVELS]
    greatest: Float64


class Votes(Record):
    """The text matches at one draft position, counted by the token that follows them.

    The fields ``context_*`` are those of the request's context, like ``index_*`` for the retrieval cache.

    Attributes:
        next_tokens: The token after each match that agrees with the draft.
        tokens: The candidate tokens: first those that follow a match, then those from other sources.
        of_token: The matches that continue with each of ``tokens``.
        index_support: The number of matches, by match length.
        index_top: The level (index of the match length) of the longest match that agrees; NO_LEVEL if there is none.
        index_newest: The recency of the newest match at ``index_top``; -1 if there is none.
        index_newest_token: The token after the newest match.
    """

    next_tokens: Annotated[Int64s, np.int64, MAX_SAMPLES]
    tokens: Annotated[Int64s, np.int64, _MAX_TOKENS]
    of_token: Annotated[Sequence[TokenVotes], TokenVotes, _MAX_TOKENS]
    index_support: Annotated[Float64s, np.float64, MAX_LEVELS]
    context_support: Annotated[Float64s, np.float64, MAX_LEVELS]
    index_top: Int64
    context_top: Int64
    index_newest: Int64
    context_newest: Int64
    index_newest_token: Int64
    context_newest_token: Int64


@inlined
def votes_by_source(votes: Votes, candidate: int) -> tuple[float, float]:
    """Return the numbers of matches in the retrieval cache and in the context that continue with a candidate token."""
    index = own = 0.0
    cast = votes.of_token[candidate]
    for level in range(MAX_LEVELS):
        index += cast.index[level]
        own += cast.context[level]
    return index, own


@inlined
def _add_token(votes: Votes, candidate: int, token: int) -> None:
    votes.tokens[candidate] = token
    votes.of_token[candidate].index[:] = 0.0
    votes.of_token[candidate].context[:] = 0.0


@inlined
def _exchange(votes: Votes, one: int, other: int) -> None:
    votes.tokens[one], votes.tokens[other] = votes.tokens[other], votes.tokens[one]
    here, there = votes.of_token[one], votes.of_token[other]
    here.greatest, there.greatest = there.greatest, here.greatest
    for level in range(MAX_LEVELS):
        here.index[level], there.index[level] = there.index[level], here.index[level]
        here.context[level], there.context[level] = there.context[level], here.context[level]


@inlined
def _find_token(token: int, size: int, votes: Votes) -> int:
    candidate = 0
    while candidate < size and votes.tokens[candidate] != token:
        candidate += 1
    return candidate


@inlined
def add_candidate(token: int, size: int, votes: Votes) -> int:
    """Add ``token`` to the first ``size`` candidates, unless it is one of them; return the number of candidates."""
    if _find_token(token, size, votes) < size:
        return size
    _add_token(votes, size, token)
    return size + 1


@kernel
def keep_best(
    votes: Votes,
    size: int,
    most: int,
    num_levels: int,
    predicted: int,
    cached_sample: int,
    proposals: ProposalTree,
    proposal_node: int,
) -> int:
    """Move the best candidate tokens, at most ``most``, to the front of the list, and return their number.

    The best candidates are those with the greatest share of the matches at any match length; the probability that
    another drafter proposes at ``proposal_node`` counts as a share. The token predicted by the client and the cached
    sample always stay.
    """
    if size <= most:
        return size
    index_top, context_top = votes.index_top, votes.context_top
    for candidate in range(size):
        cast, greatest, sum_votes, sum_support = votes.of_token[candidate], 0.0, 0.0, 0.0
        for level in range(num_levels):
            here = cast.index[level] + cast.context[level]
            sum_support += votes.index_support[level] + votes.context_support[level]
            if here > 0.0:  # without a vote the share does not grow
                sum_votes += here
                greatest = max(greatest, sum_votes / sum_support)
        if index_top < NO_LEVEL and cast.index[index_top] > 0.0:
            greatest = max(greatest, cast.index[index_top] / votes.index_support[index_top])
        if context_top < NO_LEVEL and cast.context[context_top] > 0.0:
            greatest = max(greatest, cast.context[context_top] / votes.context_support[context_top])
        child = child_of(proposals, proposal_node, votes.tokens[candidate])
        if child >= 0:
            greatest = max(greatest, proposals.probabilities[child])
        token = votes.tokens[candidate]
        cast.greatest = 2.0 if token in (predicted, cached_sample) else greatest
    for place in range(most):
        best = place
        for candidate in range(place + 1, size):
            if votes.of_token[candidate].greatest > votes.of_token[best].greatest:
                best = candidate
        if best != place:
            _exchange(votes, place, best)
    return most


@inlined
def count_votes(
    texts: SearchedTexts,
    samples: MatchSamples,
    matching: Int64s,
    num_matching: int,
    since_lookup: int,
    predicted: int,
    votes: Votes,
) -> int:
    """Count the text matches that agree with the draft by the token that follows them; return the number of tokens.

    A match whose sequence has ended counts as a match, but not for any token. ``matching`` holds the indices of the
    sampled matches that agree with the draft, longer ones first; they were looked up ``since_lookup`` draft tokens ago.
    The token ``predicted`` by the client is added to the tokens. O(samples * tokens).
    """
    votes.index_support[:] = 0.0
    votes.context_support[:] = 0.0
    size, level, index_top, context_top = 0, 0, NO_LEVEL, NO_LEVEL
    index_newest, context_newest, index_newest_token, context_newest_token = -1, -1, NO_TOKEN, NO_TOKEN
    for i in range(num_matching):
        sample = matching[i]
        while sample >= samples.ends[level]:
            level += 1
        token = next_token(samples, sample, since_lookup, texts)
        weight, recency = samples.weights[sample], samples.recency[sample]
        votes.next_tokens[i] = token
        own = is_from_context(samples, sample)
        if own:
            votes.context_support[level] += weight
            context_top = min(context_top, level)
            if level == context_top and recency > context_newest:
                context_newest, context_newest_token = recency, token
        else:
            votes.index_support[level] += weight
            index_top = min(index_top, level)
            if level == index_top and recency > index_newest:
                index_newest, index_newest_token = recency, token
        if token < 0:
            continue
        candidate = _find_token(token, size, votes)
        if candidate == size:
            _add_token(votes, candidate, token)
            size += 1
        if own:
            votes.of_token[candidate].context[level] += weight
        else:
            votes.of_token[candidate].index[level] += weight
    if predicted >= 0:
        size = add_candidate(predicted, size, votes)
    votes.index_top, votes.context_top = index_top, context_top
    votes.index_newest, votes.context_newest = index_newest, context_newest
    votes.index_newest_token, votes.context_newest_token = index_newest_token, context_newest_token
    return size


@inlined
def add_proposed(proposals: ProposalTree, proposal_node: int, size: int, votes: Votes) -> int:
    """Add the tokens that other drafters propose here to the ``size`` candidates; return the number of candidates."""
    child = proposals.first[proposal_node] if has_children(proposals, proposal_node) else NO_TOKEN
    while child >= 0:
        size = add_candidate(proposals.tokens[child], size, votes)
        child = proposals.next[child]
    return size
