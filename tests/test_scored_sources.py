"""What other sources offer and the target's own candidates: judged with all else, against the slow twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise, request_key
from ssd.drafting.protocol import (
    HEAD,
    MAX_PROPOSED_TOKENS,
    NUM_PROPOSER_KINDS,
    Draft,
    DraftRequest,
    ExternalProposals,
    SamplingContext,
    ScoredPass,
)
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot
from tests.reference import acceptance as slow
from tests.reference import drafting as reference
from tests.reference.successors import entries_of_row
from tests.test_acceptance import asked_of, check_draft, levels_of
from tests.test_row_choice import gumbel_of
from tests.test_search import contexts, sequences, snapshots
from tests.test_token_recycling import scored_pass

Offered = list[tuple[int, int, float, int]]

FOREIGN = (1 << 31) - 1
TOKENS = st.sampled_from([*range(5), FOREIGN, -1])
CHANCES = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0, -1.0, float("nan")])
offers = st.lists(st.tuples(TOKENS, st.integers(-2, 9), CHANCES, st.integers(0, NUM_PROPOSER_KINDS - 1)), max_size=10)
told = st.lists(
    st.tuples(st.integers(-1, 4), st.integers(0, 4), st.lists(st.integers(0, 5), min_size=1, unique=True)), max_size=12
)
few_snapshots = st.builds(reference.make_snapshot, st.lists(sequences, max_size=2), st.one_of(st.just([]), sequences))


def offers_of(offered: Offered) -> ExternalProposals:
    tokens, parents, chances, kinds = (list(each) for each in zip(*offered, strict=True)) if offered else ([],) * 4
    return ExternalProposals(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(chances, float), np.array(kinds, np.int32)
    )


def said(positions: list[tuple[int, int, list[int]]], seed: int = 0, learned: LearnedState | None = None) -> ScoredPass:
    """A pass of one position each: the token before, the token fed, the most probable ones after it."""
    rows = [("a", learned, True, [before, token], tops) for before, token, tops in positions]
    return scored_pass(rows, seed=seed)


def asked(
    snapshot: Snapshot | None,
    context: list[int],
    limit: int,
    offered: Offered,
    temperature: float,
    prompt_length: int = 0,
    **more: Any,
) -> DraftRequest:
    return DraftRequest(
        "a",
        np.array(context, np.int32),
        prompt_length,
        snapshot,
        limit,
        proposals=offers_of(offered),
        sampling=SamplingContext(params=SamplingParams(temperature=temperature), noise=SequenceNoise.seeded(0)),
        **more,
    )


def situation(
    drafter: SuffixDrafter,
    snapshot: Snapshot,
    context: list[int],
    offered: Offered,
    positions: list[Any],
    seed: int,
    temperature: float,
) -> slow.Asked:
    """What the twin knows when the drafter is told what the target said."""
    successors: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    if positions:
        scored = said(positions, seed)
        drafter.observe([], scored)
        drafter.learn_scores(scored)
        for b in range(len(positions)):
            successors |= dict(entries_of_row(scored, b))
    temperature_bucket = 0 if temperature == 0 else 1 if temperature <= 0.5 else 2
    by_path = slow.offers_by_path([(t, p, max(c, 0.0) if c == c else 0.0, k) for t, p, c, k in offered])
    more: dict[str, Any] = {"offers": by_path, "successors": successors, "temperature_bucket": temperature_bucket}
    if temperature:
        more |= {"noise": partial(noise_behind, len(context)), "temperature": temperature}
    return asked_of(snapshot, context, **more)


def noise_behind(length: int, draft: Sequence[int], token: int) -> float:
    """The target's noise for requests with seed 0."""
    return float(gumbel_of(np.uint64(request_key(0, 0)), length + len(draft), token))


@given(
    snapshots,
    contexts.filter(bool),
    st.integers(1, 12),
    st.just([]) | offers,
    st.just([]) | told,
    st.integers(0, 9),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.02, 0.1, 0.5]),
    st.integers(1, 3),
    st.integers(0, 9),
    st.booleans(),
)
@settings(max_examples=300)
def test_drafts_of_all_sources_are_those_of_the_slow_twin(
    snapshot: Snapshot,
    context: list[int],
    limit: int,
    offered: Offered,
    positions: list[Any],
    seed: int,
    temperature: float,
    price: float,
    least: int,
    prompt_length: int,
    tree: bool,
) -> None:
    levels, drafter = levels_of(snapshot, context, limit + 1, least), SuffixDrafter(min_match_length=least)
    known = situation(drafter, snapshot, context, offered, positions, seed, temperature)
    token_costs = np.array([price])
    request = asked(
        snapshot, context, limit, offered, temperature, prompt_length, token_costs=token_costs, allow_tree=tree
    )
    check_draft(drafter.propose([request])[0], request, levels, replace(known, prompt_length=prompt_length))


def drafted(drafter: SuffixDrafter, context: list[int], offered: Offered, **more: Any) -> Draft:
    return drafter.propose([asked(None, context, 8, offered, 0.0, token_costs=np.array([0.02]), **more)])[0]


def test_what_the_target_held_likely_is_drafted_where_nothing_was_said_before() -> None:
    drafter = SuffixDrafter()
    drafter.observe([], told := said([(2, 3, [40, 41]), (3, 40, [42]), (40, 42, [43])]))
    drafter.learn_scores(told)
    draft = drafted(drafter, [1, 2, 3], [])
    assert (draft.token_ids.tolist()[:2], draft.source) == ([40, 42], "recycling")
    assert len(drafted(SuffixDrafter(recycling=False), [1, 2, 3], []).token_ids) == 0


@pytest.mark.parametrize("tree", [False, True])
def test_what_a_head_began_is_carried_on_by_places_that_say_it(tree: bool) -> None:
    """The text stands in the index, but behind other tokens: nothing is found before the head has said some of it."""
    snapshot = reference.make_snapshot([[*range(90, 120), SEPARATOR]])
    began: Offered = [(token, token - 101, 0.95, HEAD) for token in range(100, 105)]
    request = asked(snapshot, [1, 2, 3], 16, began, 0.0, token_costs=np.array([0.01]), allow_tree=tree)
    assert SuffixDrafter().propose([request])[0].token_ids.tolist() == [*range(100, 116)]
    request.proposals = offers_of(began[:2])
    assert SuffixDrafter().propose([request])[0].token_ids.tolist() == [100, 101]


def scored(fed: list[int], parents: list[int] | None, chosen: list[int], path: list[int]) -> ScoredPass:
    told = scored_pass([("a", None, True, [1, *fed], [])], parents=None if parents is None else np.array([parents]))
    return replace(told, sampled_ids=np.array([chosen]), last_accepted=np.array([path[-1] if path else -1], np.int64))


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
    drafter.propose([DraftRequest("a", context, 2, None, 4, allow_tree=tree)])
    drafter.observe([], told := scored(*row))
    drafter.learn_scores(told)
    request = DraftRequest("a", np.array(text, np.int32), 2, None, 8, allow_tree=tree, token_costs=np.array([0.001]))
    for _ in range(2):  # asked again in the same step, with what others offer
        draft = drafter.propose([request])[0]
        assert draft.token_ids.tolist() == guessed
        assert draft.source == ("lookahead" if guessed else "none")
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
    drafter.observe([], told := scored(fed, parents if seed % 2 else None, chosen, [0, end] if end else [0]))
    drafter.learn_scores(told)
    text = np.array([fed[end], chosen[end]], np.int32)
    draft = drafter.propose([DraftRequest("a", text, 2, None, 64, token_costs=np.array([1e-9]))])[0]
    assert set(draft.token_ids.tolist()) <= set(chosen)


def test_without_lookups_only_what_others_say_is_drafted() -> None:
    text = [1, 2, 3, 4] * 9
    drafter = SuffixDrafter(retrieval=False)
    snapshot = reference.make_snapshot([[*text, SEPARATOR]])
    for requests in (1, 3):
        for tree in (False, True):
            each = [asked(snapshot, text, 8, [(9, -1, 0.9, HEAD)], 0.0, allow_tree=tree) for _ in range(requests)]
            for number, request in enumerate(each):
                request.request_id = str(number)
            drafts = drafter.propose(each)
            assert [(draft.token_ids.tolist(), draft.source) for draft in drafts] == [([9], "head")] * requests


def test_more_offers_than_are_taken_are_cut() -> None:
    many: Offered = [
        (100 + i, -1, 0.9 if i == MAX_PROPOSED_TOKENS else 0.1, HEAD) for i in range(2 * MAX_PROPOSED_TOKENS)
    ]
    for tree in (False, True):
        draft = drafted(SuffixDrafter(), [1], many, allow_tree=tree)
        assert all(100 <= token < 100 + MAX_PROPOSED_TOKENS for token in draft.token_ids.tolist())


def test_an_offered_chance_learns_what_it_is_worth() -> None:
    """A head that always says 0.9 and is right every third time."""
    drafter, random, late = SuffixDrafter(default_token_cost=0.02), np.random.default_rng(2), []
    for number in range(400):
        context = random.integers(0, 30_000, 6).astype(np.int32)
        offer = ExternalProposals(
            np.array([50_000], np.int32), np.array([-1], np.int32), np.array([0.9]), np.zeros(1, np.int32)
        )
        draft = drafter.propose([DraftRequest(str(number), context, 6, None, 4, proposals=offer)])[0]
        came = random.random() < 1 / 3
        text = np.append(context, 50_000 if came else 60_000).astype(np.int32)
        drafter.propose([DraftRequest(str(number), text, 6, None, 4)])
        drafter.finish(str(number))
        if number >= 200 and draft.probabilities is not None:
            late.append(float(draft.probabilities[0]))
    assert len(late) > 100 and abs(np.mean(late) - 1 / 3) < 0.1
