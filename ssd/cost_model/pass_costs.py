"""Kernels that estimate the time of forward passes and choose the number of draft tokens to verify, for `CostModel`.

They take the address of a `PassCostRecord`, so that Python and the drafting kernel share one record.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.cost_model.throughput import ThroughputRecord, add_pass, combined_rate, cost_in_tokens, recent_pass
from ssd.jit.addresses import Float64, Int64, Int64s, Record, inlined, kernel, view_of

Floats = npt.NDArray[np.float64]

NUM_FEATURES: Final = 3
"""The number of regression features of a forward pass: a constant 1, its `effective_positions`, and whether it has
drafts.
"""
KNEES: Final = (0.0, 8.0, 16.0, 32.0, 64.0)
"""The knees that are tried, in positions, see `effective_positions`."""
_MIN_IMPROVEMENT: Final = 0.8
"""A knee other than 0 is used if its sum of squared errors is less than this multiple of that of knee 0.

With a knee that is too large, long drafts seem too costly, and then no pass shows that they are not. With knee 0 they
seem too cheap, and the next passes correct that.
"""
_CLOSE: Final = 1e-4
"""The mean squared relative error of a fit below which a smaller one is not considered better."""

_SINGULAR: Final = 1e-9
"""The smallest pivot, relative to the diagonal, with which the fit of pass times is solved.

Below it, the fitted features are linearly dependent.
"""
_TIE: Final = 1e-12
_NO_TIME: Final = 1e-9


@inlined
def add_observation(moments: Floats, keep: float, features: tuple[float, float, float], seconds: float) -> None:
    """Add the time of a forward pass to a least-squares problem, and multiply the weight of earlier passes by ``keep``.

    The new pass is weighted by 1 / seconds^2. Thus relative errors count, and long or interrupted passes do not
    dominate. ``moments`` (float64[4, 4]) holds the weighted sums of products of two features; in its last row and
    column, the seconds take the place of a feature.
    """
    weight = 1.0 / max(seconds, _NO_TIME) ** 2
    values = (features[0], features[1], features[2], seconds)
    for i in range(NUM_FEATURES + 1):
        for j in range(NUM_FEATURES + 1):
            moments[i, j] = keep * moments[i, j] + weight * values[i] * values[j]


@kernel
def fit_nonnegative(moments: Floats) -> tuple[float, float, float, float]:
    """Solve the least-squares fit of forward-pass times that ``add_observation`` collects, with all coefficients >= 0.

    Returns the three coefficients and the explained part of the sum of squares.

    The solution is exact: the problem is solved for every subset of the features, and the best solution without a
    negative coefficient is returned (Lawson & Hanson 1974, chapter 23). If features cannot be distinguished, the first
    ones are used.
    """
    rows, solution = np.empty((NUM_FEATURES, NUM_FEATURES + 1)), np.empty(NUM_FEATURES)
    best = (0.0, 0.0, 0.0, 0.0)
    for chosen in range(1, 1 << NUM_FEATURES):
        explained = _solve(moments, chosen, rows, solution)
        if explained > best[3] * (1.0 + _TIE):
            best = (solution[0], solution[1], solution[2], explained)
    return best


@kernel
def _solve(moments: Floats, chosen: int, rows: Floats, solution: Floats) -> float:
    """Solve the least-squares problem of ``add_observation`` for the features whose bits are set in ``chosen``.

    Writes the coefficients to ``solution``. Returns the explained part of the sum of squares, or -1 if a coefficient
    would be negative.
    """
    num = len(solution)  # not the constant, because LLVM would unroll every loop, which takes half a minute
    for i in range(num):
        for j in range(num + 1):
            rows[i, j] = moments[i, j]
    for i in range(num):  # Gauss-Jordan; the matrix is positive definite, so the diagonal holds the pivots
        if not chosen >> i & 1:
            continue
        if rows[i, i] <= _SINGULAR * moments[i, i]:
            return -1.0
        for other in range(num):
            if other != i and chosen >> other & 1:
                factor = rows[other, i] / rows[i, i]
                for j in range(num + 1):
                    rows[other, j] -= factor * rows[i, j]
    explained = 0.0
    for i in range(num):
        solution[i] = rows[i, num] / rows[i, i] if chosen >> i & 1 else 0.0
        if solution[i] < 0.0:
            return -1.0
        explained += solution[i] * moments[i, num]
    return explained


FORGETTING: Final = 0.98
OUTLIER: Final = 5.0
"""A forward pass that takes more than this multiple of its estimated time is ignored as probably interrupted.

If the next passes are slow as well, the estimate is replaced instead.
"""
_MIN_PASSES: Final = 8
_MIN_VARIANCE: Final = 0.05
"""The minimum weighted variance of the number of positions per measured forward pass.

Below it, the passes are too similar for fitting the time per position, and the time fitted before is kept.
"""
_CALIBRATED_FORGETTING: Final = 0.8
_LEAST_WEIGHT: Final = 1e-6
"""The minimum weight that the forward passes timed at start-up have in the least-squares fit of the time estimate.

Their weight falls with every later pass. The minimum is so small that these passes determine only coefficients about
which later passes say nothing.
"""
_SLOWDOWN_WEIGHT: Final = 1 / 8
"""The weight of the latest pass in ``PassCostRecord.slowdown``; the first passes have equal weights."""
_MAX_SPEED: Final = 1.25
"""The maximum ratio of estimated to measured time of a pass that ``PassCostRecord.slowdown`` takes into account."""
_CONTRADICTION: Final = 2.0
"""The factor by which a pass must be slower or faster than its estimated time for the estimate to be considered wrong.
"""
_CONFIRMATIONS: Final = 3
"""The number of consecutive slow forward passes after which a time estimate is considered wrong.

A single fast pass suffices, because no interruption makes a pass faster.
"""
MIN_PROBE_GAIN: Final = 0.5
"""The minimum expected accepted tokens per row for a probe.

A probe is a draft that is verified although its estimated cost exceeds its gain, to check the estimate.
"""
_PROBE_WIDTH: Final = 16
MIN_PROBE_PAUSE: Final = 64
"""The minimum number of forward passes between two probes: drafts verified only to check the cost estimate."""
_PROBE_SHARE: Final = 0.01
"""The maximum share of the time that may be spent on probes: drafts verified only to check the cost estimate."""
_PLAIN_PROBE_SHARE: Final = 0.005
"""The maximum share of output tokens that may be lost by plain probes: passes that verify no drafts, only to measure
their time.
"""


class PassCostRecord(Record):
    """The data from which the seconds of a forward pass are estimated, fitted to measured passes.

    The estimate is ``fixed + per_position * effective_positions(positions, knee)``, plus ``wide`` if the pass has
    drafts, times ``slowdown``; the knee is ``KNEES[knee_index]``. It is fitted to two kinds of passes, without drafts
    (kind 0) and with drafts (kind 1). Each new pass lowers the weight of older passes of the same kind, but not of the
    other kind.

    A shared machine is faster at some times than at others, mostly for all passes alike. ``slowdown`` follows this
    within about 8 passes of any kind. Without it, drafts would seem to cost nothing, or too much, if few passes of one
    kind were measured since the last change.

    A **probe** is a pass that verifies a promising draft although its estimated cost exceeds its gain, so that a wrong
    estimate is corrected. A **plain probe** is a pass that verifies no drafts although their estimated gain exceeds
    their cost.

    Attributes:
        slowdown: The recent ratio of the time of passes to the fitted time.
        recent: The least-squares moments of recent passes of each kind, for each of KNEES, see ``add_observation``. The
            seconds are divided by ``slowdown``.
        calibrated: The least-squares moments of the passes timed at start-up.
        weight: The weight of ``calibrated``, which falls with every later pass of the same kind.
        num_slow: The number of consecutive latest passes that took over _CONTRADICTION times their estimate.
        least_slow: The least ratio of time to estimate among the ``num_slow`` latest passes.
        since_probe: The number of passes since the last probe.
        probe_pause: The number of passes from one probe to the next.
        probe_cost: The cost of the last probe, as a multiple of the time of an average recent pass.
        is_probing: Whether a probe has been decided and not been measured yet.
        since_plain: The number of passes since the last one without drafts.
        num_withheld: The number of passes since promising drafts began to be withheld; 0 if no draft is withheld.
    """

    fixed: Float64
    per_position: Float64
    wide: Float64
    slowdown: Float64
    knee_index: Int64
    is_known: Int64
    num_observed: Int64
    recent: Annotated[Floats, np.float64, (2, len(KNEES), NUM_FEATURES + 1, NUM_FEATURES + 1)]
    calibrated: Annotated[Floats, np.float64, (2, len(KNEES), NUM_FEATURES + 1, NUM_FEATURES + 1)]
    weight: Annotated[Floats, np.float64, (2,)]
    num_slow: Annotated[Int64s, np.int64, (2,)]
    least_slow: Annotated[Floats, np.float64, (2,)]
    since_probe: Int64
    probe_pause: Int64
    probe_cost: Float64
    is_probing: Int64
    since_plain: Int64
    num_withheld: Int64
    rate: ThroughputRecord


costs_at = view_of(PassCostRecord)


@inlined
def effective_positions(num_positions: float, knee: float) -> float:
    """Return the number of positions of a forward pass, reduced by the part that takes no additional time.

    A pass reads all weights from memory and computes meanwhile. For few positions, computing takes less time than
    reading, so a further position adds little time. Far beyond ``knee`` positions, each adds the same time. The result
    is the hyperbola ``sqrt(n^2 + knee^2) - knee``; with a knee of 0 it is ``num_positions``.
    """
    return math.sqrt(num_positions * num_positions + knee * knee) - knee


@inlined
def _seconds(costs: PassCostRecord, num_positions: int, is_wide: bool) -> float:
    effective = effective_positions(num_positions, KNEES[costs.knee_index])
    return (costs.fixed + costs.per_position * effective + costs.wide * is_wide) * costs.slowdown


@inlined
def _add_pass(moments: Floats, keep: float, num_positions: int, is_wide: bool, seconds: float) -> None:
    """Add the time of a forward pass to the moments for each of KNEES, float64[knees, 4, 4]."""
    for i in range(len(KNEES)):
        features = 1.0, effective_positions(num_positions, KNEES[i]), 1.0 if is_wide else 0.0
        add_observation(moments[i], keep, features, seconds)


@kernel
def _fit(costs: PassCostRecord) -> None:
    """Fit the estimate, with the best of KNEES, to the recent passes and to those timed at start-up."""
    moments = costs.recent[0] + costs.weight[0] * costs.calibrated[0]
    moments += costs.recent[1] + costs.weight[1] * costs.calibrated[1]
    passes, positions = moments[0, 0, 0], moments[0, 0, 1]
    if passes * moments[0, 1, 1] - positions * positions >= _MIN_VARIANCE * passes * passes:
        best, least = (0.0, 0.0, 0.0, 0.0), math.inf
        everything = moments[0, NUM_FEATURES, NUM_FEATURES]
        for i in range(len(KNEES)):
            found = fit_nonnegative(moments[i])
            error = max(everything - found[3], _CLOSE * everything)
            if KNEES[i] == 0.0:
                error *= _MIN_IMPROVEMENT
            if error < least:
                best, least, costs.knee_index = found, error, i
        costs.fixed, costs.per_position, costs.wide = best[0], best[1], best[2]
        costs.is_known = 1
    else:  # keep the time of a position, as far as it agrees with the passes
        sums = moments[costs.knee_index, 0]
        effective, wide, seconds = sums[1], sums[2], sums[NUM_FEATURES]
        costs.per_position = min(costs.per_position, seconds / effective)
        costs.fixed = max(0.0, (seconds - costs.per_position * effective - costs.wide * wide) / passes)


@kernel
def calibrate_pass(address: int, num_positions: int, is_wide: bool, seconds: float) -> None:
    """Record the time of a forward pass that was measured at start-up."""
    _add_pass(costs_at(address).calibrated[1 if is_wide else 0], 1.0, num_positions, is_wide, seconds)


@kernel
def start_serving(address: int) -> None:
    """Discard the times of all forward passes except those measured at start-up, because serving begins now.

    The first draft that the cost estimate would withhold is verified nevertheless, to check the estimate.
    """
    costs = costs_at(address)
    costs.recent[:] = 0.0
    costs.weight[:] = costs.slowdown = 1.0
    costs.num_slow[:] = 0
    costs.since_probe = costs.probe_pause = MIN_PROBE_PAUSE
    costs.is_probing = costs.since_plain = costs.num_withheld = costs.num_observed = 0
    costs.probe_cost = 0.0
    costs.rate.passes = costs.rate.tokens = costs.rate.seconds = 0.0
    if costs.calibrated[0, 0, 0, 0] + costs.calibrated[1, 0, 0, 0] > 0.0:
        _fit(costs)


@inlined
def _credible_seconds(costs: PassCostRecord, kind: int, seconds: float, expected: float) -> float:
    """Return the time that the fit should use for a forward pass that took ``seconds``; -1 to ignore the pass.

    A pass that takes more than OUTLIER times the ``expected`` time was probably interrupted, and is ignored. After
    _CONFIRMATIONS passes in a row of more than _CONTRADICTION times the ``expected`` time, or one pass of less than
    1 / _CONTRADICTION of it, the estimate is considered wrong: all earlier times of this kind of pass are discarded.
    After slow passes, the returned time is ``expected`` times the smallest ratio of a slow pass's time to its estimate.
    """
    if seconds > _CONTRADICTION * expected:
        ratio = seconds / max(expected, _NO_TIME)
        costs.least_slow[kind] = min(ratio, costs.least_slow[kind]) if costs.num_slow[kind] > 0 else ratio
        costs.num_slow[kind] += 1
        if costs.num_slow[kind] < _CONFIRMATIONS:
            return -1.0 if seconds > OUTLIER * expected else seconds
        seconds = costs.least_slow[kind] * expected
    elif expected <= _CONTRADICTION * seconds:
        costs.num_slow[kind] = 0
        return seconds
    costs.num_slow[kind] = 0
    costs.recent[kind] = 0.0
    costs.calibrated[kind] = 0.0
    return seconds


@inlined
def _end_probe(costs: PassCostRecord, num_tokens: int, seconds: float) -> None:
    """Set the pause until the next probe, i.e. the next draft that is verified only to check the cost estimate.

    Probes take at most about _PROBE_SHARE of the time. The pause is computed from the cheaper of the last two probes,
    because one may have been interrupted.
    """
    tokens, time = recent_pass(costs.rate)
    lost = 0.0
    if tokens > 0.0 and time > 0.0:
        lost = seconds / time - num_tokens / tokens  # in recent passes; accepted tokens save time later
    costs.is_probing, costs.since_probe = 0, 0
    costs.probe_pause = max(MIN_PROBE_PAUSE, int(min(lost, costs.probe_cost, 1e4) / _PROBE_SHARE))
    costs.probe_cost = lost


@kernel
def observe_pass(address: int, num_positions: int, is_wide: bool, num_tokens: int, seconds: float) -> None:
    """Update the time estimate of forward passes from a pass that took ``seconds`` for ``num_tokens`` output tokens.

    ``is_wide`` is whether the pass verified drafts.
    """
    costs, kind = costs_at(address), 1 if is_wide else 0
    costs.since_probe += 1
    costs.since_plain = costs.since_plain + 1 if is_wide else 0
    costs.num_withheld += costs.num_withheld > 0
    if is_wide and costs.is_probing == 1:
        _end_probe(costs, num_tokens, seconds)
    expected = _seconds(costs, num_positions, is_wide)
    if costs.is_known:
        seconds = _credible_seconds(costs, kind, seconds, expected)
        if seconds < 0.0:
            return
    add_pass(costs.rate, num_tokens, seconds)
    if expected > _NO_TIME:
        speed = min(expected / max(seconds, _NO_TIME), _MAX_SPEED)
        # The last factor has the mean 0 over the passes of a fit, whose errors are weighted by 1 / seconds^2.
        costs.slowdown *= 1.0 + max(_SLOWDOWN_WEIGHT, 1.0 / (costs.num_observed + 1)) * speed * (1.0 - speed)
    _add_pass(costs.recent[kind], FORGETTING, num_positions, is_wide, seconds / costs.slowdown)
    costs.weight[kind] = max(_LEAST_WEIGHT, _CALIBRATED_FORGETTING * costs.weight[kind])
    costs.num_observed += 1
    if costs.is_known or costs.num_observed >= _MIN_PASSES:
        _fit(costs)


@kernel
def pass_seconds(address: int, num_positions: int, is_wide: bool) -> float:
    """Return the estimated seconds of a forward pass; 0 until enough passes have been measured."""
    return _seconds(costs_at(address), num_positions, is_wide)


@kernel
def draft_token_cost(address: int, num_rows: int) -> float:
    """Return the cost of each draft token if each row verifies one, in output tokens; 0 if it is unknown.

    If it is time for a probe, i.e. a draft that is verified only to check the cost estimate, the result is at most
    MIN_PROBE_GAIN, because drafters would otherwise draft nothing.
    """
    costs = costs_at(address)
    without, more = _seconds(costs, num_rows, False), max(1, num_rows)
    cost = cost_in_tokens(costs.rate, num_rows, without, (_seconds(costs, num_rows + more, False) - without) / more)
    return min(cost, MIN_PROBE_GAIN) if costs.since_probe >= costs.probe_pause else cost


@kernel
def best_num_steps(recent: tuple[float, float], num_rows: float, gains: Floats, seconds: Floats) -> int:
    """Return by how many steps to lengthen the drafts of a pass for the greatest expected throughput. O(n).

    A step is a unit of draft length: one draft token in the whole pass or, in a padded pass, one for each row.

    Args:
        recent: The output tokens and the seconds of an average recent pass, see `combined_rate`.
        num_rows: The number of rows of the forward pass, each of which gets one token without drafts.
        gains: The expected number of accepted draft tokens that each step adds, float64[n].
        seconds: The time of a pass with 0, 1, 2, ... steps, float64[n + 1].
    """
    expected, best, most = num_rows, 0, combined_rate(recent, num_rows, seconds[0])
    for i in range(len(gains)):
        expected += gains[i]
        together = combined_rate(recent, expected, seconds[i + 1])
        if together > most:
            best, most = i + 1, together
    return best


@kernel
def num_steps_to_verify(address: int, num_rows: int, step: int, gains: Floats) -> int:
    """Return the draft length to verify: the one with the greatest expected throughput, or another one as a probe.

    A probe checks the cost estimate. It verifies up to _PROBE_WIDTH tokens of each row, or four times the best length,
    because short drafts do not show that the estimated cost of long ones is wrong. After many passes with drafts, a
    plain probe has length 0. Further calls before the next measured pass return the same length.

    Args:
        address: The address of the `PassCostRecord`.
        num_rows: The number of rows of the forward pass.
        step: The number of positions that one more unit of draft length adds to the pass: 1, or ``num_rows`` if the
            pass is padded.
        gains: The expected number of accepted draft tokens that each unit adds, float64[n].
    """
    costs, seconds = costs_at(address), np.empty(len(gains) + 1)
    for i in range(len(seconds)):
        seconds[i] = _seconds(costs, num_rows + step * i, i > 0)
    recent = recent_pass(costs.rate)
    best = best_num_steps(recent, float(num_rows), gains, seconds)
    if best > 0 and costs.is_probing == 0 and costs.since_plain >= MIN_PROBE_PAUSE:
        with_drafts = combined_rate(recent, num_rows + gains[:best].sum(), seconds[best])
        gain = with_drafts / combined_rate(recent, float(num_rows), seconds[0]) - 1.0
        if costs.since_plain * _PLAIN_PROBE_SHARE >= gain:
            return 0
    is_due, left_out = costs.since_probe >= costs.probe_pause, 0.0
    for i in range(best, len(gains)):
        left_out += gains[i]
    is_withheld = left_out >= MIN_PROBE_GAIN * num_rows
    if best > 0 or (is_due and not is_withheld):
        costs.num_withheld = 0
    elif is_withheld and costs.num_withheld == 0:
        costs.num_withheld = 1
    if is_due and is_withheld:
        costs.is_probing = 1
        return min(len(gains), max(_PROBE_WIDTH * num_rows // step, 4 * best))
    return best
