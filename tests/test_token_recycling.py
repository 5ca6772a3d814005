"""What the target said lately is kept a namespace apart, and exactly as it was said."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.drafting import token_recycling as tables
from ssd.drafting.protocol import ScoredPass
from ssd.drafting.token_recycling import (
    IDLE_PASSES,
    MAX_TABLES,
    NO_ENTRY,
    TOP_K,
    NamespaceRecyclingTables,
    entry_after_pair,
    entry_after_token,
    recycling_table_at,
)
from ssd.jit.addresses import kernel
from ssd.retrieval.cache_state import LearnedState
from tests.reference.successors import Entry, entries_of_row

BIG = (1 << 31) - 1
TOKENS = st.sampled_from([0, 1, 2, 3, 77, 16_384, 151_000, BIG])


@kernel
def _read(table: int, before: int, token: int, out: np.ndarray) -> int:
    found = recycling_table_at(table)
    row = entry_after_token(found, token) if before == -2 else entry_after_pair(found, before, token)
    if row == NO_ENTRY:
        return 0
    size = 0
    for i in range(TOP_K):
        out[i, 0], out[i, 1] = found.entries[row].tokens[i], found.entries[row].shares[i]
        if out[i, 0] >= 0:
            size = i + 1
    return size


def entry(table: int, key: Sequence[int]) -> Entry:
    """What a table knows after a token or a pair; nothing is an empty list."""
    out = np.zeros((TOP_K, 2), np.int64)
    before, token = (-2, key[0]) if len(key) == 1 else key
    size = _read(table, before, token, out) if table else 0
    return [(int(a), int(b)) for a, b in out[:size]]


def scored_pass(
    rows: Sequence[tuple[str, LearnedState | None, bool, list[int], list[int]]],
    *,
    parents: np.ndarray | None = None,
    seed: int = 0,
) -> ScoredPass:
    """A pass of rows (request, learned, may keep, [before, *fed], the most probable tokens after every position)."""
    count, width = len(rows), max(len(row[3]) - 1 for row in rows)
    fed, top_ids = np.zeros((count, width), np.int64), np.full((count, width, TOP_K), -1, np.int32)
    for b, (_, _, _, text, tops) in enumerate(rows):
        fed[b, : len(text) - 1] = text[1:]
        top_ids[b, :, : len(tops)] = tops
    logits = -np.sort(-np.random.default_rng(seed).normal(0, 2, top_ids.shape), axis=-1)
    logits[top_ids < 0] = -np.inf
    return ScoredPass(
        request_ids=[row[0] for row in rows],
        learned=[row[1] for row in rows],
        allow_caching=np.array([row[2] for row in rows]),
        previous_ids=np.array([row[3][0] for row in rows], np.int32),
        input_ids=fed,
        num_positions=np.array([len(row[3]) - 1 for row in rows]),
        parents=parents,
        sampled_ids=np.maximum(top_ids[..., 0], 0).astype(np.int64),
        last_accepted=np.zeros(count, np.int64),
        top_ids=top_ids,
        top_logits=logits.astype(np.float32),
    )


@st.composite
def passes(draw: st.DrawFn) -> ScoredPass:
    """Any pass of one namespace: trees and chains, ties, few tokens, logits that are no numbers."""
    num_rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    grid = (num_rows, width)
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    top_ids = random.integers(0, 40, (*grid, TOP_K)).astype(np.int32)
    top_ids[np.arange(TOP_K) >= random.integers(0, TOP_K + 1, grid)[..., None]] = -1
    logits = -np.sort(-random.choice([-3, -1, 0.5, 0.75, 2, 9], top_ids.shape)).astype(np.float32)
    if draw(st.booleans()):
        logits[random.random(logits.shape) < 0.1] = draw(st.sampled_from([np.nan, np.inf]))
    parents = np.array([[-1, *(int(random.integers(0, t)) for t in range(1, width))] for _ in range(num_rows)])
    return ScoredPass(
        request_ids=[str(b) for b in range(num_rows)],
        learned=[NAMESPACE] * num_rows,
        allow_caching=np.ones(num_rows, np.bool_),
        previous_ids=np.array(draw(st.lists(TOKENS | st.just(-1), min_size=num_rows, max_size=num_rows)), np.int32),
        input_ids=np.array(
            [draw(st.lists(TOKENS | st.just(-5), min_size=width, max_size=width)) for _ in range(num_rows)]
        ),
        num_positions=random.integers(0, width + 1, num_rows),
        parents=parents if draw(st.booleans()) else None,
        sampled_ids=np.zeros(grid, np.int64),
        last_accepted=np.zeros(num_rows, np.int64),
        top_ids=top_ids,
        top_logits=logits,
    )


NAMESPACE = LearnedState()


@settings(max_examples=60, deadline=None)
@given(st.lists(passes(), min_size=1, max_size=3))
def test_a_table_knows_what_was_said_last_after_every_token_and_pair(told: list[ScoredPass]) -> None:
    successors, expected = NamespaceRecyclingTables(), dict[tuple[int, ...], Entry]()
    for scored in told:
        successors.learn(scored)
        for b in range(len(scored.num_positions)):
            expected |= dict(entries_of_row(scored, b))
    table = successors.table_address(NAMESPACE, "any")
    known = [key for key in expected if entry(table, key)]
    assert all(entry(table, key) == expected[key] for key in known)
    # Of entries that share a place the newest is there: of so few tokens hardly any do.
    assert len(known) >= len(expected) - 2
    assert entry(table, (123_456,)) == entry(table, (77, 123_456)) == entry(table, (-1, 5)) == entry(table, (-5,)) == []


def test_what_one_namespace_said_no_other_drafts() -> None:
    successors = NamespaceRecyclingTables()
    one, other = LearnedState(), LearnedState()
    successors.learn(
        scored_pass(
            [
                ("in one", one, True, [1, 2, 3], [10, 11]),
                ("in other", other, True, [1, 2, 3], [20, 21]),
                ("of nobody", None, True, [1, 2, 3], [30, 31]),
                ("of nobody too", None, False, [1, 2, 3], [40, 41]),
                ("leaves nothing", one, False, [1, 2, 3], [50, 51]),
            ]
        )
    )

    def said(learned: LearnedState | None, request_id: str) -> set[int]:
        table = successors.table_address(learned, request_id)
        return {token for key in [(2,), (3,), (1, 2), (2, 3)] for token, _ in entry(table, key)}

    assert said(one, "any") == {10, 11} == said(one, "leaves nothing")
    assert said(other, "any") == {20, 21}
    assert said(None, "of nobody") == {30, 31} and said(None, "of nobody too") == {40, 41}
    assert said(None, "a third") == said(LearnedState(), "in one") == set()
    successors.ended("of nobody")
    assert said(None, "of nobody") == set() and said(None, "of nobody too") == {40, 41}


def test_the_table_used_longest_ago_gives_way_and_none_that_is_in_use() -> None:
    successors, namespaces = NamespaceRecyclingTables(), [LearnedState() for _ in range(MAX_TABLES + 1)]
    *first, late = namespaces

    def learn(*those: LearnedState) -> None:
        successors.learn(scored_pass([(str(i), each, True, [1, 2], [10]) for i, each in enumerate(those)]))

    learn(*first, late)
    assert all(successors.table_address(each, "") for each in first) and successors.table_address(late, "") == 0
    for _ in range(IDLE_PASSES):
        learn(*first[1:], late)
    learn(late)
    assert successors.table_address(late, "") and not successors.table_address(first[0], "")
    assert all(entry(successors.table_address(each, ""), (2,)) == [(10, 7)] for each in namespaces[1:])


def test_requests_of_their_own_have_no_more_tables_than_namespaces() -> None:
    successors = NamespaceRecyclingTables()
    names = [str(i) for i in range(MAX_TABLES + 3)]
    successors.learn(scored_pass([(name, None, False, [1, 2], [10]) for name in names]))
    assert sum(bool(successors.table_address(None, name)) for name in names) == MAX_TABLES
    successors.ended(names[0])
    successors.learn(scored_pass([(names[-1], None, False, [1, 2], [10])]))
    assert successors.table_address(None, names[-1])


def test_a_table_is_forgotten_with_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_TABLES", 1)
    successors, gone = NamespaceRecyclingTables(), LearnedState()
    successors.learn(scored_pass([("a", gone, True, [1, 2], [10])]))
    del gone
    gc.collect()
    other = LearnedState()
    successors.learn(scored_pass([("b", other, True, [1, 2], [20])]))
    assert entry(successors.table_address(other, ""), (1, 2)) == [(20, 7)]
