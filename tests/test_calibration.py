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


def draft_lengths(shares: KeptShares, prices: PriceList, promised: float, true: float, passes: int) -> list[int]:
    """How much is drafted in each of so many passes over one row, of eight tokens of chance ``promised`` each."""
    random, lengths = np.random.default_rng(0), []
    for _ in range(passes):
        draft = Draft(np.zeros(8, np.int32), probabilities=np.full(8, promised))
        draft = draft.cut(prices.paying_width([draft], [shares.share(1.0)]))
        length = len(draft.token_ids)
        accepted = int((np.cumprod(random.random(length) < true)).sum())
        shares.observe(1.0, draft.promise_tested(range(accepted)), accepted)
        prices.observe(1 + length, 1 + accepted, PASS[0] + PASS[1] * (1 + length), is_wide=length > 0)
        lengths.append(length)
    return lengths


def test_a_drafter_whose_promises_do_not_hold_is_drafted_less_and_comes_back() -> None:
    shares, prices = KeptShares(), learned(*PASS)
    assert draft_lengths(shares, prices, 0.9, 0.9, 200)[-1] > 4, "what it promises comes"
    lengths = draft_lengths(shares, prices, 0.9, 0.05, 400)
    assert np.mean(lengths[-200:]) < 0.5, "nothing of it comes any more"
    assert max(lengths[-200:]) > 0 or max(draft_lengths(shares, prices, 0.9, 0.05, 4000)) > 0, "it is tried again"
    lengths = draft_lengths(shares, prices, 0.9, 0.9, 6000)
    assert np.mean(lengths[-100:]) > 4, "it has come back"


def test_a_long_draft_that_is_wrong_at_once_weighs_as_one_wrong_token() -> None:
    chain = Draft(np.zeros(40, np.int32), probabilities=np.full(40, 0.9))
    assert chain.promise_tested([]) == pytest.approx(0.9)
    assert chain.promise_tested(range(40)) == pytest.approx(36)
    tree = Draft(np.zeros(4, np.int32), probabilities=np.array([0.5, 0.3, 0.8, 0.1]), parents=np.array([-1, -1, 0, 1]))
    assert tree.promise_tested([]) == pytest.approx(0.8)
    assert tree.promise_tested([0]) == pytest.approx(1.6)
    shares = KeptShares()
    shares.observe(1.0, chain.promise_tested([]), 0)
    assert shares.share(1.0) > 0.5


def test_promises_that_hold_are_not_distrusted() -> None:
    shares, random = KeptShares(), np.random.default_rng(1)
    seen = []
    for _ in range(2000):
        shares.observe(0.7, 2.0, int(random.binomial(4, 0.5)))
        seen.append(shares.share(0.7))
    assert np.mean(seen) > 0.9


@pytest.mark.parametrize("true", [0.2, 0.5, 0.8])
def test_the_share_approaches_what_is_kept(true: float) -> None:
    shares, random, seen = KeptShares(), np.random.default_rng(2), []
    for _ in range(1000):
        shares.observe(1.0, 5.0, int(random.binomial(5, true)))
        seen.append(shares.share(1.0))
    assert np.mean(seen[100:]) == pytest.approx(true, abs=0.05)


@given(st.floats(0, 2), st.floats(0, 2))
def test_temperatures_that_are_far_apart_have_their_own(first: float, second: float) -> None:
    shares = KeptShares()
    for _ in range(50):
        shares.observe(first, 2.0, 0)
    assert shares.share(first) < 0.1
    if abs(first - second) > 0.25:
        assert shares.share(second) == 1.0


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
