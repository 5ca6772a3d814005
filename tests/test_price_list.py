"""The price list: what passes take is found, and what is cut is the best of all cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.protocol import Draft
from ssd.pricing.pass_costs import cut_rows
from ssd.pricing.price_list import PassTime, PriceList
from tests.reference import pricing as slow


def learned(fixed: float, per_position: float, wide: float = 0.0) -> PriceList:
    prices = PriceList()
    for rows, width, _ in itertools.product((1, 8), (1, 2, 17), range(4)):
        prices.calibrate(rows * width, fixed + per_position * rows * width + wide * (width > 1), is_wide=width > 1)
    prices.begin()
    return prices


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
        took = fixed + per_position * rows * width + wide * (width > 1)
        cost.observe(rows * width, rows, took, is_wide=width > 1)
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


@given(st.lists(st.lists(st.floats(0.01, 0.99), max_size=8), min_size=1, max_size=5), st.floats(1e-4, 0.1), st.data())
def test_chains_are_cut_as_trees_of_the_same_tokens_are(
    rows: list[list[float]], per_position: float, data: st.DataObject
) -> None:
    shares = [data.draw(st.floats(0.1, 1.0)) for _ in rows]
    chains = [draft(*row) for row in rows]
    trees = [replace(chain, parents=np.arange(-1, len(chain.token_ids) - 1, dtype=np.int32)) for chain in chains]
    cost = learned(0.01, per_position)
    assert cost.paying_width(chains, shares) == cost.paying_width(trees, shares)


def test_what_is_distrusted_has_to_promise_more() -> None:
    cost = learned(0.01, 0.002)
    assert cost.paying_width([draft(0.4, 0.9)], [1.0]) == 2
    assert cost.paying_width([draft(0.4, 0.9)], [0.3]) == 0


def test_nothing_is_cut_while_nothing_is_known() -> None:
    assert PriceList().paying_width([draft(0.1, 0.1)], [1.0]) == 2
    assert PriceList().paying_width([], []) == 0


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
    for num_tokens in passes:
        took = fixed + per_position * num_tokens + wide * (num_tokens > 1)
        cost.observe(num_tokens, num_tokens, took, is_wide=num_tokens > 1)
    price = cost.price(len(rows))
    # Rows that draft alike, as the price takes them to.
    kept = cost.paying_width([draft(*rows[0])] * len(rows), [1.0] * len(rows))
    assert np.all(np.cumprod(rows[0])[:kept] >= price * (1 - 1e-6))


def test_that_a_second_position_is_dear_does_not_keep_a_long_draft_from_being_made() -> None:
    cost = learned(0.005, 0.0002, wide=0.001)
    for _ in range(50):
        cost.observe(17, 17, 0.0094, is_wide=True)  # a token takes half a millisecond, and the first of a draft 1.2
    assert 0 < cost.price(1) < 0.5
    assert cost.paying_width([draft(*[0.99] * 16)], [1.0]) == 16
    assert cost.paying_width([draft(0.9)], [1.0]) == 0


def test_nothing_is_priced_before_a_pass_was_timed() -> None:
    assert PriceList().price(1) == 0.0


def test_an_interrupted_pass_teaches_nothing() -> None:
    cost = learned(0.01, 0.001)
    before = cost.pass_time
    cost.observe(1, 1, 5.0)
    assert cost.pass_time == before


def test_cutting_a_draft_keeps_its_estimates_in_step() -> None:
    whole = draft(0.9, 0.8, 0.7)
    assert whole.cut(5) is whole
    shorter = whole.cut(2)
    assert shorter.token_ids.tolist() == [0, 1]
    assert shorter.probabilities is not None and shorter.probabilities.tolist() == [0.9, 0.8]


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_change_of_load_is_followed_within_fifty_passes(factor: float) -> None:
    random, law = np.random.default_rng(0), np.array((0.01, 0.0005, 0.001))
    prices = learned(*law)
    for _ in range(50):
        width = int(random.integers(1, 9))
        took = factor * float(law @ (1, width, width > 1)) * float(random.normal(1, 0.02))
        prices.observe(width, 1, took, is_wide=width > 1)
    for width in (1, 4, 8):
        want = factor * float(law @ (1, width, width > 1))
        assert prices.seconds(width, is_wide=width > 1) == pytest.approx(want, rel=0.25)


def test_sizes_not_seen_lately_keep_the_price_that_the_warm_up_found() -> None:
    prices = learned(0.01, 0.001)
    for _ in range(2000):
        prices.observe(1, 1, 0.011)
    assert prices.seconds(8 * 17, is_wide=True) == pytest.approx(0.01 + 0.001 * 8 * 17, rel=1e-2)


def test_what_the_warm_up_took_and_gave_besides_is_forgotten() -> None:
    prices, fresh = learned(0.01, 0.001), learned(0.01, 0.001)
    for _ in range(20):
        prices.observe(4, 400, 0.03, is_wide=True)
    assert prices.price(1) > 2 * fresh.price(1)
    prices.begin()
    assert (prices.price(1), prices.pass_time) == (fresh.price(1), fresh.pass_time)


def test_steps_of_one_size_do_not_tell_what_a_position_costs() -> None:
    prices = PriceList()
    for _ in range(100):
        prices.observe(4, 1, 0.02)
    assert prices.pass_time is None and prices.price(4) == 0.0
    assert prices.seconds(4) == pytest.approx(0.02), "but what they take"
    assert prices.paying_width([draft(0.01)], [1.0]) == 1, "nothing is known: nothing is cut"
    for positions in [3, 5] * 10:
        prices.observe(positions, 1, 0.01 + 0.0025 * positions)
    known = prices.pass_time
    assert known == pytest.approx(PassTime(0.01, 0.0025, 0.0), rel=1e-2)
    for _ in range(500):
        prices.observe(4, 1, 0.03)  # slower, by what nobody knows
    assert prices.seconds(4) == pytest.approx(0.03, rel=1e-3)
    assert prices.pass_time is not None and prices.pass_time.per_position == pytest.approx(0.0025, rel=0.2)


row_chances = st.lists(st.floats(0.0, 1.0), max_size=4)


def cut(prices: PriceList, rows: list[list[float]]) -> list[int]:
    sizes = np.array([len(row) for row in rows], np.int64)
    probabilities = np.zeros((len(rows), max(1, int(sizes.max()))))
    for row, chances in enumerate(rows):
        probabilities[row, : len(chances)] = chances
    cut_rows(prices.address, probabilities, sizes, np.empty(int(sizes.sum())))
    found: list[int] = sizes.tolist()
    return found


@given(
    st.lists(row_chances, min_size=1, max_size=3),
    st.floats(1e-4, 0.1),
    st.floats(1e-4, 0.1),
    st.lists(st.integers(1, 9), max_size=9),
)
def test_no_other_beginnings_give_more_tokens_per_second(
    rows: list[list[float]], fixed: float, per_position: float, seen: list[int]
) -> None:
    prices = learned(fixed, per_position)
    for num_tokens in seen:
        prices.observe(num_tokens, num_tokens, fixed + per_position * num_tokens)
    weights = slow.fading(len(seen), 0.99)
    tokens = float(np.average(seen, weights=weights)) if seen else 0.0
    recent = tokens, (fixed + per_position * tokens) if seen else 0.0
    gains = [np.cumprod(row).tolist() for row in rows]
    seconds = [fixed + per_position * (len(rows) + n) for n in range(sum(map(len, rows)) + 1)]
    got = slow.joint_rate(gains, cut(prices, rows), seconds, recent)
    assert got >= slow.best_joint_rate(gains, seconds, recent) * (1 - 1e-6)


steps = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.floats(1e-3, 1.0)), max_size=40)


@given(steps, st.lists(row_chances, min_size=1, max_size=4))
def test_what_steps_without_padding_cost_is_that_of_the_twin(
    seen: list[tuple[int, int, float]], rows: list[list[float]]
) -> None:
    prices, twin = PriceList(), slow.SlowRowPrices()
    for step in seen:
        prices.observe(*step)
        twin.observe(*step)
    assert (prices.pass_time is not None) == twin.is_known
    for positions in (1, 7, 40):
        want = twin.fixed + twin.per_position * positions
        assert prices.seconds(positions) == pytest.approx(want, rel=1e-6, abs=1e-9)
    assert prices.price(len(rows)) == pytest.approx(twin.price(len(rows)), rel=1e-6, abs=1e-9)
    got, want_sizes = cut(prices, rows), twin.sizes(rows)
    if got != want_sizes:  # two cuts that are as good as each other
        gains = [np.cumprod(row).tolist() for row in rows]
        seconds = [twin.fixed + twin.per_position * (len(rows) + n) for n in range(sum(map(len, rows)) + 1)]
        rates = [slow.joint_rate(gains, sizes, seconds, twin.recent()) for sizes in (got, want_sizes)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-6)
