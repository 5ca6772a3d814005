from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ssd.retrieval.dedup import PromptDeduplicator, split_sequence
from tests.reference.retrieval import naive_skipped, naive_split


def _tokens(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def _pieces(known: PromptDeduplicator, ids: list[int], prompt_length: int, position: int = 0) -> list[list[int]]:
    return [piece.tolist() for piece in known.new_pieces(_tokens(ids), prompt_length, position)]


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=14), st.integers(0, 16)), max_size=20),
)
def test_equals_remembering_every_beginning(block_tokens: int, requests: list[tuple[list[int], int]]) -> None:
    known = PromptDeduplicator(block_tokens, 3)
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


def _follower() -> PromptDeduplicator:
    return PromptDeduplicator(4, 2, follows_others=True)


def test_a_conversation_is_stored_once_though_each_turn_is_answered_elsewhere() -> None:
    replicas, text, num_stored = [_follower() for _ in range(5)], list[int](), 0
    for number, replica in enumerate(replicas):
        prompt_length = len(text) + 3
        text += range(100 * number, 100 * number + 11)
        (piece,) = replica.new_pieces(_tokens(text), prompt_length, 0)
        num_stored += len(piece)
        for other in replicas:
            if other is not replica:
                other.note_replicated(piece, 0)
    assert len(text) <= num_stored <= len(text) + 4 * (2 + 3)  # lead-ins, and blocks that were not full


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=14), st.integers(0, 14)), max_size=12)
)
def test_whatever_is_left_out_is_stored_with_what_stands_before_it(
    requests: list[tuple[int, list[int], int]],
) -> None:
    replicas = [_follower() for _ in range(3)]
    stored: set[tuple[int, ...]] = set()
    for number, ids, prompt_length in requests:
        pieces = list(replicas[number].new_pieces(_tokens(ids), min(prompt_length, len(ids)), 0))
        for piece in pieces:
            stored |= {tuple(piece[i - 2 : i + 1].tolist()) for i in range(2, len(piece))}
            for other in replicas:
                if other is not replicas[number]:
                    other.note_replicated(piece, 0)
        assert all(tuple(ids[i - 2 : i + 1]) in stored for i in range(2, len(ids)))
