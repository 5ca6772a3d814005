"""Estimate the probability that the target model accepts a draft token, and learn from outcomes while serving.

The method is context mixing, as in data compressors (Mahoney 2005, "Adaptive weighing of context models for lossless
data compression", sections 3 and 4). Each feature of a candidate token looks up a probability in its own table, whose
entry adapts to the outcomes of earlier candidates with the same feature value, and a logistic mixer weighs the log odds
of all features. A feature is a combination of a few small numbers, so a few hundred verified tokens fill the entries
that matter; before that the tables hold the values of a formula.

Finally, the mixer's result is corrected by a curve that is fitted to the outcomes of earlier estimates (an adaptive
probability map, same paper). The curve removes a selection bias: the token with the greatest estimate is drafted, so
the estimates of drafted tokens are too high on average.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.drafting.noise_prediction import NOISE_BUCKETS, RUN_BUCKETS, TYPICAL_SHARE, VERDICTS
from ssd.drafting.protocol import NUM_PROPOSER_KINDS
from ssd.drafting.sample_cache import MAX_CONFIRMED
from ssd.drafting.token_recycling import SHARES as RECYCLED_SHARES
from ssd.drafting.token_recycling import TOP_K
from ssd.jit.addresses import Float64, Int64s, Record, inlined, kernel, view_of

Floats = npt.NDArray[np.float64]
# The features of a candidate. Each is a tuple of small numbers, whose ranges _SHAPES lists in the same order. Lengths,
# supports (numbers of matches) and shares (of their votes) are bucketed.

CONTEXT: Final = 0
"""A feature of the acceptance model: the longest match in the request's context.

Its value combines the match length, the number of matches, the share of them that continue with the candidate token,
whether the newest match does, and whether that match lies in the output.
"""
INDEX: Final = 1
"""A feature of the acceptance model: the longest match in the retrieval cache.

Its value combines the match length, the number of matches, the share of them that continue with the candidate token,
whether the newest match does, and the part of the cache that contains that match.
"""
PREDICTION: Final = 2
"""A feature of the acceptance model: the client's predicted output.

Its value combines the number of consecutive output tokens that equal the prediction, whether the output has ever
differed from it, and whether the prediction continues with the candidate token.
"""
LEVEL: Final = 3
"""The index of the first of three features of the acceptance model, one for each match length that is looked up.

The feature value combines the match length, the number of matches of at least this length, and the share of these
matches that continue with the candidate token.
"""
REQUEST: Final = 6
"""A feature of the acceptance model: the error of the model's recent estimates in the same request.

Its value also contains coarse buckets of the longest match's length and of the share of matches that continue with the
candidate token.
"""
TOKEN: Final = 7
"""A feature of the acceptance model: a hash of the candidate token, with coarse buckets of match length and share."""
BEFORE: Final = 8
"""A feature of the acceptance model: a hash of the token before the candidate token.

Its value also contains coarse buckets of match length and share.
"""
PAIR: Final = 9
"""A feature of the acceptance model: a hash of the candidate token and the token before it.

Its value also contains coarse buckets of match length and share.
"""
PROPOSAL: Final = 10
"""A feature of the acceptance model: the token that another drafter, such as a draft model, proposes at this position.

Its value combines the kind of drafter, whether it proposes the candidate token, its probability, and the depth in the
draft.
"""
RECYCLED: Final = 11
"""A feature of the acceptance model: the candidate's rank among the target's earlier top-k tokens (token recycling).

The top-k tokens were stored when the target last processed the same token or pair of tokens. The value also combines
the temperature, whether a pair of tokens matched, and the candidate's share of the probability in the top k.
"""
NOISE: Final = 12
"""A feature of the acceptance model: the Gumbel noise with which the target will sample, if the noise is known.

Its value combines a verdict on the candidate token (see `VERDICTS`), the token's noise, and coarse buckets of the
match.
"""
CACHED_SAMPLE: Final = 13
"""A feature of the acceptance model: the token that was sampled before with the same Gumbel noise ("cached sample").

Its value combines how often that token was sampled again, how many cached samples in a row were right, whether text
matches agree, the temperature, and whether the candidate is that token.
"""
NUM_FEATURES: Final = 14
LEVEL_FEATURES: Final = 3
LENGTHS: Final = 13
SUPPORTS: Final = 6
SHARES: Final = 9

ORIGINS: Final = 4
"""The number of places in the retrieval cache (prebuilt, cache, recent) that the acceptance model's table
distinguishes.

The table has room for one more than the three kinds that `lookup.index_source_of` returns.
"""

ERROR_BUCKETS: Final = 8
HASHES: Final = 1024
PAIR_HASHES: Final = 8192
COARSE_LENGTHS: Final = 4
COARSE_SHARES: Final = 3
PROPOSED_PROBABILITIES: Final = 8
TEMPERATURE_BUCKETS: Final = 3

AGREEMENTS: Final = 3
"""The number of values that tell whether the text matches agree with the token sampled before with the same Gumbel
noise.

The values mean: there is no match; the newest matches continue with that token; they continue with a different token.
"""

DEPTH_BUCKETS: Final = 3
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
    (NUM_PROPOSER_KINDS, 2, PROPOSED_PROBABILITIES, DEPTH_BUCKETS),
    (TEMPERATURE_BUCKETS, 2, TOP_K + 1, RECYCLED_SHARES),
    (VERDICTS, NOISE_BUCKETS, COARSE_LENGTHS, COARSE_SHARES),
    (MAX_CONFIRMED + 1, RUN_BUCKETS, AGREEMENTS, TEMPERATURE_BUCKETS, 2),
)
OFFSETS: Final = np.cumsum([0, *(math.prod(shape) for shape in _SHAPES)])
ENTRIES: Final = int(OFFSETS[-1])
_NUM_SOURCE_FLAGS: Final = 7

NUM_WEIGHT_SETS: Final = 2**_NUM_SOURCE_FLAGS * LEVEL_FEATURES * DEPTH_BUCKETS
"""The number of weight vectors with which the acceptance model weighs a candidate's features, see `weight_set`."""

_NUM_WEIGHTS: Final = NUM_WEIGHT_SETS * (NUM_FEATURES + 1)

KNOTS: Final = 33
"""The number of knots of the piecewise linear curves that correct acceptance estimates.

The knots lie at log odds from -8 to 8, 1 / KNOTS_PER_UNIT apart.
"""

KNOTS_PER_UNIT: Final = 2.0

NUM_LEARNED: Final = _NUM_WEIGHTS + DEPTH_BUCKETS * KNOTS
"""The number of learned parameters of an acceptance model besides its tables: feature weights and curve knots."""

MODEL_FLOATS: Final = 3 * ENTRIES + NUM_LEARNED + 1
_MIXER_RATE: Final = 0.01
_CONSTANT_RATE: Final = 0.003
_KNOT_RATE: Final = 0.02

_MIN_RATE: Final = 0.01
"""The minimum learning rate of an entry in the acceptance model's tables.

An entry thus averages about the last hundred outcomes, and follows traffic that shifts.
"""

_PRIOR_COUNT: Final = 2.0
_MAX_COUNT: Final = 1.0 / _MIN_RATE  # greater counts would not change the learning rate
_MIN_PROBABILITY: Final = 1e-4

_MAX_WEIGHT: Final = 4.0
"""The maximum weight of a feature in the acceptance model.

It is four times the greatest weight learned in replays of recorded outputs. About 87 candidates with a surprising
outcome move a weight from its minimum to its maximum.
"""

# The bounds of the buckets, and the values that they stand for.
_LENGTH_BUCKETS: Final = np.searchsorted([1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49], np.arange(64), side="right")
_COARSE_LENGTH: Final = np.array([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3])
_TYPICAL_LENGTH: Final = np.array([0.5, 1, 2, 3, 4, 5.5, 7.5, 10, 14, 20, 28, 40, 64])
_TYPICAL_SUPPORT: Final = np.array([1, 2, 3, 5, 10, 40.0])
_TYPICAL_SHARE: Final = np.array([0.02, 0.1, 0.25, 0.42, 0.5, 0.6, 0.75, 0.92, 1.0])
_TYPICAL_COARSE_LENGTH: Final = np.array([1.5, 4.0, 8.0, 24.0])
_TYPICAL_COARSE_SHARE: Final = np.array([0.2, 0.6, 1.0])
_TYPICAL_PROPOSED: Final = np.array([0.015, 0.06, 0.15, 0.27, 0.45, 0.65, 0.85, 0.97])
_TYPICAL_RECYCLED: Final = TYPICAL_SHARE
_TYPICAL_NOISE: Final = np.array([-1.3, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 3.0])
_TYPICAL_RUN: Final = np.array([0.0, 0.8, 1.5, 2.2, 3.0, 3.8])
_TYPICAL_VERDICT: Final = np.array([0.1, 0.03, 0.04, 0.15, 0.25, 0.4, 0.6])


class AcceptanceTables(Record):
    """The parameters of an acceptance model, in the form that numba kernels read and update.

    Attributes:
        probabilities: The acceptance probability of each table entry.
        counts: The number of outcomes that each table entry has learned from.
        log_odds: log(probability / (1 - probability)) of each table entry.
        weights: The weight vectors of the mixer: a weight for each feature, and one for a constant.
        knots: The correction curve for each depth bucket.
        learned: The number of outcomes that the whole model has learned from.
    """

    probabilities: Annotated[Floats, np.float64, ENTRIES]
    counts: Annotated[Floats, np.float64, ENTRIES]
    log_odds: Annotated[Floats, np.float64, ENTRIES]
    weights: Annotated[Floats, np.float64, (NUM_WEIGHT_SETS, NUM_FEATURES + 1)]
    knots: Annotated[Floats, np.float64, (DEPTH_BUCKETS, KNOTS)]
    learned: Float64


acceptance_tables_at = view_of(AcceptanceTables)


@inlined
def length_bucket(length: int) -> int:
    return int(_LENGTH_BUCKETS[min(length, 63)])


@inlined
def coarse_length(bucket: int) -> int:
    return int(_COARSE_LENGTH[bucket])


@inlined
def support_bucket(support: float) -> int:
    if support < 3.5:
        return 0 if support < 1.5 else (1 if support < 2.5 else 2)
    return 3 if support < 6.5 else (4 if support < 16.0 else 5)


@inlined
def share_bucket(votes: float, support: float) -> int:
    """Return the bucket of the share of text matches that continue with a token: 0 for none, 4 for half, 8 for all."""
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
    return 0 if bucket < 3 else (1 if bucket < 7 else 2)


@inlined
def hash_of(token: int) -> int:
    return ((token * 40503) >> 4) & (HASHES - 1)


@inlined
def hash_of_pair(before: int, token: int) -> int:
    return (((token * 40503) ^ (before * 69069 + (before >> 7))) >> 3) & (PAIR_HASHES - 1)


@inlined
def proposed_bucket(probability: float) -> int:
    if probability < 0.35:
        return 0 if probability < 0.03 else (1 if probability < 0.1 else (2 if probability < 0.2 else 3))
    return 4 if probability < 0.55 else (5 if probability < 0.75 else (6 if probability < 0.92 else 7))


@inlined
def weight_set(
    has_context: bool,
    has_index: bool,
    has_prediction: bool,
    has_proposal: bool,
    has_recycled: bool,
    has_noise: bool,
    has_cached_sample: bool,
    num_levels: int,
    depth: int,
) -> int:
    """Return the index of the weight vector with which the acceptance model weighs a candidate's features.

    There is one vector for each combination of the kinds of evidence that are present, and coarse buckets of the depth
    in the draft and of the number of match lengths.
    """
    sources = (
        int(has_context) + 2 * int(has_index) + 4 * int(has_prediction) + 8 * int(has_proposal) + 16 * int(has_recycled)
    )
    sources += 32 * int(has_noise) + 64 * int(has_cached_sample)
    levels = min(max(num_levels, 1), LEVEL_FEATURES) - 1
    return (sources * LEVEL_FEATURES + levels) * DEPTH_BUCKETS + depth_bucket(depth)


@inlined
def depth_bucket(depth: int) -> int:
    return 0 if depth == 0 else (1 if depth < 4 else 2)


@inlined
def _mixed(model: AcceptanceTables, inputs: Int64s, weights_number: int) -> float:
    total = model.weights[weights_number, NUM_FEATURES]
    for i in range(NUM_FEATURES):
        if inputs[i] >= 0:
            total += model.weights[weights_number, i] * model.log_odds[inputs[i]]
    return float(total)


@inlined
def _curve_position(log_odds: float) -> tuple[int, float]:
    place = min(max(KNOTS_PER_UNIT * log_odds + (KNOTS - 1) // 2, 0.0), KNOTS - 1.0)
    knot = min(int(place), KNOTS - 2)
    return knot, place - knot


@inlined
def acceptance_probability(model: AcceptanceTables, inputs: Int64s, weights_number: int) -> float:
    """Estimate the probability that the target accepts a candidate token, if it accepts the draft tokens before it.

    ``inputs`` holds for each feature the index of its table entry, or -1 if the feature is absent. ``weights_number``
    is the index of the weight vector, see `weight_set`.
    """
    knot, part = _curve_position(_mixed(model, inputs, weights_number))
    knots = model.knots[weights_number % DEPTH_BUCKETS]
    return float((1.0 - part) * knots[knot] + part * knots[knot + 1])


@inlined
def _bounded_weight(weight: float) -> float:
    return min(max(weight, -_MAX_WEIGHT), _MAX_WEIGHT)


@kernel
def learn_outcome(model: AcceptanceTables, inputs: Int64s, weights_number: int, label: float) -> float:
    """Update the acceptance model from the outcome of a candidate token; ``label`` is 1.0 if it was accepted, else 0.0.

    The weight vector makes a gradient step on the log loss, and the correction curve makes one on the squared error.
    The table entry of each feature moves towards the outcome by 1 / count, at least by _MIN_RATE. All numbers stay
    within the bounds of `clip_to_learnable`. ``inputs`` and ``weights_number`` are those of `acceptance_probability`.

    Returns:
        ``label`` minus the estimated probability before the correction curve was applied.
    """
    log_odds = _mixed(model, inputs, weights_number)
    knot, part = _curve_position(log_odds)
    knots = model.knots[weights_number % DEPTH_BUCKETS]
    step = _KNOT_RATE * (label - (1.0 - part) * knots[knot] - part * knots[knot + 1])
    for i, share in ((knot, 1.0 - part), (knot + 1, part)):
        knots[i] = min(max(knots[i] + share * step, _MIN_PROBABILITY), 1.0 - _MIN_PROBABILITY)
    error = label - 1.0 / (1.0 + math.exp(-log_odds))
    weights = model.weights[weights_number]
    weights[NUM_FEATURES] = _bounded_weight(weights[NUM_FEATURES] + _CONSTANT_RATE * error)
    for i in range(NUM_FEATURES):
        at = inputs[i]
        if at < 0:
            continue
        weights[i] = _bounded_weight(weights[i] + _MIXER_RATE * error * model.log_odds[at])
        model.counts[at] = min(model.counts[at] + 1.0, _MAX_COUNT)
        probability = model.probabilities[at] + (label - model.probabilities[at]) * max(
            1.0 / model.counts[at], _MIN_RATE
        )
        probability = min(max(probability, _MIN_PROBABILITY), 1.0 - _MIN_PROBABILITY)
        model.probabilities[at] = probability
        model.log_odds[at] = math.log(probability / (1.0 - probability))
    model.learned += 1.0
    return float(error)


def clip_to_learnable(probabilities: Floats, counts: Floats, weights: Floats, knots: Floats) -> tuple[Floats, ...]:
    """Clip the parameters of a restored acceptance model to the ranges that its update rule can produce."""
    return (
        np.clip(probabilities, _MIN_PROBABILITY, 1.0 - _MIN_PROBABILITY),
        np.clip(counts, _PRIOR_COUNT, _MAX_COUNT),
        np.clip(weights, -_MAX_WEIGHT, _MAX_WEIGHT),
        np.clip(knots, _MIN_PROBABILITY, 1.0 - _MIN_PROBABILITY),
    )


def prior_model() -> npt.NDArray[np.float64]:
    """Return the parameters of an acceptance model that has learned nothing, float64[MODEL_FLOATS]."""
    buffer = np.zeros(MODEL_FLOATS)
    log_odds = np.concatenate(
        [np.broadcast_to(_prior(feature), shape).ravel() for feature, shape in enumerate(_SHAPES)]
    )
    log_odds = np.clip(log_odds, *np.log([_MIN_PROBABILITY, 1 / _MIN_PROBABILITY]))
    buffer[:ENTRIES] = 1.0 / (1.0 + np.exp(-log_odds))
    buffer[ENTRIES : 2 * ENTRIES] = _PRIOR_COUNT
    buffer[2 * ENTRIES : 3 * ENTRIES] = log_odds
    at_knots = (np.arange(KNOTS) - (KNOTS - 1) // 2) / KNOTS_PER_UNIT
    curves = np.tile(1.0 / (1.0 + np.exp(-at_knots)), DEPTH_BUCKETS)
    buffer[3 * ENTRIES : -1] = np.concatenate([_prior_weights().ravel(), curves])
    return buffer


def _expected(length: Floats, support: Floats | float, share: Floats) -> Floats:
    """Return initial log odds of acceptance, which grow with match length, match count and the token's share."""
    votes = np.maximum(share * support, 0.05)
    return (
        -1.3
        + 0.85 * np.log(1 + length)
        + 0.1 * np.log(1 + support)
        + 0.45 * np.log((votes + 0.5) / (support - votes + 0.5))
    )


def _prior(feature: int) -> Floats:
    length: Floats
    support: Floats
    share: Floats
    length, support, share = np.ix_(_TYPICAL_LENGTH, _TYPICAL_SUPPORT, _TYPICAL_SHARE)
    newest = np.array([-0.2, 0.2])
    if feature in (CONTEXT, INDEX):
        by_vote: Floats = _expected(length, support, share)[..., None] + newest
        return by_vote[..., None]
    if feature == PREDICTION:
        agrees: Floats = np.log(1 + _TYPICAL_LENGTH)[:, None] * [0.9, 0.5] + [0.3, 2.0]
        both: Floats = np.stack([np.full((LENGTHS, 2), -1.5), agrees], axis=-1)
        return both
    if feature == REQUEST:
        return _expected(_TYPICAL_LENGTH[:, None], 3.0, _TYPICAL_SHARE)
    if feature in (TOKEN, BEFORE, PAIR):
        return _expected(_TYPICAL_COARSE_LENGTH[:, None], 3.0, _TYPICAL_COARSE_SHARE)
    if feature == PROPOSAL:
        says: Floats = np.stack([_other_token(_TYPICAL_PROPOSED), _log_odds(_TYPICAL_PROPOSED)])
        return says[:, :, None]
    if feature == RECYCLED:
        known = np.array([0.6, 0.85])[:, None, None]
        ranked = known * 0.9 ** np.arange(TOP_K)[:, None] * _TYPICAL_RECYCLED
        absent = _other_token((known * _TYPICAL_RECYCLED)[:, :, :])
        temperature_bucket = np.array([0.0, -0.2, -0.5])[:, None, None, None]
        by_rank: Floats = np.concatenate([_log_odds(ranked), absent], axis=1) + temperature_bucket
        return by_rank
    if feature == NOISE:
        places = _expected(_TYPICAL_COARSE_LENGTH[:, None], 3.0, _TYPICAL_COARSE_SHARE)
        says = _log_odds(_TYPICAL_VERDICT)[:, None, None, None]
        return says + 0.5 * places + 0.5 * _TYPICAL_NOISE[:, None, None]
    if feature == CACHED_SAMPLE:
        weights_number = np.arange(MAX_CONFIRMED + 1)[:, None, None] * 0.4 + _TYPICAL_RUN[:, None] + [0.0, -0.7, 0.5]
        either: Floats = np.stack([-1.0 - weights_number, weights_number], axis=-1)
        return either[:, :, :, None, :]
    return _expected(length, support, share)


def _log_odds(probability: Floats) -> Floats:
    result: Floats = np.log(probability / (1.0 - probability))
    return result


def _other_token(probability: Floats) -> Floats:
    return _log_odds(0.4 * (1.0 - probability))


def _prior_weights() -> Floats:
    """Return the initial feature weights of an acceptance model.

    They add up to one over the features that are present. Features that are computed from the same matches share one
    weight. Proposals of other drafters and recycled tokens get less weight if there are text matches.
    """
    weights = np.zeros((NUM_WEIGHT_SETS, NUM_FEATURES + 1))
    for weights_number in range(NUM_WEIGHT_SETS):
        sources, levels = divmod(weights_number // DEPTH_BUCKETS, LEVEL_FEATURES)
        own, index, prediction, offer, recycled, noise, cached_sample = (
            sources >> bit & 1 for bit in range(_NUM_SOURCE_FLAGS)
        )
        offer_says, recycled_says = (2.5, 2.0) if own or index else (6.0, 3.0)
        say = np.array([0.8 * own, 0.8 * index, 8.0 * prediction, 0.8, 0.5 * (levels >= 1), 0.3 * (levels >= 2)])
        others = [offer_says * offer, recycled_says * recycled, 1.5 * noise, 8.0 * cached_sample]
        say = np.concatenate([say, np.full(4, 0.3), others])
        weights[weights_number, :NUM_FEATURES] = say / say.sum()
    return weights
