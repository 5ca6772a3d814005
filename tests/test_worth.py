"""What an accepted token is worth: against sums written out, and against other ways to spend the time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.protocol import Draft
from ssd.drafting.worth import Worth

passes = st.lists(st.tuples(st.integers(1, 20), st.floats(1e-3, 1.0)), max_size=30)
ways = st.lists(st.tuples(st.floats(1.0, 20.0), st.floats(1e-3, 1.0)), min_size=1, max_size=8)


@given(passes, ways)
def test_the_best_way_gives_most_together_with_a_recent_pass(
    seen: list[tuple[int, float]], choices: list[tuple[float, float]]
) -> None:
    worth = Worth()
    for num_tokens, seconds in seen:
        worth.observe(num_tokens, seconds)
    weights = [0.99 ** (len(seen) - 1 - i) for i in range(len(seen))]
    tokens = sum(w * t for w, (t, _) in zip(weights, seen, strict=True)) / max(sum(weights), 1e-9)
    seconds = sum(w * s for w, (_, s) in zip(weights, seen, strict=True)) / max(sum(weights), 1e-9)
    rates = [(t + tokens) / (s + seconds) for t, s in choices]
    chosen = worth.best(np.array([t for t, _ in choices]), np.array([s for _, s in choices]))
    assert rates[chosen] == pytest.approx(max(rates))


@given(passes, st.lists(st.floats(0.01, 1.0), min_size=1, max_size=10), st.floats(0.01, 1.0), st.floats(0.001, 0.5))
def test_the_price_leaves_out_nothing_that_would_be_kept(
    seen: list[tuple[int, float]], chances: list[float], plain: float, more: float
) -> None:
    worth = Worth()
    for num_tokens, seconds in seen:
        worth.observe(num_tokens, seconds)
    gains = np.cumprod(chances)
    expected = 1 + np.append(0.0, np.cumsum(gains))
    kept = worth.best(expected, plain + more * np.arange(len(expected), dtype=np.float64))
    assert np.all(gains[:kept] >= worth.price(1, plain, more) * (1 - 1e-9))


def test_forgetting_begins_anew() -> None:
    worth = Worth()
    fresh = worth.price(1, 0.01, 0.001)
    worth.observe(30, 0.01)
    assert worth.price(1, 0.01, 0.001) > fresh
    worth.forget()
    assert worth.price(1, 0.01, 0.001) == fresh


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
