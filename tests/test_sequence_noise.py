"""The keys of a sequence's noise are those that are written down, and kernels foresee what the target draws by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from ssd.drafting.noise import SequenceNoise, gumbel_at, key_at, request_key
from ssd.model.sampling.noise import gumbel_noise
from tests.reference.noise import coupled_key, position_keys

VOCABULARY = 97
bits = st.integers(0, 2**64 - 1)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int] | None]:
    tokens = draw(st.lists(st.integers(0, 2), max_size=12))
    if draw(st.booleans()):
        return tokens, None
    return tokens, [draw(st.integers(-1, node - 1)) for node in range(len(tokens))]


def path_to(parents: list[int] | None, node: int) -> list[int]:
    if parents is None:
        return list(range(node + 1))
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


def int32(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


@given(bits, st.integers(0, 99), texts, drafts())
def test_seeded_noise_is_of_the_position(
    seed: int, choice: int, text: list[int], draft: tuple[list[int], list[int] | None]
) -> None:
    tokens, parents = draft
    keys = SequenceNoise.seeded(seed, choice).keys(
        int32(text), int32(tokens), None if parents is None else int32(parents)
    )
    positions = np.array([len(text) + len(path_to(parents, node)) for node in range(-1, len(tokens))])
    assert np.array_equal(keys, position_keys(seed, choice, positions))


@given(bits, st.integers(0, 99), texts, drafts(), st.integers(1, 9), st.data())
def test_coupled_noise_is_of_the_last_tokens_and_of_how_often_they_came(
    secret: int,
    stream: int,
    text: list[int],
    draft: tuple[list[int], list[int] | None],
    window: int,
    data: st.DataObject,
) -> None:
    tokens, parents = draft
    told = data.draw(st.lists(st.integers(0, len(text)), max_size=3).map(sorted))
    noise = SequenceNoise.coupled(secret, stream, window)
    for end in told:
        noise.advance(int32(text)[:end])
    keys = noise.keys(int32(text), int32(tokens), None if parents is None else int32(parents))
    for node, key in zip(range(-1, len(tokens)), keys.tolist(), strict=True):
        path = [tokens[step] for step in path_to(parents, node)]
        assert key == coupled_key(secret, stream, [*text, *path], window)


@given(bits, st.lists(st.integers(0, 1), min_size=1, max_size=300), st.integers(1, 4))
def test_no_key_comes_twice_in_a_sequence(secret: int, text: list[int], window: int) -> None:
    noise, keys = SequenceNoise.coupled(secret, 0, window), []
    for end in range(1, len(text) + 1):
        noise.advance(int32(text[:end]))
        keys.append(int(noise.keys(int32(text[:end]))[0]))
    assert len(set(keys)) == len(keys)


@njit
def gumbel_of(request: Any, position: int, token: int) -> float:
    """What a kernel foresees of one token at a position of the sequence that has this key."""
    return gumbel_at(key_at(request, position), token)


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 2**20),
    position=st.integers(0, 2**31),
    token=st.integers(0, VOCABULARY - 1),
)
def test_kernels_foresee_the_noise_of_every_token(seed: int, choice: int, position: int, token: int) -> None:
    keys = position_keys(seed, choice, np.array([position]))
    expected = gumbel_noise(torch.from_numpy(keys.view(np.int64)), VOCABULARY)[0, token].item()
    found = gumbel_of(np.uint64(request_key(seed, choice)), position, token)
    assert abs(found - expected) <= 1e-12 * (1 + abs(expected))
