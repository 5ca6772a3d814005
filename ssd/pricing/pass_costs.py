"""What passes take, learned as they come, and which drafted tokens pay: the kernels behind `PriceList`.

They take the address of a `PassCosts`, so that Python and the kernel that drafts for all rows of a batch share one.
"""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Float64, Int64, Int64s, Record, inlined, kernel, view_of
from ssd.pricing.rate import RateRecord, add_pass, joint_rate, price_at, recent_pass

Floats = npt.NDArray[np.float64]

NUM_FEATURES: Final = 3
"""Of a pass: that it is one (1), its positions, and whether it has several of a row (0 or 1)."""

_SINGULAR: Final = 1e-9
"""A feature of which less is left once the others are taken out says nothing of its own."""
_TIE: Final = 1e-12
_NO_TIME: Final = 1e-9


@inlined
def add_observation(moments: Floats, keep: float, features: tuple[float, float, float], seconds: float) -> None:
    """Count one observation, and those before it ``keep`` times what they counted.

    Its weight is 1 / seconds^2, so that relative errors count: long passes and interrupted ones do not dominate.
    ``moments`` : float64[3, 4], weighted sums of products of two features and, last, of a feature and the seconds.
    """
    weight = 1.0 / max(seconds, _NO_TIME) ** 2
    for i in range(NUM_FEATURES):
        for j in range(NUM_FEATURES):
            moments[i, j] = keep * moments[i, j] + weight * features[i] * features[j]
        moments[i, NUM_FEATURES] = keep * moments[i, NUM_FEATURES] + weight * features[i] * seconds


@kernel
def fit_nonnegative(moments: Floats) -> tuple[float, float, float]:
    """Coefficients >= 0 of the features with the least squared error.

    Exact: every choice of features is solved for, and of the solutions without a negative one the best is taken (Lawson
    & Hanson 1974, chapter 23, says why it is among them). Of features that cannot be told apart the first ones count.
    ``moments`` : as ``add_observation`` left them.
    """
    rows, solution = np.empty((NUM_FEATURES, NUM_FEATURES + 1)), np.empty(NUM_FEATURES)
    best = (0.0, 0.0, 0.0)
    most = 0.0
    for chosen in range(1, 1 << NUM_FEATURES):
        explained = _solve(moments, chosen, rows, solution)
        if explained > most * (1.0 + _TIE):
            most, best = explained, (solution[0], solution[1], solution[2])
    return best


@kernel
def _solve(moments: Floats, chosen: int, rows: Floats, solution: Floats) -> float:
    """Least squares in the features of the bits of ``chosen``: what it explains of the sum of squares; -1 for none."""
    num = len(solution)  # not the constant, for which LLVM unrolls every loop, and takes half a minute
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
"""A pass that takes so many times its estimate was probably interrupted. It is ignored unless the next are slow."""
_MIN_PASSES: Final = 8
_MIN_VARIANCE: Final = 0.05
"""Of the positions of passes: if they vary less, they do not tell what a position costs."""
_CALIBRATED_FORGETTING: Final = 0.8
_LEAST_WEIGHT: Final = 1e-6
"""The weight that passes timed at start-up keep: they still decide what later passes leave open."""
_CONTRADICTION: Final = 2.0
"""The ratio of a measured time to its estimate, in either direction, from which the estimate is considered wrong."""
_CONFIRMATIONS: Final = 3
"""Slow passes in a row that refute an estimate. One fast pass suffices, because no interruption makes a pass faster."""
LIKELY: Final = 0.5
"""The expected accepted tokens of each row from which a draft is worth a probe."""
_PROBE_WIDTH: Final = 16
PROBE_EVERY: Final = 64
"""The least number of passes from one probe to the next."""
_PROBE_SHARE: Final = 0.01
"""The largest share of the time that probes may cost."""


class PassCosts(Record):
    """The estimated seconds of a pass: ``fixed + per_position * positions``, and ``wide`` more if it verifies drafts.

    ``is_known`` : whether passes of different size have been measured. ``num_observed`` : how many have been.

    The estimate is fitted to passes of two kinds, without drafts and with drafts. ``recent`` : float64[2, 3, 4], the
    moments of least squares for each kind. A pass forgets only passes of its own kind, so a long time without drafts
    does not erase what passes with drafts cost. ``calibrated`` : the same for the passes timed at start-up. ``weight``
    : float64[2], theirs, which falls with every later pass of the kind. ``num_slow`` : int64[2], the number of last
    passes in a row that took over `_CONTRADICTION` times their estimate. ``least_slow`` : float64[2], the least of
    these ratios.

    A **probe** is a pass that verifies a likely draft although its estimated cost exceeds its gain, so that a wrong
    estimate is corrected. ``since_probe`` : passes since the last probe. ``probe_pause`` : passes from one probe to the
    next. ``probe_lost`` : the cost of the last probe, in recent passes. ``is_probing`` : whether a probe has been
    decided and not been measured yet. ``num_withheld`` : passes since likely drafts were first withheld; 0 if none are.
    """

    fixed: Float64
    per_position: Float64
    wide: Float64
    is_known: Int64
    num_observed: Int64
    recent: Annotated[Floats, np.float64, (2, NUM_FEATURES, NUM_FEATURES + 1)]
    calibrated: Annotated[Floats, np.float64, (2, NUM_FEATURES, NUM_FEATURES + 1)]
    weight: Annotated[Floats, np.float64, (2,)]
    num_slow: Annotated[Int64s, np.int64, (2,)]
    least_slow: Annotated[Floats, np.float64, (2,)]
    since_probe: Int64
    probe_pause: Int64
    probe_lost: Float64
    is_probing: Int64
    num_withheld: Int64
    rate: RateRecord


costs_at = view_of(PassCosts)


@inlined
def _seconds(costs: PassCosts, num_positions: int, is_wide: bool) -> float:
    return costs.fixed + costs.per_position * num_positions + costs.wide * is_wide


@inlined
def _features(num_positions: int, is_wide: bool) -> tuple[float, float, float]:
    return 1.0, float(num_positions), 1.0 if is_wide else 0.0


@inlined
def _fit(costs: PassCosts) -> None:
    """Fit the estimate to the recent passes and to those timed at start-up."""
    moments = np.zeros((NUM_FEATURES, NUM_FEATURES + 1))
    for kind in range(2):
        for i in range(NUM_FEATURES):
            for j in range(NUM_FEATURES + 1):
                moments[i, j] += costs.recent[kind, i, j] + costs.weight[kind] * costs.calibrated[kind, i, j]
    passes, positions, wide, seconds = moments[0, 0], moments[0, 1], moments[0, 2], moments[0, 3]
    if passes * moments[1, 1] - positions * positions >= _MIN_VARIANCE * passes * passes:
        costs.fixed, costs.per_position, costs.wide = fit_nonnegative(moments)
        costs.is_known = 1
    else:  # what a position costs stays what it is known to be, as far as that can be
        costs.per_position = min(costs.per_position, seconds / positions)
        costs.fixed = max(0.0, (seconds - costs.per_position * positions - costs.wide * wide) / passes)


@kernel
def calibrate_pass(address: int, num_positions: int, is_wide: bool, seconds: float) -> None:
    """Record a pass timed at start-up."""
    moments = costs_at(address).calibrated[1 if is_wide else 0]
    add_observation(moments, 1.0, _features(num_positions, is_wide), seconds)


@kernel
def begin_serving(address: int) -> None:
    """Start from the passes timed at start-up alone; the first likely draft that is withheld is probed at once."""
    costs = costs_at(address)
    costs.recent[:, :, :] = 0.0
    costs.weight[:] = 1.0
    costs.num_slow[:] = 0
    costs.since_probe = costs.probe_pause = PROBE_EVERY
    costs.is_probing = costs.num_withheld = 0
    costs.probe_lost = 0.0
    costs.rate.passes = costs.rate.tokens = costs.rate.seconds = 0.0
    if costs.calibrated[0, 0, 0] + costs.calibrated[1, 0, 0] > 0.0:
        _fit(costs)


@inlined
def _credible_seconds(costs: PassCosts, kind: int, seconds: float, expected: float) -> float:
    """Return the seconds to learn from; -1 for a pass that was probably interrupted.

    Forget the passes of its kind if it shows that their estimate is wrong: if it was fast, or the last of several slow
    ones, of which the fastest counts.
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
    costs.recent[kind, :, :] = 0.0
    costs.calibrated[kind, :, :] = 0.0
    return seconds


@inlined
def _end_probe(costs: PassCosts, num_tokens: int, seconds: float) -> None:
    """Set the pause after a probe so that probes cost about `_PROBE_SHARE` of the time at most.

    The cheaper of the last two probes counts, because one may have been interrupted.
    """
    tokens, time = recent_pass(costs.rate)
    lost = 0.0
    if tokens > 0.0 and time > 0.0:
        lost = seconds / time - num_tokens / tokens  # in recent passes; accepted tokens save some later
    costs.is_probing, costs.since_probe = 0, 0
    costs.probe_pause = max(PROBE_EVERY, int(min(lost, costs.probe_lost, 1e4) / _PROBE_SHARE))
    costs.probe_lost = lost


@kernel
def observe_pass(address: int, num_positions: int, is_wide: bool, num_tokens: int, seconds: float) -> None:
    """Learn from a pass that put out ``num_tokens``; ``is_wide`` says whether it verified drafts."""
    costs, kind = costs_at(address), 1 if is_wide else 0
    costs.since_probe += 1
    costs.num_withheld += costs.num_withheld > 0
    if is_wide and costs.is_probing == 1:
        _end_probe(costs, num_tokens, seconds)
    if costs.is_known:
        seconds = _credible_seconds(costs, kind, seconds, _seconds(costs, num_positions, is_wide))
        if seconds < 0.0:
            return
    add_pass(costs.rate, num_tokens, seconds)
    add_observation(costs.recent[kind], FORGETTING, _features(num_positions, is_wide), seconds)
    costs.weight[kind] = max(_LEAST_WEIGHT, _CALIBRATED_FORGETTING * costs.weight[kind])
    costs.num_observed += 1
    if costs.is_known or costs.num_observed >= _MIN_PASSES:
        _fit(costs)


@kernel
def pass_seconds(address: int, num_positions: int, is_wide: bool) -> float:
    """Expected seconds of a pass; 0 before enough were seen."""
    return _seconds(costs_at(address), num_positions, is_wide)


@kernel
def token_price(address: int, num_rows: int) -> float:
    """Return the cost of a draft token in output tokens; 0 while it is not known.

    At most `LIKELY` if a probe is due: above it drafters return nothing, and it is not seen what there is to probe.
    """
    costs = costs_at(address)
    price = price_at(costs.rate, num_rows, _seconds(costs, num_rows, False), costs.per_position)
    return min(price, LIKELY) if costs.since_probe >= costs.probe_pause else price


@kernel
def num_paying(address: int, num_rows: int, step: int, gains: Floats) -> int:
    """Return how many steps of drafting give most. Each step adds ``step`` positions to a pass of ``num_rows`` rows.

    ``gains`` : float64[n], the output tokens that the i-th step is expected to add. O(n).
    """
    costs = costs_at(address)
    recent = recent_pass(costs.rate)
    expected = float(num_rows)
    best, most = 0, joint_rate(recent, expected, _seconds(costs, num_rows, False))
    for i in range(len(gains)):
        expected += gains[i]
        together = joint_rate(recent, expected, _seconds(costs, num_rows + step * (i + 1), True))
        if together > most:
            best, most = i + 1, together
    return best


@kernel
def num_verified(address: int, num_rows: int, step: int, gains: Floats) -> int:
    """Return how many steps of drafting to verify: those of ``num_paying``, or more if a probe is due.

    A probe verifies up to `_PROBE_WIDTH` tokens of each row, or four times what pays: wrong costs of long drafts do
    not show in short ones. Calling it again before the pass is measured returns the same.
    """
    costs = costs_at(address)
    best = num_paying(address, num_rows, step, gains)
    is_due, left_out = costs.since_probe >= costs.probe_pause, 0.0
    for i in range(best, len(gains)):
        left_out += gains[i]
    is_withheld = left_out >= LIKELY * num_rows
    if best > 0 or (is_due and not is_withheld):
        costs.num_withheld = 0
    elif is_withheld and costs.num_withheld == 0:
        costs.num_withheld = 1
    if is_due and is_withheld:
        costs.is_probing = 1
        return min(len(gains), max(_PROBE_WIDTH * num_rows // step, 4 * best))
    return best


@kernel
def cut_rows(address: int, probabilities: Floats, sizes: Int64s, best_first: Floats) -> None:
    """Lower ``sizes`` to the beginnings of the drafts, chains and one a row, that together give most, without padding.

    The i-th token of a draft adds the chance that it and all before it are accepted. That never grows along a draft, so
    the best m tokens of all rows are beginnings, and m is found by trying all.

    ``probabilities`` : float64[rows, n], of row i the first ``sizes[i]``. ``best_first`` : scratch, as many float64 as
    there are drafted tokens. O(n log n) in these.
    """
    num_rows, count = len(sizes), 0
    if not costs_at(address).is_known:
        return
    for row in range(num_rows):
        chance = 1.0
        for i in range(sizes[row]):
            chance *= probabilities[row, i]
            best_first[count] = -chance
            count += 1
    gains = best_first[:count]
    gains.sort()
    gains *= -1.0
    kept = num_verified(address, num_rows, 1, gains)
    least = gains[kept - 1] if kept > 0 else 2.0
    for row in range(num_rows):
        chance, size = 1.0, 0
        while size < sizes[row]:
            chance *= probabilities[row, size]
            if chance < least:
                break
            size += 1
        sizes[row] = size
