"""Whom to ask of several drafters: at measured cost, without ever failing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.arbiter import Arbiter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft
from ssd.drafting.source import TRIAL_EVERY
from ssd.pricing.rate import AcceptanceRates, best_gain
from tests.test_joint import STEP_S, Clock, Costly, Judge, ask, chain, verdict

FOUR = chain([7, 8, 9, 10], [0.9] * 4)


def seen(arbiter: Arbiter, clock: Clock, steps: int, said: Sequence[int] = (7, 8, 9, 10)) -> list[bool]:
    """Of each of so many steps whether anything was drafted."""
    drafted = []
    for _ in range(steps):
        draft = arbiter.propose([ask()])[0]
        clock.now += STEP_S
        arbiter.observe("a", *verdict(draft, said))
        clock.now += 100.0  # idle: does not count
        drafted.append(len(draft.token_ids) > 0)
    return drafted


def test_a_drafter_that_costs_as_much_as_it_brings_is_soon_only_tried_now_and_then() -> None:
    clock, costly = Clock(), Costly(FOUR, cost_s=STEP_S)
    arbiter = Arbiter([Judge(), costly], clock=clock)
    seen(arbiter, clock, 10)
    costly.asked.clear()
    seen(arbiter, clock, 3 * TRIAL_EVERY)
    assert 1 <= len(costly.asked) <= 3


def test_a_drafter_that_costs_little_is_asked_and_told_its_cost() -> None:
    clock, costly = Clock(), Costly(FOUR, cost_s=STEP_S / 50)
    arbiter = Arbiter([Judge(), costly], clock=clock)
    assert all(seen(arbiter, clock, 50))
    # Retrieval brings nothing, so a token saves a step of 0.1 s: 2 ms are worth 0.02 of a token.
    assert costly.asked[-1].prices == pytest.approx([0.01 + 0.02])


def test_reading_begins_when_as_much_has_been_forgone() -> None:
    clock, costly = Clock(), Costly(FOUR, cost_s=STEP_S / 50, begin_s=10 * STEP_S)
    arbiter = Arbiter([Judge(), costly], clock=clock)
    # Ten plain steps' tokens are what reading costs; one token a step is what is expected of asking at first.
    arbiter.propose([ask("warm-up")])
    clock.now += STEP_S
    arbiter.observe("warm-up", EMPTY_DRAFT, 0)
    costly.asked.clear()
    drafted = seen(arbiter, clock, 20)
    assert 8 <= drafted.index(True) <= 12
    assert all(drafted[drafted.index(True) :])
    arbiter.finish("a")


def test_one_whose_tokens_are_rejected_is_left_out() -> None:
    clock, costly = Clock(), Costly(FOUR, cost_s=STEP_S / 20)
    arbiter = Arbiter([Judge(), costly], clock=clock)
    seen(arbiter, clock, 200, said=[3])
    costly.asked.clear()
    seen(arbiter, clock, 100, said=[3])
    assert len(costly.asked) <= 5


def test_what_was_never_proposed_for_is_told_nobody_and_all_hear_of_the_end() -> None:
    judge, costly = Judge({1: chain([5], [0.3])}), Costly(FOUR)
    arbiter = Arbiter([judge, costly])
    arbiter.observe("never proposed for", EMPTY_DRAFT, 0)
    assert not judge.told and not costly.told
    arbiter.finish("a")
    assert judge.finished == costly.finished == ["a"]


def test_a_failing_drafter_is_counted_and_asked_ever_more_rarely() -> None:
    judge, costly = Judge({1: chain([5], [0.3])}), Costly(FOUR)
    costly.failing = True
    arbiter = Arbiter([judge, costly])
    for _ in range(16):
        assert arbiter.propose([ask()])[0].token_ids.tolist() == [5]
    assert len(costly.asked) == arbiter.num_failures == 4  # at steps 1, 3, 6, 11
    arbiter.finish("a")
    assert costly.finished == ["a"] and arbiter.num_failures == 5


def test_nothing_is_asked_of_the_costly_where_nothing_may_be_drafted() -> None:
    costly = Costly(FOUR)
    assert len(Arbiter([Judge(), costly]).propose([ask(limit=0)])[0].token_ids) == 0
    assert Arbiter([Judge(), costly]).propose([]) == []
    assert not costly.asked


chances = st.lists(st.floats(0.01, 0.99), max_size=6)
price_lists = st.lists(st.floats(0, 0.8), min_size=1, max_size=4)


@given(chances, price_lists, st.data())
def test_gain_equals_adding_up_every_cut(estimates: list[float], prices: list[float], data: st.DataObject) -> None:
    """Of chains and trees; a parent comes before its children, so every cut is a tree."""
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(estimates))]
    for tree in (False, True):
        best, gain = 0.0, 0.0
        for i in range(len(estimates)):
            chance, node = 1.0, i
            while node >= 0:
                chance *= estimates[node]
                node = parents[node] if tree else node - 1
            gain += chance - prices[min(i, len(prices) - 1)]
            best = max(best, gain)
        draft = Draft(
            np.zeros(len(estimates), np.int32),
            probabilities=np.array(estimates),
            parents=np.array(parents, np.int32) if tree else None,
        )
        assert best_gain(draft.chances(), np.array(prices)) == pytest.approx(best)


def test_rates_learn_lean_and_fade() -> None:
    rates = AcceptanceRates()
    first = rates.rate("a")
    for _ in range(50):
        rates.learn("a", 4, 0)
    assert rates.rate("a") < 0.2 < rates.rate("b") < first
    for _ in range(300):
        rates.learn("c", 4, 4)
    assert rates.rate("b") > 0.8 > 0.5 > rates.rate("a")
    for _ in range(500):
        rates.relax("a")
    assert rates.rate("a") == pytest.approx(rates.rate("b"), abs=0.05)
    rates.forget("a")
    rates.relax("a")
    assert rates.rate("a") == rates.rate("b")
