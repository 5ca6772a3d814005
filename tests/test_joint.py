"""One draft of several drafters': who is asked, what is verified, and what each is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.arbiter import Arbiter, MergedTree, depth_of, walked
from ssd.drafting.protocol import EMPTY_DRAFT, HEAD, Draft, DraftRequest
from ssd.drafting.source import TRIAL_EVERY
from ssd.pricing.rate import Excess
from tests.reference.pricing import mean_excess

STEP_S = 0.1


class Clock:
    """Time passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def chain(tokens: Sequence[int], estimates: Sequence[float] | None) -> Draft:
    probabilities = None if estimates is None else np.array(estimates)
    return Draft(np.array(tokens, np.int32), source="chain", probabilities=probabilities)


def tree(tokens: Sequence[int], parents: Sequence[int], estimates: Sequence[float]) -> Draft:
    return Draft(
        np.array(tokens, np.int32),
        source="tree",
        probabilities=np.array(estimates),
        parents=np.array(parents, np.int32),
    )


class Judge:
    """Drafts what a table says of the context's last token, and puts what is offered beside it as it is."""

    def __init__(self, table: dict[int, Draft] | None = None) -> None:
        self.table = table or {}
        self.asked: list[DraftRequest] = []
        self.told: list[tuple[str, list[int], list[int], int]] = []
        self.finished: list[str] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += requests
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        own = self.table.get(int(request.context[-1]), EMPTY_DRAFT)
        offers = request.offers
        if offers is None:
            return own.cut(request.limit)
        merged = MergedTree()
        merged.add(own)
        merged.add(Draft(offers.token_ids, probabilities=offers.chances, parents=offers.parents))
        draft, _ = merged.best(request.limit, np.zeros(1))
        return draft

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        path = [] if draft.path is None else draft.path.tolist()
        self.told.append((request_id, draft.token_ids.tolist(), path, num_accepted))

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)


class Costly:
    """Drafts one chain at a price in seconds a token, and keeps what it is told."""

    kind = HEAD

    def __init__(self, draft: Draft, cost_s: float = 0.0, begin_s: float = 0.0) -> None:
        self.draft, self.cost_s, self.begin_s, self.failing = draft, cost_s, begin_s, False
        self.finished: list[str] = []
        self.asked: list[DraftRequest] = []
        self.told: list[tuple[list[int], int]] = []

    def seconds_per_token(self, num_rows: int) -> float:
        return self.cost_s * num_rows

    def seconds_to_begin(self, request: DraftRequest) -> float:
        return 0.0 if self.asked else self.begin_s

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += requests
        if self.failing:
            raise RuntimeError("injected")
        return [self.draft.cut(request.limit) for request in requests]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        self.told.append((draft.token_ids.tolist(), num_accepted))

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)
        if self.failing:
            raise RuntimeError("injected")


def ask(name: str = "a", limit: int = 16, price: float | None = 0.01, *, is_tree: bool = True) -> DraftRequest:
    prices = None if price is None else np.array([price])
    return DraftRequest(name, np.array([1], np.int32), 1, None, limit, prices=prices, tree=is_tree)


def verdict(draft: Draft, said: Sequence[int]) -> tuple[Draft, int]:
    """The draft with the path that agrees with what the target says."""
    path = walked(draft, said)
    if draft.parents is None:
        return draft, len(path)
    return replace(draft, path=np.array(path, np.int32)), len(path)


def run_steps(arbiter: Arbiter, clock: Clock, steps: int, said: Sequence[int]) -> None:
    for _ in range(steps):
        draft = arbiter.propose([ask()])[0]
        clock.now += STEP_S
        arbiter.observe("a", *verdict(draft, said))


def test_what_is_offered_and_what_is_known_go_into_one_tree() -> None:
    judge = Judge({1: tree([5, 6], [-1, 0], [0.5, 0.9])})
    costly = Costly(chain([7, 8], [0.8, 0.8]))
    draft = Arbiter([judge, costly]).propose([ask()])[0]
    assert sorted(draft.token_ids.tolist()) == [5, 6, 7, 8]
    assert draft.token_ids[0] == 7 and draft.chances().tolist() == sorted(draft.chances().tolist(), reverse=True)
    offers = judge.asked[1].offers
    assert offers is not None and offers.token_ids.tolist() == [7, 8] and offers.kinds.tolist() == [HEAD, HEAD]
    assert offers.parents.tolist() == [-1, 0] and offers.chances.tolist() == [0.8, 0.8]


def test_what_is_offered_is_carried_on_by_what_the_first_knows() -> None:
    judge = Judge({8: tree([9, 10], [-1, 0], [0.9, 0.9])})
    arbiter = Arbiter([judge, Costly(chain([7, 8], [0.8, 0.8]))])
    draft = arbiter.propose([ask()])[0]
    assert len(walked(draft, [7, 8, 9, 10])) == 4
    behind = [request for request in judge.asked if request.request_id != "a"]
    assert [request.context.tolist() for request in behind] == [[1, 7], [1, 7, 8]]
    assert judge.finished == [request.request_id for request in behind]
    arbiter.observe("a", *verdict(draft, [7, 8, 9]))
    assert judge.told == [("a", [7, 8], [0, 1], 2)]


def test_a_draft_without_estimates_stands_beside_ours_even_where_they_agree() -> None:
    judge = Judge({1: tree([5, 6], [-1, 0], [0.5, 0.9])})
    costly = Costly(chain([5, 6, 7], None))
    arbiter = Arbiter([judge, costly])
    draft = arbiter.propose([ask()])[0]
    assert sorted(draft.token_ids.tolist()) == [5, 5, 6, 6, 7]
    assert all(request.offers is None for request in judge.asked)
    path = [i for i, token in enumerate(draft.token_ids.tolist()) if token in (5, 6, 7)]
    assert len(path) == 5
    arbiter.observe("a", *verdict(draft, [5, 6]))
    assert judge.told == [("a", [5, 6], [0, 1], 2)]
    assert costly.told == [([5, 6, 7], 2)]


def test_each_hears_of_its_own_tokens_as_far_as_they_were_verified() -> None:
    judge = Judge({1: tree([5, 6], [-1, 0], [0.5, 0.9])})
    costly = Costly(chain([5, 8], [0.8, 0.8]))
    arbiter = Arbiter([judge, costly])
    draft = arbiter.propose([ask()])[0].cut(2)
    arbiter.observe("a", *verdict(draft, [5, 8]))
    (name, tokens, path, accepted), own = judge.told[0], costly.told[0]
    assert name == "a" and accepted == len(walked(draft, [5, 8])) and len(path) == accepted and len(tokens) == 2
    assert own[1] <= len(own[0]) <= 2


def test_a_source_that_adds_nothing_is_soon_asked_only_now_and_then() -> None:
    clock = Clock()
    costly = Costly(chain([5, 6], [0.8, 0.8]), cost_s=STEP_S / 10)
    arbiter = Arbiter([Judge({1: tree([5, 6], [-1, 0], [0.5, 0.9])}), costly], clock=clock)
    run_steps(arbiter, clock, 150, [5, 6])
    costly.asked.clear()
    run_steps(arbiter, clock, 3 * TRIAL_EVERY, [5, 6])
    assert len(costly.asked) <= 3


def test_a_source_that_adds_what_it_costs_is_asked_at_every_step() -> None:
    clock = Clock()
    costly = Costly(chain([7, 8, 9], [0.8, 0.8, 0.8]), cost_s=STEP_S / 10)
    arbiter = Arbiter([Judge({1: tree([5, 6], [-1, 0], [0.3, 0.9])}), costly], clock=clock)
    run_steps(arbiter, clock, 50, [7, 8, 9])
    costly.asked.clear()
    run_steps(arbiter, clock, 50, [7, 8, 9])
    assert len(costly.asked) == 50


def test_a_second_source_is_asked_for_what_the_first_ones_leave() -> None:
    one, other = Costly(chain([7], [0.8])), Costly(chain([8], [0.8]))
    judge = Judge()
    draft = Arbiter([judge, one, other]).propose([ask()])[0]
    assert sorted(draft.token_ids.tolist()) == [7, 8]
    assert len(judge.asked) == 2 + 2  # alone, with offers, and behind each source's token


def test_beside_a_chain_the_better_one_is_taken_and_offers_are_judged() -> None:
    judge = Judge({1: chain([5], [0.2])})
    draft = Arbiter([judge, Costly(chain([7, 8], None))]).propose([ask(is_tree=False)])[0]
    assert draft.token_ids.tolist() == [7, 8] and draft.parents is None
    judge = Judge({1: chain([5], [0.99])})
    assert Arbiter([judge, Costly(chain([7], None))]).propose([ask(is_tree=False)])[0].token_ids.tolist() == [5]


def test_a_source_that_fails_leaves_the_first_ones_draft() -> None:
    judge, costly = Judge({1: tree([5], [-1], [0.5])}), Costly(chain([7], [0.9]))
    costly.failing = True
    arbiter = Arbiter([judge, costly])
    for _ in range(4):
        assert arbiter.propose([ask()])[0].token_ids.tolist() == [5]
    assert arbiter.num_failures == 2 == len(costly.asked)
    arbiter.observe("a", EMPTY_DRAFT, 0)
    assert judge.told == [("a", [], [], 0)]
    arbiter.finish("a")
    assert judge.finished == ["a"]


def test_requests_beside_each_other_get_what_is_theirs() -> None:
    judge = Judge({1: tree([5], [-1], [0.5])})
    drafts = Arbiter([judge, Costly(chain([7], [0.9]))]).propose([ask("a"), ask("b", limit=0), ask("c", price=None)])
    assert [sorted(draft.token_ids.tolist()) for draft in drafts] == [[5, 7], [], [5, 7]]


trees = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 12), st.floats(0.01, 1.0)), max_size=12)


def planted(nodes: Sequence[tuple[int, int, float]]) -> Draft:
    return tree(
        [token for token, _, _ in nodes],
        [min(parent, i - 1) for i, (_, parent, _) in enumerate(nodes)],
        [estimate for _, _, estimate in nodes],
    )


def branches(draft: Draft) -> list[list[int]]:
    """Of each token the tokens from the context to it."""
    found: list[list[int]] = []
    parents = range(-1, len(draft.token_ids) - 1) if draft.parents is None else draft.parents.tolist()
    for token, parent in zip(draft.token_ids.tolist(), parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


@given(trees, trees, st.integers(0, 30), st.floats(0.0, 0.5))
def test_a_graft_has_the_branches_of_both_and_the_best_of_them_first(
    one: list[tuple[int, int, float]], other: list[tuple[int, int, float]], limit: int, price: float
) -> None:
    first, second, merged = planted(one), planted(other), MergedTree()
    nodes = [merged.add(first), merged.add(second)]
    assert merged.find(second) == nodes[1]
    whole, order = merged.best(100, np.zeros(1))
    assert sorted(order) == list(range(len(merged.token_ids)))
    expected = {tuple(branch) for branch in branches(first) + branches(second)}
    assert sorted(map(tuple, branches(whole))) == sorted(expected)
    assert depth_of(whole) == max(map(len, expected), default=0)
    cut, _ = merged.best(limit, np.array([price]))
    chances = sorted(merged.chances, reverse=True)
    assert cut.chances() == pytest.approx([chance for chance in chances[:limit] if chance >= price])
    assert cut.parents is not None and (cut.parents < np.arange(len(cut.token_ids))).all()


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.4, 3.0, 50.0]), st.sampled_from([0.0, 0.5, 0.99]), st.integers(0, 9)),
        max_size=100,
    ),
    st.sampled_from([0.0, 0.4, 3.0, 50.0]),
    st.sampled_from([0.0, 0.5, 0.99]),
)
def test_expected_excess_is_the_mean_of_those_alike_leaning_on_all(
    seen: list[tuple[float, float, int]], promised: float, first: float
) -> None:
    excess = Excess()
    for each in seen:
        excess.learn(*each)
    assert excess.expected(promised, first) == pytest.approx(mean_excess(seen, promised, first))


def test_excess_follows_traffic_that_changes() -> None:
    excess = Excess()
    for _ in range(2000):
        excess.learn(0.5, 0.4, 3)
    assert excess.expected(0.5, 0.4) == pytest.approx(3.0, abs=0.05)
    assert excess.expected(30.0, 0.99) == pytest.approx(3.0, abs=0.1)
    for _ in range(1000):
        excess.learn(30.0, 0.99, 0)
    assert excess.expected(30.0, 0.99) < 0.1 < 2.5 < excess.expected(0.5, 0.4)
