"""The one fit behind learned times: against numpy, on any passes, and on laws that are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.compiled.addresses import kernel
from ssd.pricing.pass_costs import add_observation, fit_nonnegative
from tests.reference import pricing as slow

Floats = npt.NDArray[np.float64]


@kernel
def fitted(features: Floats, seconds: Floats, keep: float) -> tuple[float, float, float]:
    moments = np.zeros((3, 4))
    for i in range(len(features)):
        add_observation(moments, keep, (features[i, 0], features[i, 1], features[i, 2]), seconds[i])
    return fit_nonnegative(moments)


def features_of(passes: list[tuple[int, int]]) -> Floats:
    return np.array([[1.0, rows * width, width > 1] for rows, width in passes], np.float64)


sizes = st.tuples(st.integers(1, 16), st.integers(1, 9))


@given(st.lists(st.tuples(sizes, st.floats(1e-3, 1.0)), min_size=1, max_size=40), st.sampled_from([1.0, 0.98, 0.9]))
def test_no_other_line_without_negative_parts_is_closer(
    passes: list[tuple[tuple[int, int], float]], keep: float
) -> None:
    features, seconds = features_of([size for size, _ in passes]), np.array([took for _, took in passes])
    weights = slow.fading(len(passes), keep)
    got = fitted(features, seconds, keep)
    want = slow.fit_nonnegative(features, seconds, weights)
    assert min(got) >= 0.0
    least = slow.squared_error(want, features, seconds, weights)
    assert slow.squared_error(got, features, seconds, weights) == pytest.approx(least, rel=1e-6, abs=1e-9)


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(0, 0.05), st.integers(0, 2**32), st.floats(0.0, 0.05))
def test_a_law_is_found_in_noisy_passes(
    fixed: float, per_position: float, wide: float, seed: int, noise: float
) -> None:
    random = np.random.default_rng(seed)
    features = features_of([(int(rows), int(width)) for rows, width in random.integers(1, 9, (400, 2))])
    exact = features @ (fixed, per_position, wide)
    error = noise * float(exact.mean())
    got = fitted(features, exact + random.normal(0.0, error, len(exact)), 1.0)
    assert features @ np.array(got) == pytest.approx(exact, rel=1e-6, abs=error)


def test_features_that_cannot_be_told_apart_count_as_the_first() -> None:
    features = features_of([(1, 1), (1, 2)] * 4)  # the second position and the step to it
    assert fitted(features, features @ (0.01, 0.002, 0.0), 1.0) == pytest.approx((0.01, 0.002, 0.0))
    assert fitted(np.ones((4, 3)), np.full(4, 0.5), 1.0) == pytest.approx((0.5, 0.0, 0.0))
    assert fitted(np.zeros((4, 3)), np.full(4, 0.5), 1.0) == (0.0, 0.0, 0.0)
