"""Count which tokens follow the sampled matches of a context, by kind of text and by match length.

Every match that agrees with the draft so far votes for the token that follows the match.
"""

from __future__ import annotations

from typing import Final

from ssd.drafting.draft_records import IN_CONTEXT, NO_TOKEN
from ssd.drafting.draft_scratch import (
    MAX_LEVELS,
    AgreeingMatches,
    MatchSamples,
    ProposalTree,
    TextVotes,
    Votes,
)
from ssd.drafting.lookup import SearchedTexts, next_token
from ssd.drafting.proposal_tree import child_of, has_children
from ssd.jit.addresses import inlined, kernel

NO_LEVEL: Final = MAX_LEVELS
"""The value of ``TextVotes.top`` if no match in that text agrees with the draft."""


@inlined
def votes_by_source(votes: Votes, candidate: int) -> tuple[float, float]:
    """Return the numbers of matches in the retrieval cache and in the context that continue with a candidate token."""
    index = context = 0.0
    counts = votes.of_token[candidate]
    for level in range(MAX_LEVELS):
        index += counts.index[level]
        context += counts.context[level]
    return index, context


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
def move_best_to_front(
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

    The best candidates are those with the greatest share of the matches at any match length. If another drafter
    proposes the token at ``proposal_node``, its probability counts as a share. The token predicted by the client and
    the cached sample always stay.
    """
    if size <= most:
        return size
    index, context = votes.index, votes.context
    for candidate in range(size):
        counts, greatest, sum_votes, sum_support = votes.of_token[candidate], 0.0, 0.0, 0.0
        for level in range(num_levels):
            here = counts.index[level] + counts.context[level]
            sum_support += index.support[level] + context.support[level]
            if here > 0.0:  # without a vote the share does not grow
                sum_votes += here
                greatest = max(greatest, sum_votes / sum_support)
        if index.top < NO_LEVEL and counts.index[index.top] > 0.0:
            greatest = max(greatest, counts.index[index.top] / index.support[index.top])
        if context.top < NO_LEVEL and counts.context[context.top] > 0.0:
            greatest = max(greatest, counts.context[context.top] / context.support[context.top])
        child = child_of(proposals, proposal_node, votes.tokens[candidate])
        if child >= 0:
            greatest = max(greatest, proposals.probabilities[child])
        token = votes.tokens[candidate]
        counts.greatest = 2.0 if token in (predicted, cached_sample) else greatest
    for place in range(most):
        best = place
        for candidate in range(place + 1, size):
            if votes.of_token[candidate].greatest > votes.of_token[best].greatest:
                best = candidate
        if best != place:
            _exchange(votes, place, best)
    return most


@inlined
def _clear(text: TextVotes) -> None:
    text.support[:] = 0.0
    text.top, text.newest, text.newest_token = NO_LEVEL, -1, NO_TOKEN


@inlined
def count_votes(
    texts: SearchedTexts,
    samples: MatchSamples,
    matches: AgreeingMatches,
    since_lookup: int,
    predicted: int,
    votes: Votes,
) -> int:
    """Count for each possible next token the text matches that continue with it; return the number of different tokens.

    Only matches that agree with the draft count. If a match's text has ended, it counts as a match, but not for any
    token. ``matches`` are ordered from longest to shortest and were looked up ``since_lookup`` draft tokens ago; their
    ``next_token`` is set. The client's ``predicted`` token is added to the tokens. O(samples * tokens).
    """
    _clear(votes.index)
    _clear(votes.context)
    size, level = 0, 0
    for i in range(len(matches)):
        sample = matches[i].sample
        while sample >= samples.ends[level]:
            level += 1
        match = samples.matches[sample]
        token = next_token(match, since_lookup, texts)
        matches[i].next_token = token
        in_context = match.kind == IN_CONTEXT
        text = votes.context if in_context else votes.index
        text.support[level] += match.weight
        text.top = min(text.top, level)
        if level == text.top and match.recency > text.newest:
            text.newest, text.newest_token = match.recency, token
        if token < 0:
            continue
        candidate = _find_token(token, size, votes)
        if candidate == size:
            _add_token(votes, candidate, token)
            size += 1
        counts = votes.of_token[candidate]
        if in_context:
            counts.context[level] += match.weight
        else:
            counts.index[level] += match.weight
    votes.num_voted = size
    return add_candidate(predicted, size, votes) if predicted >= 0 else size


@inlined
def add_proposed(proposals: ProposalTree, proposal_node: int, size: int, votes: Votes) -> int:
    """Extend the candidates by the tokens that other drafters propose after a node of the proposal tree.

    Returns the new number of candidates; ``size`` is their number before the call.
    """
    child = proposals.first_child[proposal_node] if has_children(proposals, proposal_node) else NO_TOKEN
    while child >= 0:
        size = add_candidate(proposals.tokens[child], size, votes)
        child = proposals.next_sibling[child]
    return size
