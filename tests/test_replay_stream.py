"""Streams of requests: order, what is learned and what is scored, outputs that come back changed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.orders import adversarial, shuffled, stream
from cache_builder.evaluation.log import Row


def made_sessions(lengths: list[list[int]]) -> list[list[Row]]:
    """Rows with outputs of the given lengths, every token of its own."""
    numbers = iter(range(10**6))
    return [
        [Row(np.array([next(numbers)], np.int32), np.array([next(numbers) for _ in range(n)], np.int32)) for n in some]
        for some in lengths
    ]


SESSIONS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=6).map(made_sessions)


@given(SESSIONS, st.integers(0, 99))
def test_a_shuffle_keeps_sessions_whole(sessions: list[list[Row]], seed: int) -> None:
    again = shuffled(sessions, seed)
    assert Counter(map(id, again)) == Counter(map(id, sessions))
    assert [id(some) for some in again] == [id(some) for some in shuffled(sessions, seed)]


@pytest.mark.parametrize(("warm", "num_scored"), [(0.0, 4), (0.5, 2), (0.7, 2), (1.0, 0)])
def test_the_first_sessions_are_learned_and_the_others_scored(warm: float, num_scored: int) -> None:
    sessions = made_sessions([[2], [3], [1], [2]])
    turns = stream(sessions, warm=warm, learned=made_sessions([[4]]))
    assert [turn.is_scored for turn in turns] == [False] * (5 - num_scored) + [True] * num_scored


@given(SESSIONS, st.integers(0, 99))
def test_changed_outputs_follow_an_earlier_one_and_end_as_another(sessions: list[list[Row]], seed: int) -> None:
    turns = adversarial(stream(sessions), seed)
    plain = [turn.row for turn in stream(sessions)]
    assert [turn.row for turn in turns if not turn.is_scored] == plain
    for number, turn in enumerate(turns):
        if not turn.is_scored:
            continue
        earlier = [other.row for other in turns[:number] if not other.is_scored]
        one = next(row for row in earlier if row.context is turn.row.context)
        output = turn.row.output.tolist()
        kept = next(
            (n for n, pair in enumerate(zip(output, one.output, strict=False)) if pair[0] != pair[1]), len(output)
        )
        tails = [row.output[begin:].tolist() for row in earlier for begin in range(len(row.output))]
        assert any(output[cut:] in tails for cut in range(kept + 1))
