"""Least squares with no coefficient below 0: the one fit behind every time that is learned here."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import inlined, kernel

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


@inlined
def _solve(moments: Floats, chosen: int, rows: Floats, solution: Floats) -> float:
    """Least squares in the features of the bits of ``chosen``: what it explains of the sum of squares; -1 for none."""
    rows[:] = moments
    for i in range(NUM_FEATURES):  # Gauss-Jordan; the matrix is positive definite, so the diagonal holds the pivots
        if not chosen >> i & 1:
            continue
        if rows[i, i] <= _SINGULAR * moments[i, i]:
            return -1.0
        for other in range(NUM_FEATURES):
            if other != i and chosen >> other & 1:
                factor = rows[other, i] / rows[i, i]
                for j in range(NUM_FEATURES + 1):
                    rows[other, j] -= factor * rows[i, j]
    explained = 0.0
    for i in range(NUM_FEATURES):
        solution[i] = rows[i, NUM_FEATURES] / rows[i, i] if chosen >> i & 1 else 0.0
        if solution[i] < 0.0:
            return -1.0
        explained += solution[i] * moments[i, NUM_FEATURES]
    return explained
