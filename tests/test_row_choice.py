"""The compiled choice among what top-k, top-p and min-p leave: that of the slow twin, and that of torch's path."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise, UInt64, gumbel_at, key_at, request_key
from ssd.model.cpu.cpu_sampling import MASS_OF_ONE, masses_of
from ssd.model.sampling.sampler import gumbel_noise, host_tokens, log_min_p
from ssd.model.sampling.target_tokens import truncated_scores
from tests.reference import sampling as slow
from tests.reference.noise import coupled_key, gumbel, key_of
from tests.reference.tree import path_of
from tests.trees import trees

params_of_rows = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-30, 1e-4, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([1e-9, 0.05, 0.5, 0.93, 1.0 - 1e-9, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
)


@st.composite
def positions(draw: st.DrawFn) -> tuple[torch.Tensor, UInt64]:
    """Logits, [3, 2, V], many of them equal or ruled out; and keys."""
    vocab_size = draw(st.sampled_from([1, 2, 7, 24, 127, 128, 300]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = random.normal(0, draw(st.sampled_from([0.0, 0.1, 3.0, 30.0, 1e6])), (3, 2, vocab_size))
    grain = draw(st.sampled_from([0.0, 0.5, 4.0]))
    if grain:
        logits = np.round(logits / grain) * grain
    logits[..., 1:][random.random((3, 2, vocab_size - 1)) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = -np.inf
    logits = np.roll(logits, draw(st.integers(0, vocab_size - 1)), axis=-1)
    keys = random.integers(0, 2**64, 6, np.uint64)
    return torch.from_numpy(logits.astype(np.float32)), keys


def full_argmax(scores: torch.Tensor, keys: UInt64) -> np.ndarray[Any, Any]:
    noise = gumbel_noise(torch.from_numpy(keys.view(np.int64)), scores.shape[-1])
    return (scores.double() + noise).argmax(-1).numpy()


@settings(max_examples=250)
@given(positions(), st.lists(params_of_rows, min_size=3, max_size=3))
def test_tokens_are_those_of_torch_and_of_the_slow_twin(problem: Any, params: list[SamplingParams]) -> None:
    logits, keys = problem
    found = host_tokens(logits, [0, 1, 2], [2, 2, 2], params, keys)
    flat = logits.reshape(6, -1)
    each = [p for p in params for _ in range(2)]
    cut = truncated_scores(flat, each)
    assert np.array_equal(found, full_argmax(cut, keys))
    whole = truncated_scores(flat, [SamplingParams(temperature=p.temperature) for p in each])
    masses = masses_of(whole.numpy())
    for i, p in enumerate(each):
        scores = whole[i].tolist()
        floor = float(np.float32(max(scores)) + np.float32(log_min_p(p)))
        kept = slow.kept_tokens(scores, masses[i].tolist(), max(p.top_k, 0), p.top_p, floor)
        assert set(np.flatnonzero(np.isfinite(cut[i].numpy()))) == set(kept)
        assert found[i] == slow.best_with_noise(scores, kept, int(keys[i]))


@pytest.mark.parametrize("vocab_size", [1000, 5000])
@pytest.mark.parametrize("steepness", [0.3, 1.0, 3.0])
def test_flat_and_steep_laws_of_many_tokens_are_cut_as_torch_cuts_them(vocab_size: int, steepness: float) -> None:
    random = np.random.default_rng(3)
    law = -steepness * np.log(np.arange(1, vocab_size + 1)) + random.normal(0, 0.5, (6, vocab_size))
    logits = torch.from_numpy(random.permuted(law, axis=1).astype(np.float32))
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_k": 50},
        {"top_k": 600},
        {"top_k": 600, "top_p": 0.9},
        {"top_k": 50, "top_p": 0.5},
        {"min_p": 0.02},
        {"min_p": 0.02, "top_p": 0.95},
        {"min_p": 1e-5, "top_k": 400},
    ]
    for kind in kinds:
        params = SamplingParams(temperature=0.8, **kind)
        for turn in range(4):
            keys = random.integers(0, 2**64, 6, np.uint64)
            found = host_tokens(logits[None], [0], [6], [params], keys)
            assert np.array_equal(found, full_argmax(truncated_scores(logits, [params] * 6), keys)), (kind, turn)


def test_masses_are_those_of_the_exponential() -> None:
    scores = np.concatenate([np.linspace(-27, 0, 100_001), [-80.0, -200.0, -np.inf, np.nan]]).astype(np.float32)
    masses = masses_of(scores[None])[0]
    exact = np.exp(scores[:-4].astype(np.float64)) * MASS_OF_ONE
    assert masses[100_000] == MASS_OF_ONE
    assert np.all(np.abs(masses[:-4] - exact) <= 1 + 3e-6 * exact)
    assert not masses[-4:].any()


@settings(max_examples=40)
@given(positions(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.data())
def test_a_position_has_its_token_whatever_stands_beside_it(problem: Any, dtype: torch.dtype, data: Any) -> None:
    logits, keys = problem
    logits = logits.clamp_max(6e4).to(dtype)
    params = [data.draw(params_of_rows) for _ in range(3)]
    together = host_tokens(logits, [0, 1, 2], [2, 2, 2], params, keys)
    assert np.array_equal(
        host_tokens(logits, [2, 0], [1, 2], [params[2], params[0]], keys[[4, 0, 1]]), together[[4, 0, 1]]
    )
    strided = torch.empty(logits.shape[-1], *logits.shape[:2], dtype=dtype).permute(1, 2, 0)
    strided.copy_(logits)
    assert np.array_equal(host_tokens(strided, [0, 1, 2], [2, 2, 2], params, keys), together)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 2}, {"top_k": 2, "top_p": 0.5}, {"min_p": 0.5}])
def test_impossible_numbers_end_and_are_not_chosen(params: dict[str, Any]) -> None:
    logits = torch.tensor(
        [
            [
                [-math.inf] * 4,
                [math.nan] * 4,
                [math.nan, -math.inf, 1.0, math.nan],
                [0.0, -math.inf, math.inf, math.inf],
            ]
        ]
    )
    keys = np.arange(4, dtype=np.uint64)
    assert host_tokens(logits, [0], [4], [SamplingParams(**params)], keys).tolist() == [0, 0, 2, 2]


# -- keys of noise ---------------------------------------------------------------------------------------------------

VOCABULARY = 97
bits = st.integers(0, 2**64 - 1)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int] | None, list[list[int]]]:
    """Tokens, parents unless it is a chain, and the tokens on the path to each node, the root first."""
    tokens, parents = draw(trees(num_tokens=3))
    is_chain = draw(st.booleans())
    above = range(-1, len(tokens) - 1) if is_chain else parents
    paths = [[tokens[i] for i in path_of(above, node)] for node in range(-1, len(tokens))]
    return tokens, None if is_chain else parents, paths


def int32(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


@given(bits, st.integers(0, 99), texts, drafts(), st.integers(1, 9), st.data())
def test_coupled_noise_is_of_the_last_tokens_and_of_how_often_they_came(
    secret: int,
    stream: int,
    text: list[int],
    draft: tuple[list[int], list[int] | None, list[list[int]]],
    window: int,
    data: st.DataObject,
) -> None:
    tokens, parents, paths = draft
    told = data.draw(st.lists(st.integers(0, len(text)), max_size=3).map(sorted))
    noise = SequenceNoise.coupled(secret, stream, window)
    for end in told:
        noise.advance(int32(text)[:end])
    keys = noise.keys(int32(text), int32(tokens), None if parents is None else int32(parents))
    for path, key in zip(paths, keys.tolist(), strict=True):
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
def test_noise_is_what_integer_arithmetic_says_and_kernels_foresee_it(
    seed: int, choice: int, position: int, token: int
) -> None:
    key = key_of(seed, choice, position)
    expected = gumbel(key, token)
    keys = torch.tensor([key - (1 << 64) if key >> 63 else key])
    for found in (
        gumbel_noise(keys, VOCABULARY)[0, token].item(),
        gumbel_of(np.uint64(request_key(seed, choice)), position, token),
    ):
        assert abs(found - expected) <= 1e-12 * (1 + abs(expected))
