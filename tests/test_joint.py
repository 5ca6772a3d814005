"""One draft of several drafters': who is asked at what cost, what is verified, what each is told, and nothing fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ssd.drafting.hybrid_drafter import HybridDrafter, num_shared_tokens
from ssd.drafting.member_drafter import PROBE_INTERVAL
from ssd.drafting.protocol import EMPTY_DRAFT, HEAD, Draft, DraftOutcome, DraftRequest, ScoredPass

STEP_S = 0.1


class Clock:
    """Time passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


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
        proposals = request.proposals
        if proposals is None:
            return own.cut(request.limit)
        chances: dict[tuple[int, ...], tuple[float, float]] = {}
        for each in (own, Draft(proposals.token_ids, probabilities=proposals.probabilities, parents=proposals.parents)):
            assert each.probabilities is not None or not len(each.token_ids)
            paths: list[tuple[int, ...]] = []
            for node, parent in enumerate(each.parents_of_all()):
                paths.append((*(paths[parent] if parent >= 0 else ()), int(each.token_ids[node])))
                assert each.probabilities is not None
                chances.setdefault(paths[-1], (float(each.probabilities[node]), float(each.path_probabilities()[node])))
        order = sorted(chances, key=lambda path: -chances[path][1])[: request.limit]
        parents = [order.index(path[:-1]) if len(path) > 1 else -1 for path in order]
        return tree([path[-1] for path in order], parents, [chances[path][0] for path in order])

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        for each in outcomes:
            path = [] if each.draft.path is None else each.draft.path.tolist()
            self.told.append((each.request_id, each.draft.token_ids.tolist(), path, each.num_accepted))

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)


class Costly:
    """Drafts one chain at a price in seconds a token, and keeps what it is told."""

    kind = HEAD

    def __init__(self, draft: Draft, cost_s: float = 0.0, begin_s: float = 0.0) -> None:
        self.draft, self.cost_s, self.begin_s, self.failing = draft, cost_s, begin_s, False
        self.meanwhile: Callable[[], None] = lambda: None
        self.finished: list[str] = []
        self.asked: list[DraftRequest] = []
        self.told: list[tuple[list[int], int]] = []

    def seconds_per_token(self, num_rows: int) -> float:
        return self.cost_s * num_rows

    def seconds_to_start(self, request: DraftRequest) -> float:
        return 0.0 if self.asked else self.begin_s

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += requests
        self.meanwhile()
        if self.failing:
            raise RuntimeError("injected")
        return [self.draft.cut(request.limit) for request in requests]

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        self.told += [(each.draft.token_ids.tolist(), each.num_accepted) for each in outcomes]

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)
        if self.failing:
            raise RuntimeError("injected")


def ask(name: str = "a", limit: int = 16, price: float | None = 0.01, *, is_tree: bool = True) -> DraftRequest:
    token_costs = None if price is None else np.array([price])
    return DraftRequest(name, np.array([1], np.int32), 1, None, limit, token_costs=token_costs, allow_tree=is_tree)


def verdict(draft: Draft, said: Sequence[int]) -> list[DraftOutcome]:
    """The draft with the path that agrees with what the target says."""
    path = draft.path_of(said)
    return [DraftOutcome("a", draft if draft.parents is None else replace(draft, path=path), len(path))]


def run_steps(arbiter: HybridDrafter, clock: Clock, steps: int, said: Sequence[int]) -> None:
    for _ in range(steps):
        draft = arbiter.propose([ask()])[0]
        clock.now += STEP_S
        arbiter.observe(verdict(draft, said))


def test_what_is_offered_and_what_is_known_go_into_one_tree() -> None:
    judge = Judge({1: tree([5, 6], [-1, 0], [0.5, 0.9])})
    costly = Costly(chain([7, 8], [0.8, 0.8]))
    draft = HybridDrafter([judge, costly]).propose([ask()])[0]
    assert sorted(draft.token_ids.tolist()) == [5, 6, 7, 8]
    assert draft.token_ids[0] == 7 and draft.path_probabilities().tolist() == sorted(
        draft.path_probabilities().tolist(), reverse=True
    )
    proposals = judge.asked[1].proposals
    assert proposals is not None and proposals.token_ids.tolist() == [7, 8] and proposals.kinds.tolist() == [HEAD, HEAD]
    assert proposals.parents.tolist() == [-1, 0] and proposals.probabilities.tolist() == [0.8, 0.8]


def test_a_draft_without_estimates_is_offered_at_its_sources_rate_and_each_is_told_its_own() -> None:
    judge = Judge({1: tree([5, 6], [-1, 0], [0.5, 0.9])})
    costly = Costly(chain([5, 7, 9], None))
    arbiter = HybridDrafter([judge, costly])
    draft = arbiter.propose([ask(limit=4)])[0]
    assert draft.token_ids.tolist() == [5, 7, 6, 9]
    proposals = judge.asked[1].proposals
    assert (
        proposals is not None and len(set(proposals.probabilities.tolist())) == 1 and 0 < proposals.probabilities[0] < 1
    )
    arbiter.observe(verdict(draft, [5, 7]))
    assert judge.told == [("a", [5, 7, 6, 9], [0, 1], 2)]
    assert costly.told == [([5, 7, 9], 2)]


@pytest.mark.parametrize(
    ("own", "verified", "count"),
    [
        (chain([5, 6, 7], None), chain([5, 6], None), 2),
        (chain([5, 6], None), tree([8, 5, 6], [-1, -1, 1], [0.5] * 3), 2),
        (tree([5, 8, 6], [-1, -1, 0], [0.5] * 3), tree([5, 6], [-1, 0], [0.5] * 2), 1),
        (EMPTY_DRAFT, chain([5], None), 0),
        (chain([5], None), EMPTY_DRAFT, 0),
    ],
)
def test_as_much_of_a_draft_was_verified_as_stands_in_the_one_that_was(own: Draft, verified: Draft, count: int) -> None:
    assert num_shared_tokens(own, verified) == count


def test_a_source_that_adds_nothing_is_soon_asked_only_now_and_then() -> None:
    clock = Clock()
    costly = Costly(chain([5, 6], [0.8, 0.8]), cost_s=STEP_S / 10)
    arbiter = HybridDrafter([Judge({1: tree([5, 6], [-1, 0], [0.5, 0.9])}), costly], clock=clock)
    run_steps(arbiter, clock, 150, [5, 6])
    costly.asked.clear()
    run_steps(arbiter, clock, 3 * PROBE_INTERVAL, [5, 6])
    assert len(costly.asked) <= 3


@pytest.mark.parametrize(("beside_s", "is_asked"), [(0.0, True), (STEP_S / 2, True), (3 * STEP_S, False)])
def test_what_an_asking_takes_beside_its_tokens_counts(beside_s: float, is_asked: bool) -> None:
    clock = Clock()
    costly = Costly(chain([7, 8], [0.8, 0.8]), cost_s=STEP_S / 10)
    costly.meanwhile = lambda: clock.wait(beside_s)
    arbiter = HybridDrafter([Judge({1: tree([5, 6], [-1, 0], [0.5, 0.9])}), costly], clock=clock)
    run_steps(arbiter, clock, 150, [7, 8])
    costly.asked.clear()
    run_steps(arbiter, clock, 50, [7, 8])
    assert len(costly.asked) == (50 if is_asked else 0)


FOUR = chain([7, 8, 9, 10], [0.9] * 4)


def seen(arbiter: HybridDrafter, clock: Clock, steps: int, said: Sequence[int] = (7, 8, 9, 10)) -> list[bool]:
    """Of each of so many steps whether anything was drafted."""
    drafted = []
    for _ in range(steps):
        draft = arbiter.propose([ask()])[0]
        clock.now += STEP_S
        arbiter.observe(verdict(draft, said))
        clock.now += 100.0  # idle: does not count
        drafted.append(len(draft.token_ids) > 0)
    return drafted


def test_a_drafter_that_costs_little_is_asked_and_told_its_cost() -> None:
    clock, costly = Clock(), Costly(FOUR, cost_s=STEP_S / 50)
    arbiter = HybridDrafter([Judge(), costly], clock=clock)
    assert all(seen(arbiter, clock, 50))
    # Retrieval brings nothing, so a token saves a step of 0.1 s: 2 ms are worth 0.02 of a token.
    assert costly.asked[-1].token_costs == pytest.approx([0.01 + 0.02])


def test_whom_to_ask_is_considered_ever_more_rarely_while_nobody_is_worth_it() -> None:
    clock = Clock()
    costly = Costly(FOUR, cost_s=100 * STEP_S)
    arbiter = HybridDrafter([Judge(), costly], clock=clock)
    seen(arbiter, clock, 120)
    due = [arbiter.is_due(1) for _ in range(80)]
    assert due[7::8] == [True] * 10 and sum(due) == 10
    assert arbiter._members[1].rows_since_use >= 70
    costly.cost_s = 0.0
    arbiter.propose([ask()])
    assert len(costly.asked) and all(arbiter.is_due(1) for _ in range(10))


def test_reading_begins_when_as_much_has_been_forgone() -> None:
    clock, costly = Clock(), Costly(FOUR, cost_s=STEP_S / 50, begin_s=10 * STEP_S)
    arbiter = HybridDrafter([Judge(), costly], clock=clock)
    # Ten plain steps' tokens are what reading costs; one token a step is what is expected of asking at first.
    arbiter.propose([ask("warm-up")])
    clock.now += STEP_S
    arbiter.observe([DraftOutcome("warm-up", EMPTY_DRAFT, 0)])
    costly.asked.clear()
    drafted = seen(arbiter, clock, 20)
    assert 8 <= drafted.index(True) <= 12
    assert all(drafted[drafted.index(True) :])
    arbiter.finish("a")


def test_what_was_never_proposed_for_is_told_nobody_and_all_hear_of_the_end() -> None:
    judge, costly = Judge({1: chain([5], [0.3])}), Costly(FOUR)
    arbiter = HybridDrafter([judge, costly])
    arbiter.observe([DraftOutcome("never proposed for", EMPTY_DRAFT, 0)])
    assert not judge.told and not costly.told
    arbiter.finish("a")
    assert judge.finished == costly.finished == ["a"]


def test_a_failing_drafter_is_counted_and_asked_ever_more_rarely() -> None:
    judge, costly = Judge({1: chain([5], [0.3])}), Costly(FOUR)
    costly.failing = True
    arbiter = HybridDrafter([judge, costly])
    for _ in range(16):
        assert arbiter.propose([ask()])[0].token_ids.tolist() == [5]
    assert len(costly.asked) == arbiter.num_failures == 4  # at steps 1, 3, 6, 11
    arbiter.finish("a")
    assert costly.finished == ["a"] and arbiter.num_failures == 5
