"""What other sources offer and the target's own candidates: judged with all else, against the slow twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ssd.config import SamplingParams
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.grow import CHAIN_CANDIDATES, CHAIN_RECYCLED
from ssd.drafting.noise import SequenceNoise, request_key
from ssd.drafting.protocol import (
    GUESS,
    HEAD,
    KINDS,
    MAX_OFFERED,
    MODEL,
    Draft,
    DraftRequest,
    Offers,
    SamplingRow,
    ScoredPass,
)
from ssd.drafting.vote import MAX_RECYCLED
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot
from tests.reference import acceptance as slow
from tests.reference import drafting as reference
from tests.reference.successors import entries_of_row
from tests.test_acceptance import asked_of, levels_of
from tests.test_noise_keys import gumbel_of
from tests.test_search import contexts, sequences

Offered = list[tuple[int, int, float, int]]

FOREIGN = (1 << 31) - 1
TOKENS = st.sampled_from([*range(5), FOREIGN, -1])
CHANCES = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0, -1.0, float("nan")])
offers = st.lists(st.tuples(TOKENS, st.integers(-2, 9), CHANCES, st.integers(0, KINDS - 1)), max_size=10)
told = st.lists(
    st.tuples(st.integers(-1, 4), st.integers(0, 4), st.lists(st.integers(0, 5), min_size=1, unique=True)), max_size=12
)
few_snapshots = st.builds(reference.make_snapshot, st.lists(sequences, max_size=2), st.one_of(st.just([]), sequences))


def offers_of(offered: Offered) -> Offers:
    tokens, parents, chances, kinds = (list(each) for each in zip(*offered, strict=True)) if offered else ([],) * 4
    return Offers(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(chances, float), np.array(kinds, np.int32)
    )


def said(positions: list[tuple[int, int, list[int]]], seed: int = 0, learned: LearnedState | None = None) -> ScoredPass:
    """A pass of one position each: the token before, the token fed, the most probable ones after it."""
    count = len(positions)
    top_ids = np.full((count, 1, 8), -1, np.int32)
    for b, (_, _, tops) in enumerate(positions):
        top_ids[b, 0, : len(tops)] = tops
    logits = -np.sort(-np.random.default_rng(seed).normal(0, 2, top_ids.shape), axis=-1)
    return ScoredPass(
        request_ids=["a"] * count,
        learned=[learned] * count,
        may_keep=np.ones(count, np.bool_),
        before=np.array([before for before, _, _ in positions], np.int32),
        fed=np.array([[token] for _, token, _ in positions]),
        counts=np.ones(count, np.int64),
        parents=None,
        chosen=np.zeros((count, 1), np.int64),
        ends=np.zeros(count, np.int64),
        top_ids=top_ids,
        top_logits=logits.astype(np.float32),
    )


def asked(
    snapshot: Snapshot | None, context: list[int], limit: int, offered: Offered, temperature: float, **more: Any
) -> DraftRequest:
    return DraftRequest(
        "a",
        np.array(context, np.int32),
        0,
        snapshot,
        limit,
        offers=offers_of(offered),
        sampling=SamplingRow(params=SamplingParams(temperature=temperature), noise=SequenceNoise.seeded(0)),
        **more,
    )


def situation(
    snapshot: Snapshot, context: list[int], offered: Offered, positions: list[Any], seed: int, temperature: float
) -> tuple[SuffixDrafter, slow.Asked]:
    """A drafter that was told what the target said, and what the twin knows."""
    drafter, scored = SuffixDrafter(), said(positions, seed)
    successors: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    if positions:
        drafter.observe_scores(scored)
        drafter.learn_scores(scored)
        for b in range(len(positions)):
            successors |= dict(entries_of_row(scored, b))
    warmth = 0 if temperature == 0 else 1 if temperature <= 0.5 else 2
    by_path = slow.offers_by_path([(t, p, max(c, 0.0) if c == c else 0.0, k) for t, p, c, k in offered])
    more: dict[str, Any] = {"offers": by_path, "successors": successors, "warmth": warmth}
    if temperature:
        more |= {"noise": partial(noise_behind, len(context)), "temperature": temperature}
    return drafter, asked_of(snapshot, context, **more)


def noise_behind(length: int, draft: Sequence[int], token: int) -> float:
    """The target's noise for requests with seed 0."""
    return float(gumbel_of(np.uint64(request_key(0, 0)), length + len(draft), token))


situations = (few_snapshots, contexts.filter(bool), st.integers(1, 6), offers, told, st.integers(0, 9),
              st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.02, 0.2]))  # fmt: skip


@given(*situations)
@settings(max_examples=150)
def test_a_chain_takes_the_best_of_all_sources(
    snapshot: Snapshot,
    context: list[int],
    limit: int,
    offered: Offered,
    positions: list[Any],
    seed: int,
    temperature: float,
    price: float,
) -> None:
    levels = levels_of(snapshot, context, limit + 1)
    drafter, known = situation(snapshot, context, offered, positions, seed, temperature)
    request = asked(snapshot, context, limit, offered, temperature, prices=np.array([price]))
    draft, model, product = drafter.propose([request])[0], slow.SlowModel(), 1.0
    tokens = draft.token_ids.tolist()
    for depth in range(len(tokens) + 1):
        if depth and not slow.goes_on(levels, tokens[:depth]):
            return  # looked up again
        voted = slow.candidates(levels, replace(known, successors={}), tokens[:depth], model)
        assume(len(voted) <= CHAIN_CANDIDATES)  # which of more are judged is not the twin's to say
        found = slow.candidates(levels, known, tokens[:depth], model, most_recycled=CHAIN_RECYCLED)
        best = max((chance for chance, _, _ in found.values()), default=0.0)
        if depth == len(tokens):
            assert not found or depth == limit or product * best < price + 1e-9
            break
        assert draft.probabilities is not None
        assert draft.probabilities[depth] == pytest.approx(best, rel=1e-9)
        assert found[tokens[depth]][0] == pytest.approx(best, rel=1e-9)
        product *= best


@given(*situations)
@settings(max_examples=100)
def test_a_tree_holds_the_most_probable_nodes_of_all_sources(
    snapshot: Snapshot,
    context: list[int],
    limit: int,
    offered: Offered,
    positions: list[Any],
    seed: int,
    temperature: float,
    price: float,
) -> None:
    levels = levels_of(snapshot, context, limit + 1)
    drafter, known = situation(snapshot, context, offered, positions, seed, temperature)
    request = asked(snapshot, context, limit, offered, temperature, prices=np.array([price]), tree=True)
    draft, model = drafter.propose([request])[0], slow.SlowModel()
    products: list[float] = []
    open_paths: list[tuple[float, list[int]]] = [(1.0, [])]
    while open_paths:
        product, path = open_paths.pop()
        if path and not slow.goes_on(levels, path):
            return  # looked up again
        for token, (chance, _, _) in slow.candidates(levels, known, path, model, most_recycled=MAX_RECYCLED).items():
            if product * chance >= price and len(path) < limit:
                products.append(product * chance)
                open_paths.append((product * chance, [*path, token]))
    chances = [] if draft.probabilities is None else draft.chances().tolist()
    assert chances == pytest.approx(sorted(products, reverse=True)[:limit], rel=1e-9)
    siblings = [] if draft.parents is None else list(zip(draft.parents.tolist(), draft.token_ids.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)


def drafted(drafter: SuffixDrafter, context: list[int], offered: Offered, **more: Any) -> Draft:
    return drafter.propose([asked(None, context, 8, offered, 0.0, prices=np.array([0.02]), **more)])[0]


@pytest.mark.parametrize(("kind", "name"), [(HEAD, "head"), (MODEL, "model"), (GUESS, "guess")])
def test_an_offer_is_drafted_where_nothing_was_said_before(kind: int, name: str) -> None:
    chain: Offered = [(7, -1, 0.9, kind), (8, 0, 0.9, kind), (9, 1, 0.8, kind)]
    draft = drafted(SuffixDrafter(), [1, 2, 3], chain)
    assert (draft.token_ids.tolist(), draft.source) == ([7, 8, 9], name)
    assert draft.probabilities is not None and (draft.probabilities > 0.7).all()


def test_a_tree_holds_equal_siblings_once_and_what_stands_behind_each() -> None:
    twice: Offered = [(7, -1, 0.5, HEAD), (7, -1, 0.6, GUESS), (8, 0, 0.9, HEAD), (9, 1, 0.9, GUESS)]
    draft = drafted(SuffixDrafter(), [1, 2, 3], twice, tree=True)
    assert draft.parents is not None
    pairs = set(zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True))
    assert pairs == {(7, -1), (8, 0), (9, 0)}


def test_what_the_target_held_likely_is_drafted_where_nothing_was_said_before() -> None:
    drafter = SuffixDrafter()
    drafter.observe_scores(told := said([(2, 3, [40, 41]), (3, 40, [42]), (40, 42, [43])]))
    drafter.learn_scores(told)
    draft = drafted(drafter, [1, 2, 3], [])
    assert (draft.token_ids.tolist()[:2], draft.source) == ([40, 42], "recycled")
    assert len(drafted(SuffixDrafter(recycling=False), [1, 2, 3], []).token_ids) == 0


def test_offers_and_places_go_on_behind_each_other() -> None:
    snapshot = reference.make_snapshot([[5, 6, *range(100, 120), SEPARATOR]])
    behind_places: Offered = [(100, -1, 0.9, HEAD), (101, 0, 0.9, HEAD), (60, 1, 0.9, HEAD)]
    request = asked(snapshot, [5, 6], 24, behind_places, 0.0, prices=np.array([0.001]), tree=True)
    draft = SuffixDrafter().propose([request])[0]
    assert draft.parents is not None
    at = draft.token_ids.tolist()
    assert at[draft.parents[at.index(60)]] == 101 == at[draft.parents[at.index(102)]]


@pytest.mark.parametrize("tree", [False, True])
def test_what_a_head_began_is_carried_on_by_places_that_say_it(tree: bool) -> None:
    """The text stands in the index, but behind other tokens: nothing is found before the head has said some of it."""
    snapshot = reference.make_snapshot([[*range(90, 120), SEPARATOR]])
    began: Offered = [(token, token - 101, 0.95, HEAD) for token in range(100, 105)]
    request = asked(snapshot, [1, 2, 3], 16, began, 0.0, prices=np.array([0.01]), tree=tree)
    assert SuffixDrafter().propose([request])[0].token_ids.tolist() == [*range(100, 116)]
    request.offers = offers_of(began[:2])
    assert SuffixDrafter().propose([request])[0].token_ids.tolist() == [100, 101]


def test_a_tree_is_carried_on_past_the_end_of_all_it_was_drawn_from() -> None:
    first, second = [*range(60)], [*range(40, 100)]
    snapshot = reference.make_snapshot([[*first, SEPARATOR], [*second, SEPARATOR]])
    request = DraftRequest("a", np.arange(30, dtype=np.int32), 0, snapshot, 60, prices=np.array([1e-6]), tree=True)
    assert [*range(30, 90)] == sorted(set(SuffixDrafter().propose([request])[0].token_ids.tolist()))


def scored(fed: list[int], parents: list[int] | None, chosen: list[int], path: list[int]) -> ScoredPass:
    width = len(fed)
    return ScoredPass(
        request_ids=["a"],
        learned=[None],
        may_keep=np.ones(1, np.bool_),
        before=np.array([1], np.int32),
        fed=np.array([fed]),
        counts=np.array([width]),
        parents=None if parents is None else np.array([parents]),
        chosen=np.array([chosen]),
        ends=np.array(path[-1:], np.int64),
        top_ids=np.full((1, width, 8), -1, np.int32),
        top_logits=np.zeros((1, width, 8), np.float32),
    )


@pytest.mark.parametrize(
    ("row", "text", "guessed"),
    [
        # 20 was wrong, the target said 30; behind 20 it said 21 as the draft did, then 23 and 24
        (([2, 20, 21, 22], None, [30, 21, 23, 24], [0]), [1, 2, 30], [21, 23, 24]),
        (([2, 20, 21, 22], None, [20, 31, 23, 24], [0, 1]), [1, 2, 20, 31], [23, 24]),
        (([2, 20, 21], None, [20, 21, 32], [0, 1, 2]), [1, 2, 20, 21, 32], []),
        (([2], None, [30], [0]), [1, 2, 30], []),
        # a tree: behind the first wrong child, along what the target said
        (([2, 20, 40, 21, 22], [-1, 0, 0, 1, 1], [30, 22, 9, 9, 23], [0]), [1, 2, 30], [22, 23]),
        # another text, or none: the request was not asked in between
        (([2, 20, 21, 22], None, [30, 21, 23, 24], [0]), [1, 2, 30, 5], []),
        (([2, 20, 21, 22], None, [30, 21, 23, 24], [0]), [30], []),
        (([2, 20, 21, 22], None, [30, 21, 23, 24], []), [1, 2, 30], []),
    ],
)
@pytest.mark.parametrize("tree", [False, True])
def test_what_was_said_behind_a_wrong_token_is_offered_at_its_place(
    row: tuple[list[int], list[int] | None, list[int], list[int]], text: list[int], guessed: list[int], tree: bool
) -> None:
    drafter = SuffixDrafter()
    context = np.array([1, 2], np.int32)
    drafter.propose([DraftRequest("a", context, 2, None, 4, tree=tree)])
    drafter.observe_scores(told := scored(*row))
    drafter.learn_scores(told)
    request = DraftRequest("a", np.array(text, np.int32), 2, None, 8, tree=tree, prices=np.array([0.001]))
    for _ in range(2):  # asked again in the same step, with what others offer
        draft = drafter.propose([request])[0]
        assert draft.token_ids.tolist() == guessed
        assert draft.source == ("guess" if guessed else "none")
    drafter.finish("a")
    assert len(drafter.propose([request])[0].token_ids) == 0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_guesses_of_any_pass_are_tokens_that_the_target_chose(seed: int) -> None:
    random = np.random.default_rng(seed)
    width = int(random.integers(1, 40))
    parents = [-1, *(int(random.integers(0, node)) for node in range(1, width))]
    fed, chosen = random.integers(0, 4, width).tolist(), random.integers(0, 4, width).tolist()
    end = int(random.integers(0, width))
    drafter = SuffixDrafter()
    drafter.propose([DraftRequest("a", np.array([1, 2], np.int32), 2, None, 4)])
    drafter.observe_scores(told := scored(fed, parents if seed % 2 else None, chosen, [0, end] if end else [0]))
    drafter.learn_scores(told)
    text = np.array([fed[end], chosen[end]], np.int32)
    draft = drafter.propose([DraftRequest("a", text, 2, None, 64, prices=np.array([1e-9]))])[0]
    assert set(draft.token_ids.tolist()) <= set(chosen)


def test_without_lookups_only_what_others_say_is_drafted() -> None:
    text = [1, 2, 3, 4] * 9
    drafter = SuffixDrafter(retrieval=False)
    snapshot = reference.make_snapshot([[*text, SEPARATOR]])
    for requests in (1, 3):
        for tree in (False, True):
            each = [asked(snapshot, text, 8, [(9, -1, 0.9, HEAD)], 0.0, tree=tree) for _ in range(requests)]
            for number, request in enumerate(each):
                request.request_id = str(number)
            drafts = drafter.propose(each)
            assert [(draft.token_ids.tolist(), draft.source) for draft in drafts] == [([9], "head")] * requests


def test_more_offers_than_are_taken_are_cut() -> None:
    many: Offered = [(100 + i, -1, 0.9 if i == MAX_OFFERED else 0.1, HEAD) for i in range(2 * MAX_OFFERED)]
    for tree in (False, True):
        draft = drafted(SuffixDrafter(), [1], many, tree=tree)
        assert all(100 <= token < 100 + MAX_OFFERED for token in draft.token_ids.tolist())


def test_an_offered_chance_learns_what_it_is_worth() -> None:
    """A head that always says 0.9 and is right every third time."""
    drafter, random, late = SuffixDrafter(price=0.02), np.random.default_rng(2), []
    for number in range(400):
        context = random.integers(0, 30_000, 6).astype(np.int32)
        offer = Offers(np.array([50_000], np.int32), np.array([-1], np.int32), np.array([0.9]), np.zeros(1, np.int32))
        draft = drafter.propose([DraftRequest(str(number), context, 6, None, 4, offers=offer)])[0]
        came = random.random() < 1 / 3
        text = np.append(context, 50_000 if came else 60_000).astype(np.int32)
        drafter.propose([DraftRequest(str(number), text, 6, None, 4)])
        drafter.finish(str(number))
        if number >= 200 and draft.probabilities is not None:
            late.append(float(draft.probabilities[0]))
    assert len(late) > 100 and abs(np.mean(late) - 1 / 3) < 0.1
