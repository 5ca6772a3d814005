from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.retrieval.prefixes import PrefixFilter, split_sequence
from tests.reference.retrieval import naive_skipped, naive_split


def _tokens(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def _pieces(known: PrefixFilter, ids: list[int], prompt_length: int, position: int = 0) -> list[list[int]]:
    return [piece.tolist() for piece in known.pieces(_tokens(ids), prompt_length, position)]


def test_a_repeated_prompt_is_stored_once_with_its_lead_in() -> None:
    known = PrefixFilter(4, 2)
    prompt = list(range(9))
    assert _pieces(known, [*prompt, 50], 9) == [[*prompt, 50]]
    assert _pieces(known, [*prompt, 60], 9) == [[6, 7, 8, 60]]


def test_the_next_turn_of_a_conversation_stores_only_what_is_new() -> None:
    known = PrefixFilter(4, 2)
    first = list(range(12))  # prompt of 5, completion of 7
    _pieces(known, first, 5)
    assert _pieces(known, [*first, 20, 21, 22], 13) == [[10, 11, 20, 21, 22]]


def test_a_completion_is_always_stored() -> None:
    known = PrefixFilter(4, 2)
    for _ in range(3):
        stored = _pieces(known, list(range(12)), 4)
    assert stored == [[2, 3, *range(4, 12)]]


def test_a_seen_prompt_without_completion_stores_nothing() -> None:
    known = PrefixFilter(4, 2)
    _pieces(known, list(range(8)), 8)
    assert _pieces(known, list(range(8)), 8) == []


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3]])
def test_less_than_a_block_is_stored_whole(ids: list[int]) -> None:
    known = PrefixFilter(4, 2)
    _pieces(known, ids, len(ids))
    assert _pieces(known, ids, len(ids)) == ([ids] if ids else [])


def test_switched_off_it_stores_everything() -> None:
    known = PrefixFilter(0, 2)
    for _ in range(2):
        assert _pieces(known, list(range(8)), 8) == [list(range(8))]
    assert len(known) == 0


def test_an_evicted_block_is_forgotten() -> None:
    known = PrefixFilter(4, 0)
    _pieces(known, list(range(8)), 8, position=100)
    known.forget_before(100)
    assert len(known) == 2
    known.forget_before(101)
    assert len(known) == 0
    assert _pieces(known, list(range(8)), 8, position=200) == [list(range(8))]


def test_a_block_stored_again_outlives_its_first_place() -> None:
    known = PrefixFilter(4, 0)
    _pieces(known, list(range(8)), 0, position=0)
    _pieces(known, list(range(8)), 0, position=9)
    known.forget_before(9)
    assert len(known) == 2


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=14), st.integers(0, 16)), max_size=20),
)
def test_equals_remembering_every_beginning(block_tokens: int, requests: list[tuple[list[int], int]]) -> None:
    known = PrefixFilter(block_tokens, 3)
    beginnings: set[tuple[int, ...]] = set()
    for position, (ids, prompt_length) in enumerate(requests):
        skipped = naive_skipped(beginnings, ids, prompt_length, block_tokens)
        expected = [] if skipped == len(ids) else [ids[max(0, skipped - 3) :]]
        assert [piece for piece in _pieces(known, ids, prompt_length, position) if piece] == [p for p in expected if p]


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 8))
def test_splitting_equals_cutting_step_by_step(length: int, max_tokens: int, lead_in_tokens: int) -> None:
    tokens = np.arange(length, dtype=np.int32)
    pieces = [piece.tolist() for piece in split_sequence(tokens, max_tokens, lead_in_tokens)]
    assert pieces == naive_split(list(range(length)), max_tokens, lead_in_tokens)
    assert {token for piece in pieces for token in piece} == set(range(length))
