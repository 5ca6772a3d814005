"""Collect the candidate tokens of a draft position, estimate their acceptance probabilities, and learn from outcomes.

The candidates of a request's last draft are stored until the target's own tokens show which of them were right. The
context teaches more than the number of accepted tokens, because it also gives the outcome of candidates that were not
drafted or were cut from the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np

from ssd.drafting.acceptance_mixing import (
    AGREEMENTS,
    BEFORE,
    CACHED_SAMPLE,
    COARSE_LENGTHS,
    COARSE_SHARES,
    CONTEXT,
    DEPTH_BUCKETS,
    ERROR_BUCKETS,
    INDEX,
    LENGTHS,
    LEVEL,
    LEVEL_FEATURES,
    NOISE,
    NUM_FEATURES,
    OFFSETS,
    ORIGINS,
    PAIR,
    PREDICTION,
    PROPOSAL,
    PROPOSED_PROBABILITIES,
    RECYCLED,
    REQUEST,
    SHARES,
    SUPPORTS,
    TEMPERATURE_BUCKETS,
    TOKEN,
    AcceptanceTables,
    acceptance_probability,
    coarse_length,
    coarse_share,
    depth_bucket,
    hash_of,
    hash_of_pair,
    learn_outcome,
    length_bucket,
    proposed_bucket,
    share_bucket,
    support_bucket,
    weight_set,
)
from ssd.drafting.draft_records import DraftRecord
from ssd.drafting.lookup import (
    MAX_LEVELS,
    NO_TOKEN,
    MatchSamples,
    SearchedTexts,
    context_position,
    index_source_of,
    is_from_context,
    num_samples,
)
from ssd.drafting.noise_prediction import (
    NOISE_BUCKETS,
    NOT_LOOKED_UP,
    RUN_BUCKETS,
    CachedSample,
    PositionNoise,
    RecycledTokens,
    look_up_recycled,
    noise_bucket,
    noise_verdict,
    rank_of,
    run_bucket,
    score_recycled,
)
from ssd.drafting.proposal_tree import PROPOSAL_ROOT, ProposalTree, best_child, child_of, has_children
from ssd.drafting.token_recycling import SHARES as RECYCLED_SHARES
from ssd.drafting.token_recycling import TOP_K
from ssd.drafting.votes import (
    MAX_CANDIDATES,
    NO_LEVEL,
    Votes,
    add_candidate,
    add_proposed,
    count_votes,
    keep_best,
    votes_by_source,
)
from ssd.jit.addresses import Address, Float64s, Int64, Int64s, Record, TokenIds, inlined, kernel

MAX_SCORED: Final = 48
"""The maximum number of candidate tokens per draft that are stored until the acceptance model can learn their outcome.
"""

_ERROR_ONE: Final = 1 << 20
_ERROR_RATE: Final = 0.1


class ScoredCandidate(Record):
    """A candidate token and its features, stored until it is known whether the target produced the token.

    Attributes:
        parent: The index of the candidate before it; -1 for the end of the context.
        depth: The number of draft tokens before it.
        outcome: 1 if the target produced the token, -1 if it did not, 0 while that is unknown.
        weight_set: The index of the acceptance model's weight vector.
        inputs: The index of the table entry of each feature.
    """

    token: Int64
    parent: Int64
    depth: Int64
    outcome: Int64
    weight_set: Int64
    inputs: Annotated[Int64s, np.int64, NUM_FEATURES]


class ScoredDraft(Record):
    """The candidate tokens of a request's last draft: first the draft tokens in order, then the tokens not drafted.

    Attributes:
        start: The length of the context at the time of the draft.
        num_drafted: The number of candidates that are draft tokens.
        mean_error: The running mean of outcome minus estimate over all drafts of the request, in units of 2^-20.
    """

    count: Int64
    start: Int64
    num_drafted: Int64
    mean_error: Int64
    candidates: Annotated[Sequence[ScoredCandidate], ScoredCandidate, MAX_SCORED]


@inlined
def reset_scored(scored: ScoredDraft) -> None:
    scored.count, scored.start, scored.num_drafted, scored.mean_error = 0, 0, 0, 0


@inlined
def start_scored(scored: ScoredDraft, context_length: int) -> None:
    scored.count, scored.start, scored.num_drafted = 0, context_length, 0


@inlined
def error_bucket(scored: ScoredDraft) -> int:
    """Return the bucket of the acceptance model's mean error in a request; the middle bucket means no error."""
    error = scored.mean_error / _ERROR_ONE
    return int(min(ERROR_BUCKETS - 1, max(0, int((error + 0.4) * 10.0))))


@inlined
def record_candidate(
    scored: ScoredDraft, token: int, parent: int, depth: int, weight_set: int, inputs: Int64s, drafted: bool
) -> None:
    """Store a candidate token and its features until its outcome can be learned. Do nothing if there is no room.

    ``parent`` is the index of the stored candidate before it (-1 for the end of the context), and ``drafted`` is
    whether it is in the draft.
    """
    count = scored.count
    if count == MAX_SCORED:
        return
    candidate = scored.candidates[count]
    candidate.token, candidate.parent, candidate.depth, candidate.weight_set = token, parent, depth, weight_set
    for i in range(NUM_FEATURES):
        candidate.inputs[i] = inputs[i]
    scored.count = count + 1
    scored.num_drafted += int(drafted)


@inlined
def _learn_one(scored: ScoredDraft, candidate: ScoredCandidate, outcome: bool, model: AcceptanceTables) -> None:
    candidate.outcome = 1 if outcome else -1
    error = learn_outcome(model, candidate.inputs, candidate.weight_set, 1.0 if outcome else 0.0)
    scored.mean_error += int(_ERROR_RATE * (error * _ERROR_ONE - scored.mean_error))


@kernel
def learn_from_context(scored: ScoredDraft, context: TokenIds, model: AcceptanceTables) -> None:
    """Update the acceptance model from the target's tokens that followed the last draft's context.

    Candidates after a wrong token are skipped, because their outcome is unknown.
    """
    for i in range(scored.count):
        candidate = scored.candidates[i]
        place, parent = scored.start + candidate.depth, candidate.parent
        candidate.outcome = 0
        if place < len(context) and (parent < 0 or scored.candidates[parent].outcome == 1):
            _learn_one(scored, candidate, context[place] == candidate.token, model)
    scored.count = 0


@kernel
def learn_from_path(scored: ScoredDraft, num_verified: int, path: TokenIds, model: AcceptanceTables) -> None:
    """Update the acceptance model from the accepted draft tokens of a request that has ended.

    Only the first ``num_verified`` draft tokens were verified. ``path`` holds the indices of the accepted tokens, 0, 1,
    2, ... for a chain. A token was tested if all tokens before it are in the path.
    """
    for i in range(min(scored.num_drafted, num_verified)):
        candidate = scored.candidates[i]
        depth = candidate.depth
        if depth <= len(path) and (depth == 0 or path[depth - 1] == candidate.parent):
            _learn_one(scored, candidate, depth < len(path) and path[depth] == i, model)
    scored.count = 0


assert MAX_LEVELS <= LEVEL_FEATURES, "a level without a view"


class Candidates(Record):
    """The candidate tokens of one draft position; they are the first tokens of ``votes``.

    Attributes:
        proposals: The tree of tokens that other drafters propose.
        recycled: The target's earlier top-k tokens at this position.
        cached_sample: The token sampled before with the same Gumbel noise.
        inputs: For each candidate, the index of the table entry of each feature of the acceptance model.
        weight_sets: For each candidate, the index of the acceptance model's weight vector.
        levels: Scratch, the match lengths with a match; ``keys`` and ``supports`` are the bucket and the number of
            their matches.
    """

    votes: Votes
    proposals: ProposalTree
    recycling_table: Address
    recycled: RecycledTokens
    position_noise: PositionNoise
    cached_sample: CachedSample
    inputs: Annotated[Int64s, np.int64, (MAX_CANDIDATES, NUM_FEATURES)]
    weight_sets: Annotated[Int64s, np.int64, MAX_CANDIDATES]
    probabilities: Annotated[Float64s, np.float64, MAX_CANDIDATES]
    levels: Annotated[Int64s, np.int64, MAX_LEVELS]
    keys: Annotated[Int64s, np.int64, MAX_LEVELS]
    supports: Annotated[Float64s, np.float64, MAX_LEVELS]


class Position(NamedTuple):
    """A position of a draft for which candidate tokens are collected.

    Attributes:
        depth: The number of draft tokens before the position.
        since_lookup: The number of draft tokens since the matches were looked up.
        proposal_node: The node of the proposal tree that the draft so far leads to; NO_TOKEN if it is not in the tree.
        predicted: The next token of the client's predicted output; NO_TOKEN if there is none.
        prediction_match_length: The number of consecutive tokens that the prediction has matched.
        always_matched: Whether the prediction has never differed.
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
def _noise_entry(candidates: Candidates, token: int, rank: int, coarse: int) -> int:
    verdict = noise_verdict(candidates.position_noise, candidates.recycled, rank)
    key = verdict * NOISE_BUCKETS + noise_bucket(candidates.position_noise, token)
    return int(OFFSETS[NOISE] + key * COARSE_LENGTHS * COARSE_SHARES + coarse)


@inlined
def _cached_sample_key(candidates: Candidates, has_places: bool, temperature_bucket: int) -> int:
    cached_sample, votes, agreement = candidates.cached_sample, candidates.votes, 0
    if has_places:
        agreement = (
            2
            if votes.context_newest_token == cached_sample.token or votes.index_newest_token == cached_sample.token
            else 1
        )
    key = (cached_sample.confirmed * RUN_BUCKETS + run_bucket(cached_sample.run)) * AGREEMENTS + agreement
    return int(key * TEMPERATURE_BUCKETS + temperature_bucket)


@inlined
def score_candidates(
    samples: MatchSamples, size: int, at: Position, model: AcceptanceTables, candidates: Candidates
) -> None:
    """Compute the features and the acceptance probability of the first ``size`` candidate tokens of a draft position.

    ``samples`` are the text matches from which the candidates come.
    """
    votes = candidates.votes
    index_top, context_top = votes.index_top, votes.context_top
    own_key = index_key = 0
    if context_top < NO_LEVEL:
        own_key = length_bucket(samples.lengths[context_top] + at.since_lookup) * SUPPORTS + support_bucket(
            votes.context_support[context_top]
        )
    if index_top < NO_LEVEL:
        index_key = length_bucket(samples.lengths[index_top] + at.since_lookup) * SUPPORTS + support_bucket(
            votes.index_support[index_top]
        )
    origin = index_source_of(votes.index_newest)
    in_output = votes.context_newest >= 0 and context_position(votes.context_newest) >= at.prompt_length
    # First what all candidates have in common: the levels with a match, and the key of each.
    levels, keys, num_levels = candidates.levels, candidates.keys, 0
    sum_support = 0.0
    for level in range(samples.num_levels):
        here = votes.index_support[level] + votes.context_support[level]
        if here <= 0.0:
            continue  # the same matches as at the level above
        sum_support += here
        bucket = length_bucket(samples.lengths[level] + at.since_lookup)
        levels[num_levels], candidates.supports[num_levels] = level, sum_support
        keys[num_levels] = bucket * SUPPORTS + support_bucket(sum_support)
        num_levels += 1
    recycled, has_recycled = candidates.recycled, candidates.recycled.count > 0
    has_proposal = has_children(candidates.proposals, at.proposal_node)
    best = best_child(candidates.proposals, at.proposal_node) if has_proposal else NO_TOKEN
    chosen = weight_set(
        context_top < NO_LEVEL,
        index_top < NO_LEVEL,
        at.predicted >= 0,
        has_proposal,
        has_recycled,
        candidates.position_noise.is_known == 1,
        candidates.cached_sample.token >= 0,
        num_levels,
        at.depth,
    )
    cached_sample_key = 0
    if candidates.cached_sample.token >= 0:
        cached_sample_key = _cached_sample_key(candidates, num_levels > 0, at.temperature_bucket)
    for i in range(size):
        token, cast, inputs = votes.tokens[i], votes.of_token[i], candidates.inputs[i]
        inputs[:] = -1
        if context_top < NO_LEVEL:
            share = share_bucket(cast.context[context_top], votes.context_support[context_top])
            inputs[CONTEXT] = (
                OFFSETS[CONTEXT]
                + ((own_key * SHARES + share) * 2 + int(votes.context_newest_token == token)) * 2
                + int(in_output)
            )
        if index_top < NO_LEVEL:
            share = share_bucket(cast.index[index_top], votes.index_support[index_top])
            key = (index_key * SHARES + share) * 2 + int(votes.index_newest_token == token)
            inputs[INDEX] = OFFSETS[INDEX] + key * ORIGINS + origin
        if at.predicted >= 0:
            key = length_bucket(at.prediction_match_length) * 2 + int(at.always_matched)
            inputs[PREDICTION] = OFFSETS[PREDICTION] + key * 2 + int(at.predicted == token)
        sum_votes, length, voted = 0.0, 0, 0
        for feature in range(num_levels):
            level = levels[feature]
            sum_votes += cast.index[level] + cast.context[level]
            share = share_bucket(sum_votes, candidates.supports[feature])
            inputs[LEVEL + feature] = OFFSETS[LEVEL + feature] + keys[feature] * SHARES + share
            if voted == 0:
                length, voted = keys[feature] // SUPPORTS, share
        key = length * SHARES + voted
        inputs[REQUEST] = OFFSETS[REQUEST] + at.error_bucket * LENGTHS * SHARES + key
        coarse = coarse_length(length) * COARSE_SHARES + coarse_share(voted)
        inputs[TOKEN] = OFFSETS[TOKEN] + hash_of(token) * COARSE_LENGTHS * COARSE_SHARES + coarse
        inputs[BEFORE] = OFFSETS[BEFORE] + hash_of(at.last_token) * COARSE_LENGTHS * COARSE_SHARES + coarse
        inputs[PAIR] = OFFSETS[PAIR] + hash_of_pair(at.last_token, token) * COARSE_LENGTHS * COARSE_SHARES + coarse
        if has_proposal:
            child = child_of(candidates.proposals, at.proposal_node, token)
            shown = child if child >= 0 else best
            key = candidates.proposals.kinds[shown] * 2 + int(child >= 0)
            key = key * PROPOSED_PROBABILITIES + proposed_bucket(candidates.proposals.probabilities[shown])
            inputs[PROPOSAL] = OFFSETS[PROPOSAL] + key * DEPTH_BUCKETS + depth_bucket(at.depth)
        rank = rank_of(recycled, token)
        if has_recycled:
            key = (at.temperature_bucket * 2 + recycled.is_pair) * (TOP_K + 1) + rank
            share = recycled.shares[rank if rank < TOP_K else 0]
            inputs[RECYCLED] = OFFSETS[RECYCLED] + key * RECYCLED_SHARES + share
        if candidates.position_noise.is_known:
            inputs[NOISE] = _noise_entry(candidates, token, rank, coarse)
        if candidates.cached_sample.token >= 0:
            inputs[CACHED_SAMPLE] = (
                OFFSETS[CACHED_SAMPLE] + cached_sample_key * 2 + int(token == candidates.cached_sample.token)
            )
        candidates.weight_sets[i], candidates.probabilities[i] = chosen, acceptance_probability(model, inputs, chosen)


SURE_LENGTH: Final = 9
"""The minimum match length at which token recycling adds no candidates, if all matches continue with the same token."""


@inlined
def _is_sure(samples: MatchSamples, size: int, since_lookup: int, votes: Votes) -> bool:
    top = min(votes.index_top, votes.context_top)
    return bool(size == 1 and top < NO_LEVEL and samples.lengths[top] + since_lookup >= SURE_LENGTH)


@inlined
def collect_candidates(
    texts: SearchedTexts,
    samples: MatchSamples,
    matching: Int64s,
    num_matching: int,
    at: Position,
    most: int,
    most_recycled: int,
    candidates: Candidates,
) -> int:
    """Collect the candidate tokens of a draft position from all sources, and return their number.

    ``matching`` holds the indices of the sampled matches that agree with the draft so far. At most ``most`` candidates
    come from matches, proposals of other drafters, the client's prediction and the cached sample together. At most
    ``most_recycled`` further candidates come from token recycling.
    """
    votes, recycled = candidates.votes, candidates.recycled
    size = count_votes(texts, samples, matching, num_matching, at.since_lookup, at.predicted, votes)
    recycled.count = NOT_LOOKED_UP
    if candidates.recycling_table != 0 and not _is_sure(samples, size, at.since_lookup, votes):
        look_up_recycled(candidates.recycling_table, at.token_before_last, at.last_token, recycled)
    if candidates.position_noise.is_known:
        score_recycled(candidates.position_noise, recycled)
    size = add_proposed(candidates.proposals, at.proposal_node, size, votes)
    cached_sample = candidates.cached_sample.token
    if cached_sample >= 0:
        size = add_candidate(cached_sample, size, votes)
    if size > most:
        size = keep_best(
            votes, size, most, samples.num_levels, at.predicted, cached_sample, candidates.proposals, at.proposal_node
        )
    for rank in range(min(most_recycled, recycled.count)):
        size = add_candidate(recycled.tokens[rank], size, votes)
    return size


_BY_OWN: Final = 3
_BY_PREDICTION: Final = 4
_BY_OFFER: Final = 5
_BY_RECYCLING: Final = 8
_BY_NOISE: Final = 9


@inlined
def set_source(candidates: Candidates, i: int, samples: MatchSamples, predicted: int, out: DraftRecord) -> None:
    """Write the source of a draft's first token, and the match length, to the draft record.

    Candidate ``i`` is the first token. Its source is the kind of text in which most matches continue with the token
    (context or cache; for the cache, the kind of the longest such match). If no match does, the source is the drafter
    that proposed the token, or token recycling. The client's prediction and the sample cache take precedence.
    """
    token = candidates.votes.tokens[i]
    index, own = votes_by_source(candidates.votes, i)
    out.match_length = samples.lengths[0] if samples.num_levels > 0 else 0
    out.source = _BY_OWN
    if token == predicted:
        out.source = _BY_PREDICTION
    elif token == candidates.cached_sample.token:
        out.source = _BY_NOISE
    elif own < index:
        for sample in range(num_samples(samples)):
            if candidates.votes.next_tokens[sample] == token and not is_from_context(samples, sample):
                out.source = index_source_of(samples.recency[sample])
                break
    elif own == 0.0:
        child = child_of(candidates.proposals, PROPOSAL_ROOT, token)
        out.source = _BY_OFFER + candidates.proposals.kinds[child] if child >= 0 else _BY_RECYCLING
