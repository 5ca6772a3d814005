"""Drafts beside the target's own tokens: kernels say of many rows what one row says alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ssd.drafting.noise import SequenceNoise
from ssd.model.kv.tree import agree


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9))
def test_a_draft_is_accepted_up_to_the_first_difference(seed: int, num_rows: int, width: int) -> None:
    random = np.random.default_rng(seed)
    fed, chosen = (random.integers(0, 2, (num_rows, width)) for _ in range(2))
    counts = random.integers(1, width + 1, num_rows)
    expected = []
    for b in range(num_rows):
        draft, said = fed[b, 1 : counts[b]].tolist(), chosen[b].tolist()
        expected.append(next((i for i, token in enumerate(draft) if token != said[i]), len(draft)))
    paths, said, sizes = agree(fed, chosen, counts, fed, False)
    assert (sizes - 1).tolist() == expected
    for b, size in enumerate(sizes):
        assert paths[b, :size].tolist() == list(range(size)) and said[b, :size].tolist() == chosen[b, :size].tolist()


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(0, 40)), max_size=5))
def test_keys_of_several_sequences_are_those_of_each(rows: list[tuple[int, int, int]]) -> None:
    noises = [SequenceNoise.seeded(seed, choice) for seed, choice, _ in rows]
    keys = SequenceNoise.seeded_keys(noises, [length for *_, length in rows], 4)
    assert keys.shape == (len(rows), 4)
    for noise, (*_, length), found in zip(noises, rows, keys, strict=True):
        own = noise.keys(np.zeros(length, np.int32), np.zeros(3, np.int32))
        assert found.tolist() == own.tolist()
