"""Calibration: a drafter that promises too much is drafted less, and comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.drafting.protocol import Draft
from ssd.pricing.calibration import KeptShares, PlattScaling
from ssd.pricing.price_list import PriceList
from tests.test_price_list import learned

PASS = (0.01, 0.002)


def draft_of(chance: float, length: int = 8, source: str = "own") -> Draft:
    return Draft(np.arange(length, dtype=np.int32), source=source, probabilities=np.full(length, chance))


def said(right: int) -> list[int]:
    """What the target says to such a draft where ``right`` tokens of it are right."""
    return [*range(right), 1000]


def draft_lengths(shares: KeptShares, prices: PriceList, promised: float, true: float, passes: int) -> list[int]:
    """How much is drafted in each of so many passes over one row, of eight tokens of chance ``promised`` each."""
    random, lengths = np.random.default_rng(0), []
    for _ in range(passes):
        offered = draft_of(promised)
        draft = Draft(offered.token_ids, probabilities=shares.corrected(1.0, offered))
        length = len(draft.cut(prices.paying_width([draft])).token_ids)
        right = int((np.cumprod(random.random(8) < true)).sum())
        shares.observe(1.0, offered, said(right)[: length + 1])
        prices.observe(1 + length, 1 + min(right, length), PASS[0] + PASS[1] * (1 + length), is_wide=length > 0)
        lengths.append(length)
    return lengths


def test_a_drafter_whose_promises_do_not_hold_is_not_drafted_and_comes_back_at_once() -> None:
    shares, prices = KeptShares(), learned(*PASS)
    assert draft_lengths(shares, prices, 0.9, 0.9, 200)[-1] > 4, "what it promises comes"
    lengths = draft_lengths(shares, prices, 0.9, 0.05, 400)
    assert np.mean(lengths[-200:]) < 0.2, "nothing of it comes any more"
    lengths = draft_lengths(shares, prices, 0.9, 0.9, 100)
    assert np.mean(lengths[-40:]) > 4, "it has come back, though nothing of it was verified"


def test_nothing_is_trusted_before_it_was_right() -> None:
    shares = KeptShares()
    assert shares.corrected(0.0, draft_of(0.99))[0] == 0.0
    for _ in range(3):
        shares.observe(0.0, draft_of(0.99), said(0))
    assert shares.corrected(0.0, draft_of(0.99))[0] == 0.0
    shares = KeptShares()
    for _ in range(3):
        shares.observe(0.0, draft_of(0.99), said(0 + 1)[:1])  # verified or not, its first token came
    assert shares.corrected(0.0, draft_of(0.99))[0] > 0.85


def test_a_long_wrong_draft_lowers_trust_no_more_than_a_short_one() -> None:
    long, short = KeptShares(), KeptShares()
    for shares, length in ((long, 100), (short, 1)):
        for _ in range(50):
            shares.observe(0.0, draft_of(0.95), said(8))
        shares.observe(0.0, draft_of(0.95, length), said(0))
    np.testing.assert_array_equal(long.corrected(0.0, draft_of(0.95)), short.corrected(0.0, draft_of(0.95)))
    assert long.corrected(0.0, draft_of(0.95))[0] > 0.9


def test_what_is_certain_does_not_suffer_where_guesses_are_wrong() -> None:
    shares = KeptShares()
    for _ in range(100):
        shares.observe(0.0, draft_of(0.95), said(8))
        shares.observe(0.0, draft_of(0.2), said(0))
        shares.observe(0.0, draft_of(0.95, source="guess"), said(0))
    assert shares.corrected(0.0, draft_of(0.95))[0] == pytest.approx(0.95, abs=0.02)
    assert shares.corrected(0.0, draft_of(0.2))[0] == shares.corrected(0.0, draft_of(0.95, source="guess"))[0] == 0.0


def test_a_tree_is_tested_along_the_path_that_the_target_names() -> None:
    parents = np.array([-1, -1, 1, 0], np.int32)
    tree = Draft(np.array([5, 6, 7, 8], np.int32), probabilities=np.full(4, 0.5), parents=parents)
    shares = KeptShares()
    for _ in range(100):
        shares.observe(0.0, tree, [6, 7, 9])
    first, second, third, fourth = shares.corrected(0.0, tree)
    assert first == second == pytest.approx(0.5, abs=0.05), "one of two came"
    assert third == fourth == 0.5, "more came than was promised, which is trusted as far as it was promised"


@pytest.mark.parametrize("true", [0.2, 0.5, 0.8])
def test_the_share_approaches_what_is_kept(true: float) -> None:
    shares, random, seen = KeptShares(), np.random.default_rng(2), []
    for _ in range(1000):
        shares.observe(1.0, draft_of(0.9), said(int((np.cumprod(random.random(8) < true)).sum())))
        seen.append(shares.corrected(1.0, draft_of(0.9)))
    assert np.mean(seen[100:], axis=0) == pytest.approx(true, abs=0.07)


@given(st.floats(0, 2), st.floats(0, 2))
def test_temperatures_that_are_far_apart_have_their_own(first: float, second: float) -> None:
    shares = KeptShares()
    for _ in range(50):
        shares.observe(first, draft_of(0.9), said(8))
    assert shares.corrected(first, draft_of(0.9))[0] > 0.85
    if abs(first - second) > 0.25:
        assert shares.corrected(second, draft_of(0.9))[0] == 0.0


@settings(max_examples=8)
@given(st.floats(-1, 1), st.floats(0.3, 2.0), st.integers(0, 2**32))
def test_platt_scaling_finds_how_a_draft_models_probabilities_are_off(shift: float, scale: float, seed: int) -> None:
    random, model = np.random.default_rng(seed), PlattScaling(shift=0.5, scale=1.0)
    probes = np.array([0.1, 0.3, 0.6, 0.9])
    true = 1 / (1 + np.exp(-shift - scale * np.log(probes / (1 - probes))))
    seen = []
    for step in range(2000):
        drawn = random.integers(0, 4, 4)
        model.learn(probes[drawn], random.random(4) < true[drawn])
        if step >= 500:
            seen.append(model.estimate(probes))
    assert np.mean(seen, axis=0) == pytest.approx(true, abs=0.05)
