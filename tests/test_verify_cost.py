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
        cost.observe(rows, width, rows, fixed + per_position * rows * width + wide * (width > 1))
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
    chosen = learned(fixed, per_position, wide).paying_width(drafts, [1.0] * len(drafts))
    assert rates[chosen] == pytest.approx(max(rates), rel=1e-2)


def test_what_is_distrusted_has_to_promise_more() -> None:
    cost = learned(0.01, 0.002)
    assert cost.paying_width([draft(0.4, 0.9)], [1.0]) == 2
    assert cost.paying_width([draft(0.4, 0.9)], [0.3]) == 0


def test_nothing_is_cut_while_nothing_is_known() -> None:
    assert VerifyCost().paying_width([draft(0.1, 0.1)], [1.0]) == 2
    assert VerifyCost().paying_width([], []) == 0


def test_drafts_without_estimates_are_kept_whole() -> None:
    assert learned(0.001, 1.0).paying_width([Draft(np.arange(5, dtype=np.int32))], [1.0]) == 5


def test_a_flat_cost_keeps_every_token_and_a_steep_one_none() -> None:
    assert learned(1.0, 0.0).paying_width([draft(0.2, 0.2, 0.2)], [1.0]) == 3
    assert learned(1e-6, 1.0).paying_width([draft(0.6, 0.6), draft()], [1.0, 1.0]) == 0


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8), min_size=1, max_size=4),
    st.floats(1e-2, 1.0),
    st.floats(1e-4, 0.1),
    st.floats(0, 0.3),
    st.lists(st.integers(1, 9), max_size=5),
)
def test_what_is_not_worth_its_price_would_be_cut(
    rows: list[list[float]], fixed: float, per_position: float, wide: float, passes: list[int]
) -> None:
    cost = learned(fixed, per_position, wide)
    cost.begin()
    for num_tokens in passes:
        cost.observe(1, num_tokens, num_tokens, fixed + per_position * num_tokens + wide * (num_tokens > 1))
    prices = cost.prices(len(rows))
    assert prices is not None
    # Rows that draft alike, as the price takes them to.
    kept = cost.paying_width([draft(*rows[0])] * len(rows), [1.0] * len(rows))
    assert np.all(np.cumprod(rows[0])[:kept] >= prices[0] * (1 - 1e-6))


def test_that_a_second_position_is_dear_does_not_keep_a_long_draft_from_being_made() -> None:
    cost = learned(0.005, 0.0002, wide=0.001)
    for _ in range(50):
        cost.observe(1, 17, 17, 0.0094)  # a token takes half a millisecond, and the first of a draft 1.2
    prices = cost.prices(1)
    assert prices is not None and prices[0] < 0.5
    assert cost.paying_width([draft(*[0.99] * 16)], [1.0]) == 16
    assert cost.paying_width([draft(0.9)], [1.0]) == 0


def test_nothing_is_priced_before_a_pass_was_timed() -> None:
    assert VerifyCost().prices(1) is None


def test_an_interrupted_pass_teaches_nothing() -> None:
    cost = learned(0.01, 0.001)
    before = cost.pass_time
    cost.observe(1, 1, 1, 5.0)
    assert cost.pass_time == before


def test_cutting_a_draft_keeps_its_estimates_in_step() -> None:
    whole = draft(0.9, 0.8, 0.7)
    assert whole.cut(5) is whole
    assert whole.cut(2).token_ids.tolist() == [0, 1]
    assert np.asarray(whole.cut(2).probabilities).tolist() == [0.9, 0.8]
