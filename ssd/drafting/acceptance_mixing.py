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
from typing import Final

import numpy as np

from ssd.drafting.acceptance_features import (
    BEFORE,
    CACHED_SAMPLE,
    CONTEXT,
    DEPTH_BUCKETS,
    ENTRIES,
    FEATURES,
    INDEX,
    KNOTS,
    KNOTS_PER_UNIT,
    LENGTHS,
    LEVEL_FEATURES,
    MODEL_FLOATS,
    NOISE,
    NUM_FEATURES,
    NUM_SOURCE_FLAGS,
    NUM_WEIGHT_SETS,
    PAIR,
    PREDICTION,
    PROPOSAL,
    RECYCLED,
    REQUEST,
    TOKEN,
    AcceptanceTables,
)
from ssd.drafting.sample_cache import MAX_CONFIRMED
from ssd.drafting.token_recycling import TOP_K, TYPICAL_SHARE
from ssd.jit.addresses import Float64s, Int64s, inlined, kernel

_MIXER_RATE: Final = 0.01
_CONSTANT_RATE: Final = 0.003
_KNOT_RATE: Final = 0.02

_MIN_RATE: Final = 0.01
"""The minimum learning rate of a table entry in the acceptance model.

At this rate an entry averages about the last hundred outcomes, so its probability follows changes of the traffic.
"""

_PRIOR_COUNT: Final = 2.0
_MAX_COUNT: Final = 1.0 / _MIN_RATE  # greater counts would not change the learning rate
_MIN_PROBABILITY: Final = 1e-4

_MAX_WEIGHT: Final = 4.0
"""The maximum weight of a feature in the acceptance model: four times the greatest weight learned in replays."""

# The values that the buckets stand for.
_TYPICAL_LENGTH: Final = np.array([0.5, 1, 2, 3, 4, 5.5, 7.5, 10, 14, 20, 28, 40, 64])
_TYPICAL_SUPPORT: Final = np.array([1, 2, 3, 5, 10, 40.0])
_TYPICAL_SHARE: Final = np.array([0.02, 0.1, 0.25, 0.42, 0.5, 0.6, 0.75, 0.92, 1.0])
_TYPICAL_COARSE_LENGTH: Final = np.array([1.5, 4.0, 8.0, 24.0])
_TYPICAL_COARSE_SHARE: Final = np.array([0.2, 0.6, 1.0])
_TYPICAL_PROPOSED: Final = np.array([0.015, 0.06, 0.15, 0.27, 0.45, 0.65, 0.85, 0.97])
_TYPICAL_NOISE: Final = np.array([-1.3, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 3.0])
_TYPICAL_RUN: Final = np.array([0.0, 0.8, 1.5, 2.2, 3.0, 3.8])
_TYPICAL_VERDICT: Final = np.array([0.1, 0.03, 0.04, 0.15, 0.25, 0.4, 0.6])


@inlined
def _mix_log_odds(model: AcceptanceTables, inputs: Int64s, weights_number: int) -> float:
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
    knot, part = _curve_position(_mix_log_odds(model, inputs, weights_number))
    knots = model.knots[weights_number % DEPTH_BUCKETS]
    return float((1.0 - part) * knots[knot] + part * knots[knot + 1])


@inlined
def _bounded_weight(weight: float) -> float:
    return min(max(weight, -_MAX_WEIGHT), _MAX_WEIGHT)


@kernel
def learn_outcome(model: AcceptanceTables, inputs: Int64s, weights_number: int, label: float) -> float:
    """Update the acceptance model from the outcome of a candidate token; ``label`` is 1.0 if it was accepted, else 0.0.

    The weight vector makes a gradient step on the log loss, and the correction curve makes one on the squared error.
    Each feature's table entry moves towards ``label`` by the fraction max(1 / count, _MIN_RATE). All numbers stay
    within the bounds of `clip_to_learnable`. ``inputs`` and ``weights_number`` are those of `acceptance_probability`.

    Returns:
        ``label`` minus the estimated probability before the correction curve was applied.
    """
    log_odds = _mix_log_odds(model, inputs, weights_number)
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


def clip_to_learnable(
    probabilities: Float64s, counts: Float64s, weights: Float64s, knots: Float64s
) -> tuple[Float64s, ...]:
    """Clip the parameters of a restored acceptance model to the ranges that its update rule can produce."""
    return (
        np.clip(probabilities, _MIN_PROBABILITY, 1.0 - _MIN_PROBABILITY),
        np.clip(counts, _PRIOR_COUNT, _MAX_COUNT),
        np.clip(weights, -_MAX_WEIGHT, _MAX_WEIGHT),
        np.clip(knots, _MIN_PROBABILITY, 1.0 - _MIN_PROBABILITY),
    )


def prior_model() -> Float64s:
    """Return the parameters of an acceptance model that has learned nothing, float64[MODEL_FLOATS]."""
    buffer = np.zeros(MODEL_FLOATS)
    log_odds = np.concatenate(
        [np.broadcast_to(_prior(feature), shape).ravel() for feature, shape in enumerate(FEATURES.values())]
    )
    log_odds = np.clip(log_odds, *np.log([_MIN_PROBABILITY, 1 / _MIN_PROBABILITY]))
    buffer[:ENTRIES] = 1.0 / (1.0 + np.exp(-log_odds))
    buffer[ENTRIES : 2 * ENTRIES] = _PRIOR_COUNT
    buffer[2 * ENTRIES : 3 * ENTRIES] = log_odds
    at_knots = (np.arange(KNOTS) - (KNOTS - 1) // 2) / KNOTS_PER_UNIT
    curves = np.tile(1.0 / (1.0 + np.exp(-at_knots)), DEPTH_BUCKETS)
    buffer[3 * ENTRIES : -1] = np.concatenate([_prior_weights().ravel(), curves])
    return buffer


def _expected(length: Float64s, support: Float64s | float, share: Float64s) -> Float64s:
    """Return the initial log odds that a candidate token is accepted.

    They grow with the match length, with the number of matches, and with the share of the matches that continue with
    the token.
    """
    votes = np.maximum(share * support, 0.05)
    return (
        -1.3
        + 0.85 * np.log(1 + length)
        + 0.1 * np.log(1 + support)
        + 0.45 * np.log((votes + 0.5) / (support - votes + 0.5))
    )


def _prior(feature: int) -> Float64s:
    length: Float64s
    support: Float64s
    share: Float64s
    length, support, share = np.ix_(_TYPICAL_LENGTH, _TYPICAL_SUPPORT, _TYPICAL_SHARE)
    newest = np.array([-0.2, 0.2])
    if feature in (CONTEXT, INDEX):
        by_vote: Float64s = _expected(length, support, share)[..., None] + newest
        return by_vote[..., None]
    if feature == PREDICTION:
        agrees: Float64s = np.log(1 + _TYPICAL_LENGTH)[:, None] * [0.9, 0.5] + [0.3, 2.0]
        both: Float64s = np.stack([np.full((LENGTHS, 2), -1.5), agrees], axis=-1)
        return both
    if feature == REQUEST:
        return _expected(_TYPICAL_LENGTH[:, None], 3.0, _TYPICAL_SHARE)
    if feature in (TOKEN, BEFORE, PAIR):
        return _expected(_TYPICAL_COARSE_LENGTH[:, None], 3.0, _TYPICAL_COARSE_SHARE)
    if feature == PROPOSAL:
        log_odds: Float64s = np.stack([_other_token(_TYPICAL_PROPOSED), _log_odds(_TYPICAL_PROPOSED)])
        return log_odds[:, :, None]
    if feature == RECYCLED:
        known = np.array([0.6, 0.85])[:, None, None]
        ranked = known * 0.9 ** np.arange(TOP_K)[:, None] * TYPICAL_SHARE
        absent = _other_token((known * TYPICAL_SHARE)[:, :, :])
        temperature_bucket = np.array([0.0, -0.2, -0.5])[:, None, None, None]
        by_rank: Float64s = np.concatenate([_log_odds(ranked), absent], axis=1) + temperature_bucket
        return by_rank
    if feature == NOISE:
        places = _expected(_TYPICAL_COARSE_LENGTH[:, None], 3.0, _TYPICAL_COARSE_SHARE)
        log_odds = _log_odds(_TYPICAL_VERDICT)[:, None, None, None]
        return log_odds + 0.5 * places + 0.5 * _TYPICAL_NOISE[:, None, None]
    if feature == CACHED_SAMPLE:
        weights_number = np.arange(MAX_CONFIRMED + 1)[:, None, None] * 0.4 + _TYPICAL_RUN[:, None] + [0.0, -0.7, 0.5]
        either: Float64s = np.stack([-1.0 - weights_number, weights_number], axis=-1)
        return either[:, :, :, None, :]
    return _expected(length, support, share)


def _log_odds(probability: Float64s) -> Float64s:
    result: Float64s = np.log(probability / (1.0 - probability))
    return result


def _other_token(probability: Float64s) -> Float64s:
    return _log_odds(0.4 * (1.0 - probability))


def _prior_weights() -> Float64s:
    """Return the initial feature weights of an acceptance model.

    The weights of the features that are present add up to one. Features of text matches weigh less than the client's
    prediction. Other drafters' proposals and recycled tokens weigh less if there are text matches.
    """
    weights = np.zeros((NUM_WEIGHT_SETS, NUM_FEATURES + 1))
    for weights_number in range(NUM_WEIGHT_SETS):
        sources, levels = divmod(weights_number // DEPTH_BUCKETS, LEVEL_FEATURES)
        context, index, prediction, proposal, recycled, noise, cached_sample = (
            sources >> bit & 1 for bit in range(NUM_SOURCE_FLAGS)
        )
        proposal_weight, recycled_weight = (2.5, 2.0) if context or index else (6.0, 3.0)
        parts = np.array([0.8 * context, 0.8 * index, 8.0 * prediction, 0.8, 0.5 * (levels >= 1), 0.3 * (levels >= 2)])
        others = [proposal_weight * proposal, recycled_weight * recycled, 1.5 * noise, 8.0 * cached_sample]
        parts = np.concatenate([parts, np.full(4, 0.3), others])
        weights[weights_number, :NUM_FEATURES] = parts / parts.sum()
    return weights
