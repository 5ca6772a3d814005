"""The tokens that may come next at a position, how probable each is, and what is learned from what came.

What a request's last draft was judged by is kept until the target's own tokens say what came of it. Learning from the
context instead of from counts of accepted tokens teaches more: also a token that was left out of the draft, and one
that was cut from it, was right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np

from ssd.compiled.addresses import Address, Float64s, Int64, Int64s, Record, TokenIds, inlined, kernel
from ssd.drafting.acceptance import (
    AGREEMENTS,
    BEFORE,
    COARSE_LENGTHS,
    COARSE_SHARES,
    ERROR_BUCKETS,
    INDEX,
    INPUTS,
    KEYED,
    LENGTHS,
    LEVEL,
    LEVEL_VIEWS,
    NOISE,
    OFFER,
    OFFERED_CHANCES,
    OFFSETS,
    ORIGINS,
    OWN,
    PAIR,
    PREDICTION,
    RECYCLED,
    REQUEST,
    SHARES,
    SUPPORTS,
    TEMPERATURE_BUCKETS,
    TOKEN,
    WHEN_SETS,
    Model,
    chance_of,
    coarse_length,
    coarse_share,
    hash_of,
    hash_of_pair,
    learn,
    length_bucket,
    offered_bucket,
    share_bucket,
    support_bucket,
    weight_set,
    when,
)
from ssd.drafting.draft_records import DraftRecord
from ssd.drafting.foreseen import (
    HEIGHTS,
    NOT_ASKED,
    RUNS,
    Foreseen,
    Keyed,
    Recycled,
    height_of,
    rank_of,
    recall,
    run_bucket,
    verdict_on,
    weigh,
)
from ssd.drafting.lookup import MAX_LEVELS, NOTHING, Evidence, Texts, is_own, num_samples, origin_of, own_position
from ssd.drafting.offered import ROOT, Forest, best_child, child_of, has_children
from ssd.drafting.successors import SHARES as SUCCESSOR_SHARES
from ssd.drafting.successors import SUCCESSORS
from ssd.drafting.vote import (
    MAX_CANDIDATES,
    NOWHERE,
    Votes,
    add_offered,
    add_voteless,
    count_votes,
    keep_greatest,
    votes_by_source,
)

MAX_JUDGED: Final = 48
"""Candidates kept of one draft, the first of it."""

_ERROR_ONE: Final = 1 << 20
_ERROR_RATE: Final = 0.1


class JudgedCandidate(Record):
    """A candidate and what it was judged by.

    ``parent`` : the judged candidate it goes on from, -1 at the context's end. ``depth`` : draft tokens before it.
    ``came`` : 1 when the token came, -1 when it did not, 0 while that is not known. ``weight_set``, ``inputs`` : see
    `acceptance.chance_of`.
    """

    token: Int64
    parent: Int64
    depth: Int64
    came: Int64
    weight_set: Int64
    inputs: Annotated[Int64s, np.int64, INPUTS]


class JudgedDraft(Record):
    """The candidates of a request's last draft: the drafted tokens, in their order, then those left out.

    ``start`` : length of the context that was drafted after. ``num_drafted`` : of the candidates, those that were in
    the draft. ``mean_error`` : of all drafts of the request, running mean of label - chance, in units of 2^-20.
    """

    count: Int64
    start: Int64
    num_drafted: Int64
    mean_error: Int64
    candidates: Annotated[Sequence[JudgedCandidate], JudgedCandidate, MAX_JUDGED]


@inlined
def forget_draft(judged: JudgedDraft) -> None:
    """Forget the drafts of another request: nothing was drafted, and no error is known."""
    judged.count, judged.start, judged.num_drafted, judged.mean_error = 0, 0, 0, 0


@inlined
def begin_draft(judged: JudgedDraft, context_length: int) -> None:
    """Begin a draft that goes on from a context."""
    judged.count, judged.start, judged.num_drafted = 0, context_length, 0


@inlined
def error_bucket(judged: JudgedDraft) -> int:
    """How the request's drafts fared against their estimates lately: 0..ERROR_BUCKETS - 1, half of it as estimated."""
    error = judged.mean_error / _ERROR_ONE
    return int(min(ERROR_BUCKETS - 1, max(0, int((error + 0.4) * 10.0))))


@inlined
def keep_judged(
    judged: JudgedDraft, token: int, parent: int, depth: int, weight_set: int, inputs: Int64s, drafted: bool
) -> None:
    """Keep what a candidate was judged by. ``parent`` : the judged one it goes on from, -1 at the context's end."""
    count = judged.count
    if count == MAX_JUDGED:
        return
    candidate = judged.candidates[count]
    candidate.token, candidate.parent, candidate.depth, candidate.weight_set = token, parent, depth, weight_set
    for i in range(INPUTS):
        candidate.inputs[i] = inputs[i]
    judged.count = count + 1
    judged.num_drafted += int(drafted)


@inlined
def _learn_one(judged: JudgedDraft, candidate: JudgedCandidate, came: bool, model: Model) -> None:
    candidate.came = 1 if came else -1
    error = learn(model, candidate.inputs, candidate.weight_set, 1.0 if came else 0.0)
    judged.mean_error += int(_ERROR_RATE * (error * _ERROR_ONE - judged.mean_error))


@kernel
def learn_from_context(judged: JudgedDraft, context: TokenIds, model: Model) -> None:
    """Learn from what came after the context that was drafted after. What is behind a wrong token teaches nothing."""
    for i in range(judged.count):
        candidate = judged.candidates[i]
        place, parent = judged.start + candidate.depth, candidate.parent
        candidate.came = 0
        if place < len(context) and (parent < 0 or judged.candidates[parent].came == 1):
            _learn_one(judged, candidate, context[place] == candidate.token, model)
    judged.count = 0


@kernel
def learn_from_path(judged: JudgedDraft, num_verified: int, path: TokenIds, model: Model) -> None:
    """Learn from what was accepted of the last draft: the request has ended, its text is not seen again.

    ``num_verified`` : tokens of the draft that were not cut before it was verified. ``path`` : int32[n], the indices
    of the n accepted ones; 0, 1, 2 ... of a chain. Those whose predecessors all are on it were tested.
    """
    for i in range(min(judged.num_drafted, num_verified)):
        candidate = judged.candidates[i]
        depth = candidate.depth
        if depth <= len(path) and (depth == 0 or path[depth - 1] == candidate.parent):
            _learn_one(judged, candidate, depth < len(path) and path[depth] == i, model)
    judged.count = 0


assert MAX_LEVELS <= LEVEL_VIEWS, "a level without a view"


class Candidates(Record):
    """The candidates of one position: the first tokens of ``votes``.

    Of each: ``inputs`` : its table entries, ``sets`` : its weight set, ``chances`` : what the model says.

    Scratch of ``judge``, of each level with a place: ``filled`` : which one, ``keys`` : buckets of length and support,
    ``supports`` : places down to it.

    ``forest`` : what is offered after the context. ``successors`` : where the target's own candidates are kept, the
    address of a `SuccessorTable`, 0 for nowhere; ``recycled`` : those of this position. ``foreseen`` : the target's
    noise there, ``keyed`` : what the same noise chose before.
    """

    votes: Votes
    forest: Forest
    successors: Address
    recycled: Recycled
    foreseen: Foreseen
    keyed: Keyed
    inputs: Annotated[Int64s, np.int64, (MAX_CANDIDATES, INPUTS)]
    sets: Annotated[Int64s, np.int64, MAX_CANDIDATES]
    chances: Annotated[Float64s, np.float64, MAX_CANDIDATES]
    filled: Annotated[Int64s, np.int64, MAX_LEVELS]
    keys: Annotated[Int64s, np.int64, MAX_LEVELS]
    supports: Annotated[Float64s, np.float64, MAX_LEVELS]


class Position(NamedTuple):
    """Where in a draft candidates are sought.

    ``depth`` : draft tokens before it, of which the evidence's samples have passed ``passed``. ``before`` : the token
    before it, ``earlier`` : the one before that, NOTHING for none. ``offered`` : the node of the forest that it is
    behind, NOTHING where it is behind none. ``temperature_bucket`` : how the request samples,
    see `DraftParams`. ``predicted`` : what the
    client's prediction says, NOTHING where it does not; ``agreed`` : for how many tokens it has been right;
    ``was_right`` : it has never been wrong. ``error_bucket`` : see `judge.error_bucket`. ``prompt_length`` : of the
    request.
    """

    depth: int
    passed: int
    before: int
    earlier: int
    offered: int
    temperature_bucket: int
    predicted: int
    agreed: int
    was_right: bool
    error_bucket: int
    prompt_length: int


@inlined
def _noise_entry(found: Candidates, token: int, rank: int, coarse: int) -> int:
    """The entry of the view of noise. ``rank`` : of the token in the entry there, ``coarse`` : its length and share."""
    verdict = verdict_on(found.foreseen, found.recycled, rank)
    key = verdict * HEIGHTS + height_of(found.foreseen, token)
    return int(OFFSETS[NOISE] + key * COARSE_LENGTHS * COARSE_SHARES + coarse)


@inlined
def _keyed_key(found: Candidates, has_places: bool, temperature_bucket: int) -> int:
    """What the view of keyed choices sees at a position, but for whether a token is the one chosen."""
    keyed, votes, agreement = found.keyed, found.votes, 0
    if has_places:
        agreement = 2 if votes.own_says == keyed.token or votes.index_says == keyed.token else 1
    key = (keyed.confirmed * RUNS + run_bucket(keyed.run)) * AGREEMENTS + agreement
    return int(key * TEMPERATURE_BUCKETS + temperature_bucket)


@inlined
def judge(evidence: Evidence, size: int, at: Position, model: Model, found: Candidates) -> None:
    """Say of the first ``size`` tokens of a count what every view sees of them, and how probable they are."""
    votes = found.votes
    index_top, own_top = votes.index_top, votes.own_top
    own_key = index_key = 0
    if own_top < NOWHERE:
        own_key = length_bucket(evidence.lengths[own_top] + at.passed) * SUPPORTS + support_bucket(
            votes.own_support[own_top]
        )
    if index_top < NOWHERE:
        index_key = length_bucket(evidence.lengths[index_top] + at.passed) * SUPPORTS + support_bucket(
            votes.index_support[index_top]
        )
    origin = origin_of(votes.index_newest)
    in_output = votes.own_newest >= 0 and own_position(votes.own_newest) >= at.prompt_length
    # What is the same for all of them comes first: of each level that has a place, which one it is and its key.
    filled, keys, num_filled = found.filled, found.keys, 0
    sum_support = 0.0
    for level in range(evidence.num_levels):
        here = votes.index_support[level] + votes.own_support[level]
        if here <= 0.0:
            continue  # the same places as at the longer match
        sum_support += here
        bucket = length_bucket(evidence.lengths[level] + at.passed)
        filled[num_filled], found.supports[num_filled] = level, sum_support
        keys[num_filled] = bucket * SUPPORTS + support_bucket(sum_support)
        num_filled += 1
    recycled, has_recycled = found.recycled, found.recycled.count > 0
    has_offer = has_children(found.forest, at.offered)
    best = best_child(found.forest, at.offered) if has_offer else NOTHING
    chosen = weight_set(
        own_top < NOWHERE,
        index_top < NOWHERE,
        at.predicted >= 0,
        has_offer,
        has_recycled,
        found.foreseen.is_known == 1,
        found.keyed.token >= 0,
        num_filled,
        at.depth,
    )
    keyed_key = _keyed_key(found, num_filled > 0, at.temperature_bucket) if found.keyed.token >= 0 else 0
    for row in range(size):
        token, cast, inputs = votes.tokens[row], votes.by_token[row], found.inputs[row]
        inputs[:] = -1
        if own_top < NOWHERE:
            share = share_bucket(cast.own[own_top], votes.own_support[own_top])
            inputs[OWN] = (
                OFFSETS[OWN] + ((own_key * SHARES + share) * 2 + int(votes.own_says == token)) * 2 + int(in_output)
            )
        if index_top < NOWHERE:
            share = share_bucket(cast.index[index_top], votes.index_support[index_top])
            key = (index_key * SHARES + share) * 2 + int(votes.index_says == token)
            inputs[INDEX] = OFFSETS[INDEX] + key * ORIGINS + origin
        if at.predicted >= 0:
            key = length_bucket(at.agreed) * 2 + int(at.was_right)
            inputs[PREDICTION] = OFFSETS[PREDICTION] + key * 2 + int(at.predicted == token)
        sum_votes, length, voted = 0.0, 0, 0
        for view in range(num_filled):
            level = filled[view]
            sum_votes += cast.index[level] + cast.own[level]
            share = share_bucket(sum_votes, found.supports[view])
            inputs[LEVEL + view] = OFFSETS[LEVEL + view] + keys[view] * SHARES + share
            if voted == 0:
                length, voted = keys[view] // SUPPORTS, share
        key = length * SHARES + voted
        inputs[REQUEST] = OFFSETS[REQUEST] + at.error_bucket * LENGTHS * SHARES + key
        coarse = coarse_length(length) * COARSE_SHARES + coarse_share(voted)
        inputs[TOKEN] = OFFSETS[TOKEN] + hash_of(token) * COARSE_LENGTHS * COARSE_SHARES + coarse
        inputs[BEFORE] = OFFSETS[BEFORE] + hash_of(at.before) * COARSE_LENGTHS * COARSE_SHARES + coarse
        inputs[PAIR] = OFFSETS[PAIR] + hash_of_pair(at.before, token) * COARSE_LENGTHS * COARSE_SHARES + coarse
        if has_offer:
            child = child_of(found.forest, at.offered, token)
            shown = child if child >= 0 else best
            key = found.forest.kinds[shown] * 2 + int(child >= 0)
            key = key * OFFERED_CHANCES + offered_bucket(found.forest.chances[shown])
            inputs[OFFER] = OFFSETS[OFFER] + key * WHEN_SETS + when(at.depth)
        rank = rank_of(recycled, token)
        if has_recycled:
            key = (at.temperature_bucket * 2 + recycled.is_pair) * (SUCCESSORS + 1) + rank
            share = recycled.shares[rank if rank < SUCCESSORS else 0]
            inputs[RECYCLED] = OFFSETS[RECYCLED] + key * SUCCESSOR_SHARES + share
        if found.foreseen.is_known:
            inputs[NOISE] = _noise_entry(found, token, rank, coarse)
        if found.keyed.token >= 0:
            inputs[KEYED] = OFFSETS[KEYED] + keyed_key * 2 + int(token == found.keyed.token)
        found.sets[row], found.chances[row] = chosen, chance_of(model, inputs, chosen)


SURE_LENGTH: Final = 9
"""Where so many tokens agree and all places say the same, the target's own candidates are not looked up."""


@inlined
def _is_sure(evidence: Evidence, size: int, passed: int, votes: Votes) -> bool:
    top = min(votes.index_top, votes.own_top)
    return bool(size == 1 and top < NOWHERE and evidence.lengths[top] + passed >= SURE_LENGTH)


@inlined
def seek(
    texts: Texts,
    evidence: Evidence,
    alive: Int64s,
    num_alive: int,
    at: Position,
    most: int,
    most_recycled: int,
    found: Candidates,
) -> int:
    """Find the candidates of a position: how many there are.

    ``alive`` : samples that agree with the draft so far, see ``count_votes``. At most ``most`` tokens with votes, the
    predicted one, that which the same noise chose before and those offered, of which the greatest share of votes or
    chance decides; beside them ``most_recycled`` of the target's own.
    """
    votes, recycled = found.votes, found.recycled
    size = count_votes(texts, evidence, alive, num_alive, at.passed, at.predicted, votes)
    recycled.count = NOT_ASKED
    if found.successors != 0 and not _is_sure(evidence, size, at.passed, votes):
        recall(found.successors, at.earlier, at.before, recycled)
    if found.foreseen.is_known:
        weigh(found.foreseen, recycled)
    size, keyed = add_offered(found.forest, at.offered, size, votes), found.keyed.token
    if keyed >= 0:
        size = add_voteless(keyed, size, votes)
    if size > most:
        size = keep_greatest(votes, size, most, evidence.num_levels, at.predicted, keyed, found.forest, at.offered)
    for rank in range(min(most_recycled, recycled.count)):
        size = add_voteless(recycled.tokens[rank], size, votes)
    return size


_BY_OWN: Final = 3
_BY_PREDICTION: Final = 4
_BY_OFFER: Final = 5
_BY_RECYCLING: Final = 8
_BY_NOISE: Final = 9


@inlined
def name_source(found: Candidates, row: int, evidence: Evidence, predicted: int, out: DraftRecord) -> None:
    """Note the length of the longest match, and which source gave most of a candidate's votes.

    The last count was of all samples. Of the index it is the place of the longest match that says the candidate: where
    that lies, in a static segment, one born in the ring or the ring's tail. Without votes it is who offers it, or the
    target itself. What the same noise chose before has no other source, places or not: of all that is there it says
    most. O(samples).
    """
    token = found.votes.tokens[row]
    index, own = votes_by_source(found.votes, row)
    out.match_length = evidence.lengths[0] if evidence.num_levels > 0 else 0
    out.source = _BY_OWN
    if token == predicted:
        out.source = _BY_PREDICTION
    elif token == found.keyed.token:
        out.source = _BY_NOISE
    elif own < index:
        for sample in range(num_samples(evidence)):
            if found.votes.nexts[sample] == token and not is_own(evidence, sample):
                out.source = origin_of(evidence.recency[sample])
                break
    elif own == 0.0:
        child = child_of(found.forest, ROOT, token)
        out.source = _BY_OFFER + found.forest.kinds[child] if child >= 0 else _BY_RECYCLING
