"""What an accepted token is worth: the best of all ways, and prices that leave out nothing that it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.protocol import Draft
from ssd.pricing.rate import Rate, StepRate
from tests.reference.pricing import fading

passes = st.lists(st.tuples(st.integers(1, 20), st.floats(1e-3, 1.0)), max_size=30)


@given(passes, st.lists(st.tuples(st.floats(1.0, 20.0), st.floats(1e-3, 1.0)), min_size=1, max_size=8))
def test_the_best_way_gives_most_together_with_a_recent_pass(
    seen: list[tuple[int, float]], ways: list[tuple[float, float]]
) -> None:
    rate, weights = Rate(), fading(len(seen), 0.99)
    for num_tokens, seconds in seen:
        rate.observe(num_tokens, seconds)
    tokens, time = np.average(seen, axis=0, weights=weights) if seen else (0.0, 0.0)
    rates = [(way_tokens + tokens) / (way_time + time) for way_tokens, way_time in ways]
    chosen = rate.best(np.array([each[0] for each in ways]), np.array([each[1] for each in ways]))
    assert rates[chosen] == pytest.approx(max(rates))


@given(passes, st.lists(st.floats(0.01, 1.0), min_size=1, max_size=10), st.floats(0.01, 1.0), st.floats(0.001, 0.5))
def test_the_price_leaves_out_nothing_that_would_be_kept(
    seen: list[tuple[int, float]], probabilities: list[float], plain: float, more: float
) -> None:
    rate = Rate()
    for num_tokens, seconds in seen:
        rate.observe(num_tokens, seconds)
    gains = np.cumprod(probabilities)
    expected = 1 + np.append(0.0, np.cumsum(gains))
    kept = rate.best(expected, plain + more * np.arange(len(expected), dtype=np.float64))
    assert np.all(gains[:kept] >= rate.price(1, plain, more) * (1 - 1e-9))


def test_choosing_by_the_rate_comes_close_to_the_best_constant_choice() -> None:
    """Passes of easy and of hard text in turn: no rule that always drafts, or never does, gives more a second."""
    easy, hard, seconds = np.array([1.0, 8.0]), np.array([1.0, 1.2]), np.array([0.01, 0.02])
    totals = np.zeros((3, 2))
    rate = Rate()
    for number in range(400):
        expected = easy if number % 2 else hard
        chosen = rate.best(expected, seconds)
        rate.observe(round(float(expected[chosen])), float(seconds[chosen]))
        for policy, way in enumerate((chosen, 0, 1)):
            totals[policy] += expected[way], seconds[way]
    per_second = totals[:, 0] / totals[:, 1]
    assert per_second[0] > 1.1 * per_second[1:].max()


def test_steps_are_counted_and_not_the_pauses_between() -> None:
    now = 0.0
    rate = StepRate(lambda: now)
    assert rate.tokens_per_s == 0
    for _ in range(5):
        rate.begin()
        now += 0.5
        rate.count(2)
        rate.count(3)
        now += 60
    rate.begin()
    assert rate.tokens_per_s == pytest.approx(10)


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 20)), max_size=12))
def test_chances_of_a_tree_are_products_along_its_paths(nodes: list[tuple[float, int]]) -> None:
    parents = [at % (number + 1) - 1 for number, (_, at) in enumerate(nodes)]
    draft = Draft(
        np.arange(len(nodes), dtype=np.int32),
        probabilities=np.array([chance for chance, _ in nodes]),
        parents=np.array(parents, np.int32),
    )
    for node, chance in enumerate(draft.chances()):
        product, at = 1.0, node
        while at >= 0:
            product *= nodes[at][0]
            at = parents[at]
        assert chance == pytest.approx(product)
