"""The tokens that may come next, and what each view of the acceptance model sees of them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from ssd.compiled.addresses import Float64s, Int64s, inlined
from ssd.compiled.records import Address, Record
from ssd.drafting.suffix.acceptance import (
    AGREEMENTS,
    BEFORE,
    COARSE_LENGTHS,
    COARSE_SHARES,
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
    TOKEN,
    WARMTHS,
    WHEN_SETS,
    Model,
    chance_of,
    coarse_length,
    coarse_share,
    hash_of,
    hash_of_pair,
    length_bucket,
    offered_bucket,
    share_bucket,
    support_bucket,
    weight_set,
    when,
)
from ssd.drafting.suffix.foreseen import HEIGHTS, Foreseen, height_of, verdict_on
from ssd.drafting.suffix.gather import MAX_LEVELS, NOTHING, Evidence, origin_of, own_position
from ssd.drafting.suffix.keyed import RUNS, Keyed, run_bucket
from ssd.drafting.suffix.offered import Forest, best_child, child_of, has_children
from ssd.drafting.suffix.recycled import Recycled, rank_of
from ssd.drafting.suffix.successors import SHARES as SUCCESSOR_SHARES
from ssd.drafting.suffix.successors import SUCCESSORS
from ssd.drafting.suffix.vote import MAX_CANDIDATES, NOWHERE, Votes

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
    behind, NOTHING where it is behind none. ``warmth`` : how the request samples, see `Ask`. ``predicted`` : what the
    client's prediction says, NOTHING where it does not; ``agreed`` : for how many tokens it has been right;
    ``was_right`` : it has never been wrong. ``error_bucket`` : see `learn.error_bucket`. ``prompt_length`` : of the
    request.
    """

    depth: int
    passed: int
    before: int
    earlier: int
    offered: int
    warmth: int
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
def _keyed_key(found: Candidates, has_places: bool, warmth: int) -> int:
    """What the view of keyed choices sees at a position, but for whether a token is the one chosen."""
    keyed, votes, agreement = found.keyed, found.votes, 0
    if has_places:
        agreement = 2 if votes.own_says == keyed.token or votes.index_says == keyed.token else 1
    key = (keyed.confirmed * RUNS + run_bucket(keyed.run)) * AGREEMENTS + agreement
    return int(key * WARMTHS + warmth)


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
    keyed_key = _keyed_key(found, num_filled > 0, at.warmth) if found.keyed.token >= 0 else 0
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
            key = (at.warmth * 2 + recycled.is_pair) * (SUCCESSORS + 1) + rank
            share = recycled.shares[rank if rank < SUCCESSORS else 0]
            inputs[RECYCLED] = OFFSETS[RECYCLED] + key * SUCCESSOR_SHARES + share
        if found.foreseen.is_known:
            inputs[NOISE] = _noise_entry(found, token, rank, coarse)
        if found.keyed.token >= 0:
            inputs[KEYED] = OFFSETS[KEYED] + keyed_key * 2 + int(token == found.keyed.token)
        found.sets[row], found.chances[row] = chosen, chance_of(model, inputs, chosen)
