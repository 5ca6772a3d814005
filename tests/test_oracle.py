"""The best choice in hindsight among all earlier text."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder.evaluation.oracle import oracle_steps
from tests.reference.oracle import slow_steps

REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(0, 3), max_size=30)),
    max_size=6,
)


def steps_of(requests: list[tuple[list[int], list[int]]], limit: int) -> list[int]:
    texts = [np.array([*prompt, *output], np.int32) for prompt, output in requests]
    steps = oracle_steps(texts, np.array([len(prompt) for prompt, _ in requests], np.int64), limit)
    assert steps is not None
    return steps.tolist()


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(0, 9))
def test_it_is_what_trying_every_earlier_place_finds(requests: list[tuple[list[int], list[int]]], limit: int) -> None:
    assert steps_of(requests, limit) == slow_steps(requests, limit)


def test_what_was_answered_before_takes_the_fewest_steps_and_new_text_one_a_token() -> None:
    first, again = ([1, 2, 3], [*range(10, 42)]), ([1, 2, 3], [*range(10, 42)])
    assert steps_of([first, again], 7) == [32, 4]
    assert steps_of([([5], [5] * 33)], 32) == [2]  # of one token repeated the second step knows all
    assert steps_of([], 7) == []
