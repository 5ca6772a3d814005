"""Pricing drafts: never a token, only how many are tried."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.protocol import Draft
from ssd.engine.verify_cost import VerifyCost


def learned(fixed: float, per_position: float, wide: float = 0.0) -> VerifyCost:
    cost = VerifyCost()
    for rows, width, _ in itertools.product((1, 8), (1, 2, 17), range(4)):
        cost.calibrate(rows, width, fixed + per_position * rows * width + wide * (width > 1))
    return cost


def draft(*probabilities: float) -> Draft:
    return Draft(np.arange(len(probabilities), dtype=np.int32), 1, "own", np.array(probabilities))


@given(
    st.floats(1e-3, 1.0),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 17)), max_size=80),
)
def test_the_time_of_a_pass_is_learned(
    fixed: float, per_position: float, wide: float, passes: list[tuple[int, int]]
) -> None:
    cost = learned(fixed, per_position, wide)
    for rows, width in passes:
        cost.observe(rows, width, fixed + per_position * rows * width + wide * (width > 1))
    assert cost.pass_time == pytest.approx((fixed, per_position, wide), rel=1e-3, abs=1e-4)


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=8), min_size=1, max_size=5),
    st.floats(1e-2, 1.0),
    st.floats(1e-4, 0.1),
    st.floats(1e-4, 0.3),
)
def test_the_width_maximises_expected_tokens_per_second(
    rows: list[list[float]], fixed: float, per_position: float, wide: float
) -> None:
    drafts = [draft(*row) for row in rows]
    rates = []
    for width in range(max(map(len, rows)) + 1):
        expected = 0.0
        for row in rows:
            chance, expected = 1.0, expected + 1.0
            for probability in row[:width]:
                chance *= probability
                expected += chance
        rates.append(expected / (fixed + per_position * len(rows) * (width + 1) + wide * (width > 0)))
    chosen = learned(fixed, per_position, wide).paying_width(drafts)
    assert rates[chosen] == pytest.approx(max(rates), rel=1e-2)


def test_nothing_is_cut_while_nothing_is_known() -> None:
    assert VerifyCost().paying_width([draft(0.1, 0.1)]) == 2
    assert VerifyCost().paying_width([]) == 0


def test_drafts_without_estimates_are_kept_whole() -> None:
    assert learned(0.001, 1.0).paying_width([Draft(np.arange(5, dtype=np.int32))]) == 5


def test_a_flat_cost_keeps_every_token_and_a_steep_one_none() -> None:
    assert learned(1.0, 0.0).paying_width([draft(0.2, 0.2, 0.2)]) == 3
    assert learned(1e-6, 1.0).paying_width([draft(0.6, 0.6), draft()]) == 0


@given(st.floats(1e-3, 1.0), st.floats(1e-4, 0.1), st.floats(0, 0.3), st.integers(1, 8), st.integers(1, 5))
def test_a_price_is_what_a_position_takes_in_tokens_of_that_time(
    fixed: float, per_position: float, wide: float, rows: int, limit: int
) -> None:
    cost = learned(fixed, per_position, wide)
    assert cost.prices(rows, limit) is None
    for _ in range(5):
        cost.observe_output(6, 0.5)
    prices = cost.prices(rows, limit)
    assert prices is not None
    assert prices[1:] == pytest.approx(np.full(limit - 1, 12 * per_position), rel=1e-3, abs=1e-3)
    assert prices[0] == pytest.approx(12 * (per_position + wide / rows), rel=1e-3, abs=1e-3)
    assert cost.prices(rows, 0) is None


def test_an_interrupted_pass_teaches_nothing() -> None:
    cost = learned(0.01, 0.001)
    before = cost.pass_time
    cost.observe(1, 1, 5.0)
    assert cost.pass_time == before


def test_cutting_a_draft_keeps_its_estimates_in_step() -> None:
    whole = draft(0.9, 0.8, 0.7)
    assert whole.cut(5) is whole
    assert whole.cut(2).token_ids.tolist() == [0, 1]
    assert whole.cut(2).probabilities.tolist() == [0.9, 0.8]
