"""How probable is it that the target accepts a candidate token? Learned while serving, from every token tested.

Context mixing, as in data compressors (Mahoney 2005, "Adaptive weighing of context models for lossless data
compression", sections 3 and 4): each view of the evidence looks up a chance in a table of its own, adapted to what came
of the candidates seen there, and a logistic mixer weighs the views' log odds. A view is a few small numbers, so a few
hundred tested tokens fill what matters; before that the tables hold a formula's estimates. What the mixer says is read
off a curve that is fitted to what came of earlier estimates (there: adaptive probability map): a token is drafted
because it looks better than others, so as it comes out of the mixer it looks better than it is.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Float64, Int64s, Record, inlined, kernel, view_of
from ssd.drafting.choices import MOST_CONFIRMED
from ssd.drafting.foreseen import HEIGHTS, RUNS, TYPICAL_SHARE, VERDICTS
from ssd.drafting.protocol import NUM_PROPOSER_KINDS
from ssd.drafting.successors import SHARES as SUCCESSOR_SHARES
from ssd.drafting.successors import SUCCESSORS

Floats = npt.NDArray[np.float64]
# The views of a candidate. Lengths, supports and shares are bucketed.
OWN: Final = 0  # the longest match in the request's own text: length, support, share, newest vote, is that output
INDEX: Final = 1  # the same in the index, and where its newest place lies
PREDICTION: Final = 2  # the client's prediction: for how long it agrees, was it ever wrong, does it say this token
LEVEL: Final = 3  # and the two after it: all places that agree on so many tokens: length, support, share
REQUEST: Final = 6  # how this request's drafts fared lately; length and share of the longest match with a vote
TOKEN: Final = 7  # the token itself, hashed; length and share, coarsely
BEFORE: Final = 8  # the token before it, hashed; length and share, coarsely
PAIR: Final = 9  # both, hashed; length and share, coarsely
OFFER: Final = 10  # what is offered here: by which source, is it this token, the greatest chance else, how deep
RECYCLED: Final = (
    11  # the target's own candidates: after two tokens or one, the rank, its share; how the request samples
)
NOISE: Final = 12  # what the target's own noise says, of the entry there and of the token; length and share, coarsely
KEYED: Final = (
    13  # what the same noise chose before: how often, were those right before it, do places agree, is it this token
)
INPUTS: Final = 14
LEVEL_VIEWS: Final = 3
LENGTHS: Final = 13
SUPPORTS: Final = 6
SHARES: Final = 9

ORIGINS: Final = 4
"""See `lookup.origin_of`, which tells three: the fourth stands in published models, and none has it any more."""

ERROR_BUCKETS: Final = 8
HASHES: Final = 1024
PAIR_HASHES: Final = 8192
COARSE_LENGTHS: Final = 4
COARSE_SHARES: Final = 3
OFFERED_CHANCES: Final = 8
TEMPERATURE_BUCKETS: Final = 3

AGREEMENTS: Final = 3
"""Of places with what the same noise chose: there are none, the newest say something else, one of them says so."""

WHEN_SETS: Final = 3
_SHAPES: Final = (
    (LENGTHS, SUPPORTS, SHARES, 2, 2),
    (LENGTHS, SUPPORTS, SHARES, 2, ORIGINS),
    (LENGTHS, 2, 2),
    (LENGTHS, SUPPORTS, SHARES),
    (LENGTHS, SUPPORTS, SHARES),
    (LENGTHS, SUPPORTS, SHARES),
    (ERROR_BUCKETS, LENGTHS, SHARES),
    (HASHES, COARSE_LENGTHS, COARSE_SHARES),
    (HASHES, COARSE_LENGTHS, COARSE_SHARES),
    (PAIR_HASHES, COARSE_LENGTHS, COARSE_SHARES),
    (NUM_PROPOSER_KINDS, 2, OFFERED_CHANCES, WHEN_SETS),
    (TEMPERATURE_BUCKETS, 2, SUCCESSORS + 1, SUCCESSOR_SHARES),
    (VERDICTS, HEIGHTS, COARSE_LENGTHS, COARSE_SHARES),
    (MOST_CONFIRMED + 1, RUNS, AGREEMENTS, TEMPERATURE_BUCKETS, 2),
)
OFFSETS: Final = np.cumsum([0, *(math.prod(shape) for shape in _SHAPES)])
ENTRIES: Final = int(OFFSETS[-1])
_SOURCES: Final = 7

SETS: Final = 2**_SOURCES * LEVEL_VIEWS * WHEN_SETS
"""Sets of mixer weights: own text, index, prediction, offers, recycled ones, noise and what it chose before there or
not, how many levels, how deep."""

_NUM_WEIGHTS: Final = SETS * (INPUTS + 1)

KNOTS: Final = 33
"""Of a curve: from log odds of -8 to 8, 1 / KNOTS_PER_UNIT apart, straight between."""

KNOTS_PER_UNIT: Final = 2.0

NUM_LEARNED: Final = _NUM_WEIGHTS + WHEN_SETS * KNOTS
"""Numbers behind the tables: weights and curves."""

MODEL_FLOATS: Final = 3 * ENTRIES + NUM_LEARNED + 1
_MIXER_RATE: Final = 0.01
_CONSTANT_RATE: Final = 0.003
_KNOT_RATE: Final = 0.02

_LEAST_RATE: Final = 0.01
"""A table entry forgets: it weighs the last hundred candidates or so, to follow traffic that shifts."""

_PRIOR_COUNT: Final = 2.0
_MOST_COUNT: Final = 1.0 / _LEAST_RATE  # a greater one would make no difference
_LEAST_CHANCE: Final = 1e-4

_MOST_WEIGHT: Final = 4.0
"""Four times what replays of recorded outputs reach. From end to end an entry at the edge of its range moves a weight
in 2 * _MOST_WEIGHT / (_MIXER_RATE * 9.2) = 87 candidates whose outcome surprises."""

# What the buckets stand for.
_LENGTH_BUCKETS: Final = np.searchsorted([1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49], np.arange(64), side="right")
_COARSE_LENGTH: Final = np.array([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3])
_TYPICAL_LENGTH: Final = np.array([0.5, 1, 2, 3, 4, 5.5, 7.5, 10, 14, 20, 28, 40, 64])
_TYPICAL_SUPPORT: Final = np.array([1, 2, 3, 5, 10, 40.0])
_TYPICAL_SHARE: Final = np.array([0.02, 0.1, 0.25, 0.42, 0.5, 0.6, 0.75, 0.92, 1.0])
_TYPICAL_COARSE_LENGTH: Final = np.array([1.5, 4.0, 8.0, 24.0])
_TYPICAL_COARSE_SHARE: Final = np.array([0.2, 0.6, 1.0])
_TYPICAL_OFFERED: Final = np.array([0.015, 0.06, 0.15, 0.27, 0.45, 0.65, 0.85, 0.97])
_TYPICAL_SUCCESSOR: Final = TYPICAL_SHARE
_TYPICAL_HEIGHT: Final = np.array([-1.3, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 3.0])
_TYPICAL_RUN: Final = np.array([0.0, 0.8, 1.5, 2.2, 3.0, 3.8])
_TYPICAL_VERDICT: Final = np.array([0.1, 0.03, 0.04, 0.15, 0.25, 0.4, 0.6])


class Model(Record):
    """An acceptance model as kernels find it, changed in place.

    ``chances``, ``counts``, ``log_odds`` : of each table entry: the chance, how many candidates it rests on, and
    log(chance / (1 - chance)). ``weights`` : of each set, the last a constant. ``learned`` : candidates learned from.
    """

    chances: Annotated[Floats, np.float64, ENTRIES]
    counts: Annotated[Floats, np.float64, ENTRIES]
    log_odds: Annotated[Floats, np.float64, ENTRIES]
    weights: Annotated[Floats, np.float64, (SETS, INPUTS + 1)]
    knots: Annotated[Floats, np.float64, (WHEN_SETS, KNOTS)]
    learned: Float64


model_at = view_of(Model)


@inlined
def length_bucket(length: int) -> int:
    """0..LENGTHS - 1, finer where shorter."""
    return int(_LENGTH_BUCKETS[min(length, 63)])


@inlined
def coarse_length(bucket: int) -> int:
    """Of a length's bucket, 0..COARSE_LENGTHS - 1."""
    return int(_COARSE_LENGTH[bucket])


@inlined
def support_bucket(support: float) -> int:
    """0..SUPPORTS - 1."""
    if support < 3.5:
        return 0 if support < 1.5 else (1 if support < 2.5 else 2)
    return 3 if support < 6.5 else (4 if support < 16.0 else 5)


@inlined
def share_bucket(votes: float, support: float) -> int:
    """0..SHARES - 1: 0 for no vote, 8 for all of them, 4 for half."""
    if votes <= 0.0:
        return 0
    share = votes / support
    if share > 0.999:
        return 8
    if share < 0.49:
        return 1 if share < 0.15 else (2 if share < 0.33 else 3)
    if share < 0.66:
        return 4 if share < 0.51 else 5
    return 6 if share < 0.85 else 7


@inlined
def coarse_share(bucket: int) -> int:
    """Of a share's bucket, 0..COARSE_SHARES - 1."""
    return 0 if bucket < 3 else (1 if bucket < 7 else 2)


@inlined
def hash_of(token: int) -> int:
    """0..HASHES - 1."""
    return ((token * 40503) >> 4) & (HASHES - 1)


@inlined
def hash_of_pair(before: int, token: int) -> int:
    """0..PAIR_HASHES - 1."""
    return (((token * 40503) ^ (before * 69069 + (before >> 7))) >> 3) & (PAIR_HASHES - 1)


@inlined
def offered_bucket(chance: float) -> int:
    """0..OFFERED_CHANCES - 1, finer towards both ends."""
    if chance < 0.35:
        return 0 if chance < 0.03 else (1 if chance < 0.1 else (2 if chance < 0.2 else 3))
    return 4 if chance < 0.55 else (5 if chance < 0.75 else (6 if chance < 0.92 else 7))


@inlined
def weight_set(
    has_own: bool,
    has_index: bool,
    has_prediction: bool,
    has_offer: bool,
    has_recycled: bool,
    has_noise: bool,
    has_keyed: bool,
    num_levels: int,
    depth: int,
) -> int:
    """Which weights a candidate is mixed with, 0..SETS - 1."""
    sources = int(has_own) + 2 * int(has_index) + 4 * int(has_prediction) + 8 * int(has_offer) + 16 * int(has_recycled)
    sources += 32 * int(has_noise) + 64 * int(has_keyed)
    levels = min(max(num_levels, 1), LEVEL_VIEWS) - 1
    return (sources * LEVEL_VIEWS + levels) * WHEN_SETS + when(depth)


@inlined
def when(depth: int) -> int:
    """How deep in a draft, 0..WHEN_SETS - 1."""
    return 0 if depth == 0 else (1 if depth < 4 else 2)


@inlined
def _mixed(model: Model, inputs: Int64s, chosen: int) -> float:
    """Log odds that a candidate is accepted, as the mixer sees them."""
    total = model.weights[chosen, INPUTS]
    for i in range(INPUTS):
        if inputs[i] >= 0:
            total += model.weights[chosen, i] * model.log_odds[inputs[i]]
    return float(total)


@inlined
def _place(log_odds: float) -> tuple[int, float]:
    """Where log odds lie on a curve: after which knot, and how far towards the next one, 0 to 1."""
    place = min(max(KNOTS_PER_UNIT * log_odds + (KNOTS - 1) // 2, 0.0), KNOTS - 1.0)
    knot = min(int(place), KNOTS - 2)
    return knot, place - knot


@inlined
def chance_of(model: Model, inputs: Int64s, chosen: int) -> float:
    """The chance that a candidate is accepted.

    ``inputs`` : int64[INPUTS], the table entry of each view, -1 where it sees nothing. ``chosen`` : its weight set.
    """
    knot, part = _place(_mixed(model, inputs, chosen))
    knots = model.knots[chosen % WHEN_SETS]
    return float((1.0 - part) * knots[knot] + part * knots[knot + 1])


@inlined
def _bounded_weight(weight: float) -> float:
    return min(max(weight, -_MOST_WEIGHT), _MOST_WEIGHT)


@kernel
def learn(model: Model, inputs: Int64s, chosen: int, label: float) -> float:
    """Learn what came of a candidate: 1.0 accepted, 0.0 not. Returns the error of the mixer, label - chance.

    The mixer takes a gradient step of the log loss, the curve one of the squared error; a view's entry moves towards
    the label by 1 / count, at least _LEAST_RATE. All numbers stay within ``within_reach``.
    """
    log_odds = _mixed(model, inputs, chosen)
    knot, part = _place(log_odds)
    knots = model.knots[chosen % WHEN_SETS]
    step = _KNOT_RATE * (label - (1.0 - part) * knots[knot] - part * knots[knot + 1])
    for i, share in ((knot, 1.0 - part), (knot + 1, part)):
        knots[i] = min(max(knots[i] + share * step, _LEAST_CHANCE), 1.0 - _LEAST_CHANCE)
    error = label - 1.0 / (1.0 + math.exp(-log_odds))
    weights = model.weights[chosen]
    weights[INPUTS] = _bounded_weight(weights[INPUTS] + _CONSTANT_RATE * error)
    for i in range(INPUTS):
        at = inputs[i]
        if at < 0:
            continue
        weights[i] = _bounded_weight(weights[i] + _MIXER_RATE * error * model.log_odds[at])
        model.counts[at] = min(model.counts[at] + 1.0, _MOST_COUNT)
        chance = model.chances[at] + (label - model.chances[at]) * max(1.0 / model.counts[at], _LEAST_RATE)
        chance = min(max(chance, _LEAST_CHANCE), 1.0 - _LEAST_CHANCE)
        model.chances[at] = chance
        model.log_odds[at] = math.log(chance / (1.0 - chance))
    model.learned += 1.0
    return float(error)


def within_reach(chances: Floats, counts: Floats, weights: Floats, knots: Floats) -> tuple[Floats, ...]:
    """The nearest numbers that learning from a new model could have come to; float64 arrays of any shape."""
    return (
        np.clip(chances, _LEAST_CHANCE, 1.0 - _LEAST_CHANCE),
        np.clip(counts, _PRIOR_COUNT, _MOST_COUNT),
        np.clip(weights, -_MOST_WEIGHT, _MOST_WEIGHT),
        np.clip(knots, _LEAST_CHANCE, 1.0 - _LEAST_CHANCE),
    )


def prior_model() -> npt.NDArray[np.float64]:
    """float64[MODEL_FLOATS]: a model that has seen nothing. O(ENTRIES)."""
    buffer = np.zeros(MODEL_FLOATS)
    log_odds = np.concatenate([np.broadcast_to(_prior(view), shape).ravel() for view, shape in enumerate(_SHAPES)])
    log_odds = np.clip(log_odds, *np.log([_LEAST_CHANCE, 1 / _LEAST_CHANCE]))
    buffer[:ENTRIES] = 1.0 / (1.0 + np.exp(-log_odds))
    buffer[ENTRIES : 2 * ENTRIES] = _PRIOR_COUNT
    buffer[2 * ENTRIES : 3 * ENTRIES] = log_odds
    at_knots = (np.arange(KNOTS) - (KNOTS - 1) // 2) / KNOTS_PER_UNIT
    curves = np.tile(1.0 / (1.0 + np.exp(-at_knots)), WHEN_SETS)
    buffer[3 * ENTRIES : -1] = np.concatenate([_prior_weights().ravel(), curves])
    return buffer


def _expected(length: Floats, support: Floats | float, share: Floats) -> Floats:
    """Log odds by rule of thumb: longer, more often, more of one mind."""
    votes = np.maximum(share * support, 0.05)
    return (
        -1.3
        + 0.85 * np.log(1 + length)
        + 0.1 * np.log(1 + support)
        + 0.45 * np.log((votes + 0.5) / (support - votes + 0.5))
    )


def _prior(view: int) -> Floats:
    """Log odds of a view's entries, in a shape that broadcasts to theirs."""
    length: Floats
    support: Floats
    share: Floats
    length, support, share = np.ix_(_TYPICAL_LENGTH, _TYPICAL_SUPPORT, _TYPICAL_SHARE)
    newest = np.array([-0.2, 0.2])
    if view in (OWN, INDEX):
        by_vote: Floats = _expected(length, support, share)[..., None] + newest
        return by_vote[..., None]
    if view == PREDICTION:
        agrees: Floats = np.log(1 + _TYPICAL_LENGTH)[:, None] * [0.9, 0.5] + [0.3, 2.0]
        both: Floats = np.stack([np.full((LENGTHS, 2), -1.5), agrees], axis=-1)
        return both
    if view == REQUEST:
        return _expected(_TYPICAL_LENGTH[:, None], 3.0, _TYPICAL_SHARE)
    if view in (TOKEN, BEFORE, PAIR):
        return _expected(_TYPICAL_COARSE_LENGTH[:, None], 3.0, _TYPICAL_COARSE_SHARE)
    if view == OFFER:
        says: Floats = np.stack([_another(_TYPICAL_OFFERED), _log_odds(_TYPICAL_OFFERED)])
        return says[:, :, None]
    if view == RECYCLED:
        known = np.array([0.6, 0.85])[:, None, None]
        ranked = known * 0.9 ** np.arange(SUCCESSORS)[:, None] * _TYPICAL_SUCCESSOR
        absent = _another((known * _TYPICAL_SUCCESSOR)[:, :, :])
        temperature_bucket = np.array([0.0, -0.2, -0.5])[:, None, None, None]
        by_rank: Floats = np.concatenate([_log_odds(ranked), absent], axis=1) + temperature_bucket
        return by_rank
    if view == NOISE:
        places = _expected(_TYPICAL_COARSE_LENGTH[:, None], 3.0, _TYPICAL_COARSE_SHARE)
        says = _log_odds(_TYPICAL_VERDICT)[:, None, None, None]
        return says + 0.5 * places + 0.5 * _TYPICAL_HEIGHT[:, None, None]
    if view == KEYED:
        chosen = np.arange(MOST_CONFIRMED + 1)[:, None, None] * 0.4 + _TYPICAL_RUN[:, None] + [0.0, -0.7, 0.5]
        either: Floats = np.stack([-1.0 - chosen, chosen], axis=-1)
        return either[:, :, :, None, :]
    return _expected(length, support, share)


def _log_odds(chance: Floats) -> Floats:
    result: Floats = np.log(chance / (1.0 - chance))
    return result


def _another(chance: Floats) -> Floats:
    """Log odds of a token where another one has a chance."""
    return _log_odds(0.4 * (1.0 - chance))


def _prior_weights() -> Floats:
    """Views of the same evidence share the say: the weights of those that can be present add up to one.

    Beside places where the same text stands, an offer and what is recycled say less than without.
    """
    weights = np.zeros((SETS, INPUTS + 1))
    for chosen in range(SETS):
        sources, levels = divmod(chosen // WHEN_SETS, LEVEL_VIEWS)
        own, index, prediction, offer, recycled, noise, keyed = (sources >> bit & 1 for bit in range(_SOURCES))
        offer_says, recycled_says = (2.5, 2.0) if own or index else (6.0, 3.0)
        say = np.array([0.8 * own, 0.8 * index, 8.0 * prediction, 0.8, 0.5 * (levels >= 1), 0.3 * (levels >= 2)])
        others = [offer_says * offer, recycled_says * recycled, 1.5 * noise, 8.0 * keyed]
        say = np.concatenate([say, np.full(4, 0.3), others])
        weights[chosen, :INPUTS] = say / say.sum()
    return weights
