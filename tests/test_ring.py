from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ssd.retrieval.ring import TokenRing, power_of_two_at_least
from ssd.retrieval.segment import SEPARATOR


def _tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def _tail(ring: TokenRing) -> list[int]:
    return [int(token) for token in ring.read(ring.tail_start, ring.tail_stop)]


def test_power_of_two() -> None:
    assert [power_of_two_at_least(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]


def test_an_empty_ring_has_no_tail() -> None:
    ring = TokenRing(8, position=100)
    assert len(ring) == 0 and _tail(ring) == []
    assert (ring.tail_start, ring.tail_stop) == (100, 100)


def test_a_sequence_as_long_as_the_limit_replaces_everything() -> None:
    ring = TokenRing(8)
    ring.append(_tokens(1))
    assert ring.append(_tokens(*range(7))) == 2
    assert _tail(ring) == [*range(7), SEPARATOR]
    assert ring.tail_start == 2


def test_release_frees_whole_sequences_only() -> None:
    ring = TokenRing(16)
    ring.append(_tokens(1, 2))
    ring.append(_tokens(3))
    assert ring.sequences_within(3) == 3 and ring.sequences_within(4) == 3 and ring.sequences_within(5) == 5
    assert ring.sequences_within(1) == 3  # at least one sequence
    ring.release(3)
    assert _tail(ring) == [3, SEPARATOR]


@given(
    limit=st.integers(2, 40),
    position=st.integers(0, 1 << 40),
    steps=st.lists(st.tuples(st.integers(0, 39), st.booleans()), max_size=60),
)
def test_equals_a_list_of_sequences(limit: int, position: int, steps: list[tuple[int, bool]]) -> None:
    ring = TokenRing(limit, position)
    model: list[list[int]] = []
    stop = position
    for number, (length, is_released) in enumerate(steps):
        if is_released and model:
            ring.release(ring.sequences_within(length))
            kept = ring.tail_stop - ring.tail_start
            while sum(map(len, model)) > kept:
                model.pop(0)
        piece = [number] * min(length, limit - 1)
        assert ring.append(_tokens(*piece)) == stop
        stop += len(piece) + 1
        model.append([*piece, SEPARATOR])
        while sum(map(len, model)) > limit:
            model.pop(0)
        assert _tail(ring) == [token for sequence in model for token in sequence]
        assert ring.tail_stop == stop
