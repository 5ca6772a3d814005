"""Collect the candidate tokens of a draft position, and estimate their acceptance probabilities."""

from __future__ import annotations

from typing import Final, NamedTuple

from ssd.drafting.acceptance_features import (
    BEFORE,
    CACHED_SAMPLE,
    CONTEXT,
    INDEX,
    LEVEL,
    NOISE,
    PAIR,
    PREDICTION,
    PROPOSAL,
    RECYCLED,
    REQUEST,
    TOKEN,
    AcceptanceTables,
    coarse_length,
    coarse_share,
    depth_bucket,
    entry_of,
    hash_of,
    hash_of_pair,
    length_bucket,
    proposed_bucket,
    share_bucket,
    support_bucket,
    weight_set,
)
from ssd.drafting.acceptance_mixing import acceptance_probability
from ssd.drafting.draft_records import IN_CONTEXT, NO_TOKEN, SOURCES, DraftRecord
from ssd.drafting.draft_scratch import AgreeingMatches, Candidates, MatchSamples, Votes
from ssd.drafting.lookup import SearchedTexts, context_position, index_source_of
from ssd.drafting.noise_prediction import (
    NOT_LOOKED_UP,
    look_up_recycled,
    noise_bucket,
    noise_verdict,
    rank_of,
    run_bucket,
    score_recycled,
)
from ssd.drafting.proposal_tree import PROPOSAL_ROOT, best_child, child_of, has_children
from ssd.drafting.token_recycling import TOP_K
from ssd.drafting.votes import NO_LEVEL, add_candidate, add_proposed, count_votes, move_best_to_front, votes_by_source
from ssd.jit.addresses import inlined


class Position(NamedTuple):
    """A position of a draft for which candidate tokens are collected.

    Attributes:
        depth: The number of draft tokens before the position.
        since_lookup: The number of draft tokens since the matches were looked up.
        proposal_node: The node of the proposal tree that the draft so far leads to; NO_TOKEN if it is not in the tree.
        predicted: The next token of the client's predicted output; NO_TOKEN if there is none.
        prediction_match_length: The number of consecutive tokens before the position that equal the prediction.
        always_matched: Whether the output has never differed from the prediction.
    """

    depth: int
    since_lookup: int
    last_token: int
    token_before_last: int
    proposal_node: int
    temperature_bucket: int
    predicted: int
    prediction_match_length: int
    always_matched: bool
    error_bucket: int
    prompt_length: int


@inlined
def _count_levels(samples: MatchSamples, since_lookup: int, candidates: Candidates) -> int:
    votes, support, size = candidates.votes, 0.0, 0
    for level in range(samples.num_levels):
        here = votes.index.support[level] + votes.context.support[level]
        if here <= 0.0:
            continue  # the same matches as at the level above
        support += here
        known = candidates.levels[size]
        known.level, known.length = level, length_bucket(samples.lengths[level] + since_lookup)
        known.support, known.support_bucket = support, support_bucket(support)
        size += 1
    return size


@inlined
def _agreement(candidates: Candidates, num_levels: int) -> int:
    votes, token = candidates.votes, candidates.cached_sample.token
    if num_levels == 0:
        return 0
    return 2 if votes.context.newest_token == token or votes.index.newest_token == token else 1


@inlined
def score_candidates(
    samples: MatchSamples, size: int, at: Position, model: AcceptanceTables, candidates: Candidates
) -> None:
    """Compute the features and the acceptance probability of the first ``size`` candidate tokens of a draft position.

    ``samples`` are the text matches from which the candidates come.
    """
    votes, recycled, proposals = candidates.votes, candidates.recycled, candidates.proposals
    context, index, cached_sample = votes.context, votes.index, candidates.cached_sample
    context_top, index_top = context.top, index.top
    # First what all candidates have in common.
    num_levels = _count_levels(samples, at.since_lookup, candidates)
    context_length = index_length = context_support = index_support = 0
    if context_top < NO_LEVEL:
        context_length = length_bucket(samples.lengths[context_top] + at.since_lookup)
        context_support = support_bucket(context.support[context_top])
    if index_top < NO_LEVEL:
        index_length = length_bucket(samples.lengths[index_top] + at.since_lookup)
        index_support = support_bucket(index.support[index_top])
    origin = index_source_of(index.newest)
    in_output = int(context.newest >= 0 and context_position(context.newest) >= at.prompt_length)
    has_recycled, has_proposal = recycled.count > 0, has_children(proposals, at.proposal_node)
    best = best_child(proposals, at.proposal_node) if has_proposal else NO_TOKEN
    agreement = _agreement(candidates, num_levels)
    weights = weight_set(
        context_top < NO_LEVEL,
        index_top < NO_LEVEL,
        at.predicted >= 0,
        has_proposal,
        has_recycled,
        candidates.position_noise.is_known == 1,
        cached_sample.token >= 0,
        num_levels,
        at.depth,
    )
    candidates.weight_set = weights
    for i in range(size):
        token, counts, inputs = votes.tokens[i], votes.of_token[i], candidates.inputs[i]
        inputs[:] = -1
        if context_top < NO_LEVEL:
            share = share_bucket(counts.context[context_top], context.support[context_top])
            is_newest = int(context.newest_token == token)
            inputs[CONTEXT] = entry_of(CONTEXT, context_length, context_support, share, is_newest, in_output)
        if index_top < NO_LEVEL:
            share = share_bucket(counts.index[index_top], index.support[index_top])
            is_newest = int(index.newest_token == token)
            inputs[INDEX] = entry_of(INDEX, index_length, index_support, share, is_newest, origin)
        if at.predicted >= 0:
            agreed = length_bucket(at.prediction_match_length)
            inputs[PREDICTION] = entry_of(PREDICTION, agreed, int(at.always_matched), int(at.predicted == token))
        num_votes, length, voted = 0.0, 0, 0
        for number in range(num_levels):
            known = candidates.levels[number]
            num_votes += counts.index[known.level] + counts.context[known.level]
            share = share_bucket(num_votes, known.support)
            inputs[LEVEL + number] = entry_of(LEVEL + number, known.length, known.support_bucket, share)
            if voted == 0:
                length, voted = known.length, share
        inputs[REQUEST] = entry_of(REQUEST, at.error_bucket, length, voted)
        length, voted = coarse_length(length), coarse_share(voted)
        inputs[TOKEN] = entry_of(TOKEN, hash_of(token), length, voted)
        inputs[BEFORE] = entry_of(BEFORE, hash_of(at.last_token), length, voted)
        inputs[PAIR] = entry_of(PAIR, hash_of_pair(at.last_token, token), length, voted)
        if has_proposal:
            child = child_of(proposals, at.proposal_node, token)
            shown = child if child >= 0 else best
            probability = proposed_bucket(proposals.probabilities[shown])
            inputs[PROPOSAL] = entry_of(
                PROPOSAL, proposals.kinds[shown], int(child >= 0), probability, depth_bucket(at.depth)
            )
        rank = rank_of(recycled, token)
        if has_recycled:
            share = recycled.shares[rank if rank < TOP_K else 0]
            inputs[RECYCLED] = entry_of(RECYCLED, at.temperature_bucket, recycled.is_pair, rank, share)
        if candidates.position_noise.is_known:
            verdict = noise_verdict(candidates.position_noise, recycled, rank)
            noise = noise_bucket(candidates.position_noise, token)
            inputs[NOISE] = entry_of(NOISE, verdict, noise, length, voted)
        if cached_sample.token >= 0:
            run, is_cached = run_bucket(cached_sample.run), int(token == cached_sample.token)
            inputs[CACHED_SAMPLE] = entry_of(
                CACHED_SAMPLE, cached_sample.confirmed, run, agreement, at.temperature_bucket, is_cached
            )
        candidates.probabilities[i] = acceptance_probability(model, inputs, weights)


_SURE_LENGTH: Final = 9
"""If the longest match has at least this length, and all matches continue with the same token, then token recycling
adds no candidates.
"""


@inlined
def _is_sure(samples: MatchSamples, size: int, since_lookup: int, votes: Votes) -> bool:
    top = min(votes.index.top, votes.context.top)
    return bool(size == 1 and top < NO_LEVEL and samples.lengths[top] + since_lookup >= _SURE_LENGTH)


@inlined
def collect_candidates(
    texts: SearchedTexts,
    samples: MatchSamples,
    matches: AgreeingMatches,
    at: Position,
    most: int,
    most_recycled: int,
    candidates: Candidates,
) -> int:
    """Collect the candidate tokens of a draft position from all sources, and return their number.

    ``matches`` are the sampled matches that agree with the draft so far. At most ``most`` candidates come from matches,
    proposals of other drafters, the client's prediction and the cached sample together. At most ``most_recycled``
    further candidates come from token recycling.
    """
    votes, recycled, proposals = candidates.votes, candidates.recycled, candidates.proposals
    size = count_votes(texts, samples, matches, at.since_lookup, at.predicted, votes)
    recycled.count = NOT_LOOKED_UP
    if candidates.recycling_table != 0 and not _is_sure(samples, size, at.since_lookup, votes):
        look_up_recycled(candidates.recycling_table, at.token_before_last, at.last_token, recycled)
    if candidates.position_noise.is_known:
        score_recycled(candidates.position_noise, recycled)
    size = add_proposed(proposals, at.proposal_node, size, votes)
    cached_sample = candidates.cached_sample.token
    if cached_sample >= 0:
        size = add_candidate(cached_sample, size, votes)
    if size > most:
        size = move_best_to_front(
            votes, size, most, samples.num_levels, at.predicted, cached_sample, proposals, at.proposal_node
        )
    for rank in range(min(most_recycled, recycled.count)):
        size = add_candidate(recycled.tokens[rank], size, votes)
    return size


_FROM_CONTEXT: Final = SOURCES.index("context")
_FROM_PREDICTION: Final = SOURCES.index("prediction")
_FROM_PROPOSAL: Final = SOURCES.index("head")
_FROM_RECYCLING: Final = SOURCES.index("recycling")
_FROM_NOISE: Final = SOURCES.index("coupled")


@inlined
def set_source(
    candidates: Candidates, i: int, samples: MatchSamples, matches: AgreeingMatches, predicted: int, out: DraftRecord
) -> None:
    """Record where the first draft token, candidate ``i``, was found, and the match length, in the draft record.

    The source is the client's prediction, or else the cached sample, if the token comes from there. Otherwise it is the
    context or the retrieval cache, whichever has more matches that continue with the token; for the cache, it is the
    part with the longest such match. If no match continues with the token, the source is the drafter that proposed the
    token, or token recycling.
    """
    token = candidates.votes.tokens[i]
    index, context = votes_by_source(candidates.votes, i)
    out.match_length = samples.lengths[0] if samples.num_levels > 0 else 0
    out.source = _FROM_CONTEXT
    if token == predicted:
        out.source = _FROM_PREDICTION
    elif token == candidates.cached_sample.token:
        out.source = _FROM_NOISE
    elif context < index:
        for number in range(len(matches)):
            match = samples.matches[matches[number].sample]
            if matches[number].next_token == token and match.kind != IN_CONTEXT:
                out.source = index_source_of(match.recency)
                break
    elif context == 0.0:
        child = child_of(candidates.proposals, PROPOSAL_ROOT, token)
        out.source = _FROM_PROPOSAL + candidates.proposals.kinds[child] if child >= 0 else _FROM_RECYCLING
