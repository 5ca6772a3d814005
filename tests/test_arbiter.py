"""Choosing among drafters: by expected gain, at measured cost, without ever failing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.arbiter import Arbiter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.drafting.trials import TRIAL_EVERY
from ssd.pricing.acceptance_rates import AcceptanceRates
from ssd.pricing.gain import best_gain, promised_gain

STEP_S = 0.1


class Clock:
    """Time passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """Drafts tokens of one number with fixed estimates, and keeps what it is told."""

    def __init__(self, token: int, estimates: Sequence[float] | None, length: int = 4, cost_s: float = 0.0) -> None:
        self.token, self.estimates, self.length, self.cost_s = token, estimates, length, cost_s
        self.asked: list[list[DraftRequest]] = []
        self.told: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self.failing = False
        self.begin_s, self.begun = 0.0, set[str]()

    def seconds_per_token(self, num_rows: int) -> float:
        return self.cost_s * num_rows

    def seconds_to_begin(self, request: DraftRequest) -> float:
        return 0.0 if request.request_id in self.begun else self.begin_s

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.begun |= {request.request_id for request in requests}
        self.asked.append(list(requests))
        if self.failing:
            raise RuntimeError("injected")
        length = self.length if self.estimates is None else len(self.estimates)
        return [
            Draft(
                np.full(min(length, request.limit), self.token, np.int32),
                source=str(self.token),
                probabilities=None if self.estimates is None else np.array(self.estimates)[: request.limit],
            )
            for request in requests
        ]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        self.told.append((request_id, num_accepted))

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)
        if self.failing:
            raise RuntimeError("injected")


def ask(name: str = "a", limit: int = 4, prices: Sequence[float] | None = None) -> DraftRequest:
    return DraftRequest(
        name, np.array([1], np.int32), 1, None, limit, prices=None if prices is None else np.array(prices)
    )


def run_steps(arbiter: Arbiter, clock: Clock, steps: int, accepted: dict[str, int], limit: int = 4) -> list[str]:
    """Sources of the drafts of so many steps of one request; ``accepted`` says how many tokens of each are."""
    sources = []
    for _ in range(steps):
        draft = arbiter.propose([ask(limit=limit)])[0]
        clock.now += STEP_S
        arbiter.observe("a", draft, min(accepted.get(draft.source, 0), len(draft.token_ids)))
        clock.now += 100.0  # idle: does not count
        sources.append(draft.source)
    return sources


def test_the_better_promise_wins() -> None:
    weak, strong = Scripted(1, [0.3, 0.3]), Scripted(2, [0.9, 0.9])
    assert Arbiter([weak, strong]).propose([ask()])[0].source == "2"
    assert Arbiter([Scripted(1, [0.95] * 4), strong]).propose([ask()])[0].source == "1"


def test_a_confident_cheap_draft_leaves_the_costly_drafter_unasked() -> None:
    costly = Scripted(2, [0.9] * 4)
    draft = Arbiter([Scripted(1, [0.99] * 4), costly]).propose([ask()])[0]
    assert draft.source == "1" and not costly.asked


def test_each_request_gets_its_own_choice() -> None:
    class Divided(Scripted):
        """Knows one request well."""

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            found = super().propose(requests)
            return [d if r.request_id == "known" else EMPTY_DRAFT for r, d in zip(requests, found, strict=True)]

    costly = Scripted(2, [0.6] * 4)
    drafts = Arbiter([Divided(1, [0.99] * 4), costly]).propose([ask("new"), ask("known"), ask("other")])
    assert [draft.source for draft in drafts] == ["2", "1", "2"]
    assert [request.request_id for request in costly.asked[0]] == ["new", "other"]


def test_a_drafter_that_costs_as_much_as_it_brings_is_soon_only_tried_now_and_then() -> None:
    clock, costly = Clock(), Scripted(2, [0.9] * 4, cost_s=STEP_S)
    arbiter = Arbiter([Scripted(1, None, length=0), costly], clock=clock)
    run_steps(arbiter, clock, 10, {"2": 4})
    costly.asked.clear()
    run_steps(arbiter, clock, 3 * TRIAL_EVERY, {"2": 4})
    assert 1 <= len(costly.asked) <= 3
    assert all(request.limit <= 2 for asked in costly.asked for request in asked)


def test_a_drafter_that_costs_little_is_asked_and_told_its_cost() -> None:
    clock, costly = Clock(), Scripted(2, [0.9] * 4, cost_s=STEP_S / 50)
    arbiter = Arbiter([Scripted(1, None, length=0), costly], clock=clock)
    assert set(run_steps(arbiter, clock, 50, {"2": 4})) == {"2"}
    # 5 tokens in a step of 0.1 s: 2 ms are worth 0.1 of a token.
    assert costly.asked[-1][0].prices == pytest.approx([0.1])


def test_reading_begins_when_as_much_has_been_forgone() -> None:
    clock, costly = Clock(), Scripted(2, [0.9] * 4, cost_s=STEP_S / 50)
    costly.begin_s = 10 * STEP_S
    arbiter = Arbiter([Scripted(1, None, length=0), costly], clock=clock)
    # Ten plain steps' tokens are what reading costs; at first the promise is .7 + .7^2 + .7^3 + .7^4 = 1.77 a step.
    arbiter.propose([ask("warm-up")])
    clock.now += STEP_S
    arbiter.observe("warm-up", EMPTY_DRAFT, 0)
    costly.asked.clear()
    sources = run_steps(arbiter, clock, 20, {"2": 4})
    assert 5 <= sources.index("2") <= 8
    assert set(sources[sources.index("2") :]) == {"2"}
    arbiter.finish("a")


def test_one_whose_tokens_are_rejected_is_left_out() -> None:
    clock, costly = Clock(), Scripted(2, [0.9] * 4, cost_s=STEP_S / 5)
    arbiter = Arbiter([Scripted(1, None, length=0), costly], clock=clock)
    run_steps(arbiter, clock, 200, {})
    costly.asked.clear()
    run_steps(arbiter, clock, 100, {})
    assert len(costly.asked) <= 5


def test_without_estimates_experience_counts() -> None:
    clock = Clock()
    blind, rival = Scripted(1, None), Scripted(2, [0.5] * 4)
    arbiter = Arbiter([rival, blind], clock=clock)
    assert set(run_steps(arbiter, clock, 5, {"1": 4})) == {"1"}
    assert run_steps(arbiter, clock, 60, {})[-1] == "2"


def test_only_the_chosen_is_told_and_all_hear_of_the_end() -> None:
    first, second = Scripted(1, [0.3]), Scripted(2, [0.9])
    arbiter = Arbiter([first, second])
    draft = arbiter.propose([ask()])[0]
    arbiter.observe("a", draft, 1)
    arbiter.observe("never proposed for", EMPTY_DRAFT, 0)
    arbiter.finish("a")
    assert (first.told, second.told) == ([], [("a", 1)])
    assert first.finished == second.finished == ["a"]


def test_a_failing_drafter_is_counted_and_asked_ever_more_rarely() -> None:
    first, second = Scripted(1, [0.3]), Scripted(2, [0.9])
    second.failing = True
    arbiter = Arbiter([first, second])
    for _ in range(16):
        assert arbiter.propose([ask()])[0].source == "1"
    assert len(second.asked) == arbiter.num_failures == 4  # at steps 1, 3, 6, 11
    second.failing, first.failing = False, True
    arbiter.finish("a")
    assert second.finished == ["a"] and arbiter.num_failures == 5
    sources = [arbiter.propose([ask()])[0].source for _ in range(16)]
    assert "2" in sources and set(sources) <= {"2", "none"}


def test_nothing_is_asked_of_the_costly_where_nothing_may_be_drafted() -> None:
    costly = Scripted(2, [0.9])
    assert len(Arbiter([Scripted(1, None, length=0), costly]).propose([ask(limit=0)])[0].token_ids) == 0
    assert Arbiter([Scripted(1, None), costly]).propose([]) == []
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


@given(st.floats(0.01, 0.99), price_lists, st.integers(0, 8))
def test_a_promise_is_the_gain_of_a_draft_of_one_rate(rate: float, prices: list[float], limit: int) -> None:
    draft = Draft(np.zeros(limit, np.int32), probabilities=np.full(limit, rate))
    assert promised_gain(rate, np.array(prices), limit) == pytest.approx(best_gain(draft.chances(), np.array(prices)))


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
