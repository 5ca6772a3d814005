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


@inlined
def add_observation(moments: Floats, keep: float, features: tuple[float, float, float], seconds: float) -> None:
    """Count one observation, and those before it ``keep`` times what they counted.

    ``moments`` : float64[3, 4], sums of products of two features and, last, of a feature and the seconds.
    """
    for i in range(NUM_FEATURES):
        for j in range(NUM_FEATURES):
            moments[i, j] = keep * moments[i, j] + features[i] * features[j]
        moments[i, NUM_FEATURES] = keep * moments[i, NUM_FEATURES] + features[i] * seconds


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
"""A pass that takes so many times what it should was interrupted, and says nothing about its size."""
_MIN_PASSES: Final = 8.0
_MIN_VARIANCE: Final = 0.05
"""Of the positions of passes: where they vary less, they do not tell what a position costs."""
_LASTING_SHARE: Final = 0.05


class PassCosts(Record):
    """Seconds of a pass: ``fixed + per_position * positions``, and ``wide`` more with several positions of a row.

    ``is_known`` : whether passes of different size have been seen. ``recent``, ``lasting`` : float64[3, 4], what least
    squares needs of passes: those of late, and those of the warm-up, kept for the sizes not seen lately.
    """

    fixed: Float64
    per_position: Float64
    wide: Float64
    is_known: Int64
    recent: Annotated[Floats, np.float64, (NUM_FEATURES, NUM_FEATURES + 1)]
    lasting: Annotated[Floats, np.float64, (NUM_FEATURES, NUM_FEATURES + 1)]
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
    """Least squares over recent passes and, with little weight, those of the warm-up."""
    moments = np.empty((NUM_FEATURES, NUM_FEATURES + 1))
    for i in range(NUM_FEATURES):
        for j in range(NUM_FEATURES + 1):
            moments[i, j] = costs.recent[i, j] + _LASTING_SHARE * costs.lasting[i, j]
    passes, positions, wide, seconds = moments[0, 0], moments[0, 1], moments[0, 2], moments[0, 3]
    if passes * moments[1, 1] - positions * positions >= _MIN_VARIANCE * passes * passes:
        costs.fixed, costs.per_position, costs.wide = fit_nonnegative(moments)
        costs.is_known = 1
    else:  # what a position costs stays what it is known to be, as far as that can be
        costs.per_position = min(costs.per_position, seconds / positions)
        costs.fixed = max(0.0, (seconds - costs.per_position * positions - costs.wide * wide) / passes)


@kernel
def calibrate_pass(address: int, num_positions: int, is_wide: bool, seconds: float) -> None:
    """Count a pass of the warm-up."""
    add_observation(costs_at(address).lasting, 1.0, _features(num_positions, is_wide), seconds)


@kernel
def begin_serving(address: int) -> None:
    """Learn from the warm-up's timed passes alone: what others took and put out says nothing about requests to come."""
    costs = costs_at(address)
    costs.recent[:, :] = 0.0
    costs.rate.passes = costs.rate.tokens = costs.rate.seconds = 0.0
    if costs.lasting[0, 0] > 0.0:
        _fit(costs)


@kernel
def observe_pass(address: int, num_positions: int, is_wide: bool, num_tokens: int, seconds: float) -> None:
    """Learn from a pass that put out ``num_tokens``."""
    costs = costs_at(address)
    if costs.is_known and seconds > OUTLIER * _seconds(costs, num_positions, is_wide):
        return
    add_pass(costs.rate, num_tokens, seconds)
    add_observation(costs.recent, FORGETTING, _features(num_positions, is_wide), seconds)
    if costs.recent[0, 0] >= _MIN_PASSES:
        _fit(costs)


@kernel
def pass_seconds(address: int, num_positions: int, is_wide: bool) -> float:
    """Expected seconds of a pass; 0 before enough were seen."""
    return _seconds(costs_at(address), num_positions, is_wide)


@kernel
def token_price(address: int, num_rows: int) -> float:
    """What a drafted token costs in output tokens; 0 while that is not known."""
    costs = costs_at(address)
    return price_at(costs.rate, num_rows, _seconds(costs, num_rows, False), costs.per_position)


@kernel
def num_paying(address: int, num_rows: int, step: int, gains: Floats) -> int:
    """How many steps of drafting give most, each of which adds ``step`` positions to a pass of ``num_rows`` rows.

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
    kept = num_paying(address, num_rows, 1, gains)
    least = gains[kept - 1] if kept > 0 else 2.0
    for row in range(num_rows):
        chance, size = 1.0, 0
        while size < sizes[row]:
            chance *= probabilities[row, size]
            if chance < least:
                break
            size += 1
        sizes[row] = size
