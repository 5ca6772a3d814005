"""Which draft tokens pay: what is learned of steps, and the best beginnings against all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.protocol import EMPTY_DRAFT, Draft
from ssd.drafting.step_cost import StepCost
from tests.reference.step_cost import SlowStepCost


def draft(*probabilities: float) -> Draft:
    return Draft(np.arange(len(probabilities), dtype=np.int32), probabilities=np.array(probabilities))


def learned(fixed: float, per_position: float) -> StepCost:
    cost, random = StepCost(), np.random.default_rng(0)
    for positions in random.integers(1, 20, 100):
        cost.observe(int(positions), 1, fixed + per_position * positions)
    return cost


@pytest.mark.parametrize(("fixed", "per_position"), [(0.01, 0.001), (0.002, 0.004), (0.03, 0.0)])
def test_the_cost_of_a_position_is_found(fixed: float, per_position: float) -> None:
    cost = learned(fixed, per_position)
    assert cost.fixed_s == pytest.approx(fixed)
    assert cost.per_position_s == pytest.approx(per_position, abs=1e-9)


def test_an_interrupted_step_and_steps_of_one_size_teach_nothing() -> None:
    cost = learned(0.01, 0.001)
    cost.observe(4, 1, 3.0)
    assert cost.per_position_s == pytest.approx(0.001)
    for _ in range(500):
        cost.observe(4, 1, 0.014)
    assert cost.per_position_s == pytest.approx(0.001, rel=1e-3)
    alike = StepCost()
    for _ in range(100):
        alike.observe(4, 1, 0.02)
    assert alike.paying([draft(0.01)])[0].token_ids.tolist() == [0], "nothing is known: nothing is cut"


def test_drafts_without_estimates_stay_whole() -> None:
    whole = Draft(np.arange(5, dtype=np.int32))
    assert learned(0.001, 0.01).paying([whole, draft(0.1)])[0] is whole
    assert learned(0.001, 0.01).paying([]) == []
    assert learned(0.001, 0.01).paying([EMPTY_DRAFT])[0] is EMPTY_DRAFT


chances = st.lists(st.floats(0.0, 1.0), max_size=4)


def test_a_position_has_a_price_once_its_cost_is_known() -> None:
    assert StepCost().prices(1) is None
    cost = learned(0.01, 0.001)  # steps of one token each: nothing that was drafted paid
    prices = cost.prices(1)
    assert prices is not None and 0 < prices[0] < 0.1


@given(st.lists(chances, min_size=1, max_size=3), st.floats(1e-4, 0.1), st.floats(1e-4, 0.1))
def test_no_other_beginnings_give_more_tokens_per_second(
    rows: list[list[float]], fixed: float, per_position: float
) -> None:
    cost = StepCost(fixed, per_position)

    def rate(lengths: tuple[int, ...]) -> float:
        expected = sum(1 + sum(np.cumprod(row[:n])) for row, n in zip(rows, lengths, strict=True))
        return float(expected / (fixed + per_position * sum(1 + n for n in lengths)))

    got = tuple(len(cut.token_ids) for cut in cost.paying([draft(*row) for row in rows]))
    best = max(map(rate, itertools.product(*(range(len(row) + 1) for row in rows))))
    assert rate(got) >= best * (1 - 1e-9)


steps = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.floats(1e-4, 1.0)), max_size=40)


@given(steps, st.lists(chances, min_size=1, max_size=4))
def test_what_is_learned_and_what_is_cut_are_those_of_the_twin(
    seen: list[tuple[int, int, float]], rows: list[list[float]]
) -> None:
    cost, slow = StepCost(), SlowStepCost()
    for step in seen:
        cost.observe(*step)
        slow.observe(*step)
        assert cost.fixed_s == pytest.approx(slow.fixed_s, abs=1e-12)
        assert cost.per_position_s == pytest.approx(slow.per_position_s, abs=1e-12)
    price, expected = cost.prices(len(rows)), slow.prices(len(rows))
    assert (price is None) == (expected is None)
    if price is not None and expected is not None:
        assert price == pytest.approx(expected)
    drafts = [draft(*row) for row in rows]
    got, want = cost.paying(drafts), slow.paying(drafts)
    assert [len(cut.token_ids) for cut in got] == [len(cut.token_ids) for cut in want]
