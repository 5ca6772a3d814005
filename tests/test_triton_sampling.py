"""The sampling kernel against torch, compiled where there is a GPU, else interpreted: TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_here import DEVICE, HAS_GPU, runs_loops

# isort: split
from ssd.model.sampling.sampler import (
    argmax_with_noise,
    check_tokens,
    is_sampler_correct,
    noisy_scores,
    top_tokens,
    unpack_top,
)
from ssd.model.triton import triton_sampling
from ssd.model.triton.triton_sampling import triton_sampler, triton_top
from tests.models import tiny_model
from tests.static_targets import pair_of_targets
from tests.test_pass_noise import check_batch, row_of
from tests.test_top_tokens import logits

pytestmark = pytest.mark.filterwarnings("default")

# The interpreter computes with numpy, which has no bfloat16.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else [])
TEMPERATURES = [0.0, 1e-30, 1e-6, 1e-4, 0.7, 1.0, 3.0, 1e4]


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, keys and temperatures."""
    num_rows, vocab_size = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 15, 16, 17, 100, 129, 700]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = random.normal(0, draw(st.sampled_from([0.0, 0.1, 3.0, 1000.0])), (num_rows, vocab_size))
    logits = logits.astype(np.float32)
    ruled_out = draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))
    logits[:, 1:][random.random((num_rows, vocab_size - 1)) < ruled_out] = -np.inf
    logits = np.roll(logits, draw(st.integers(0, vocab_size - 1)), axis=1)
    keys = random.integers(-(2**63), 2**63 - 1, num_rows)
    temperatures = np.array([draw(st.sampled_from(TEMPERATURES)) for _ in range(num_rows)], np.float32)
    dtype = draw(st.sampled_from(DTYPES))
    return (
        torch.from_numpy(logits).to(DEVICE, dtype),
        torch.from_numpy(keys).to(DEVICE),
        torch.from_numpy(temperatures).to(DEVICE),
    )


@runs_loops
@settings(max_examples=60)
@given(problems(), st.sampled_from([16, 32]))
def test_the_kernel_chooses_what_the_formula_chooses(problem: Any, block: int) -> None:
    logits, keys, temperatures = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_sampling, "_BLOCK", block)  # so that few tokens are several splits of several blocks
        tokens = triton_sampler(logits, keys, temperatures)
    assert tokens.dtype == torch.int64 and tokens.shape == keys.shape
    check_tokens(tokens, logits, keys, temperatures)
    is_greedy = temperatures == 0
    assert torch.equal(tokens[is_greedy], logits.argmax(-1)[is_greedy])
    scores = logits.float() / temperatures.clamp_min(1e-4)[:, None]
    drawn = torch.from_numpy(argmax_with_noise(scores.cpu(), keys.cpu().numpy().view(np.uint64))).to(DEVICE)
    assert torch.equal(tokens[~is_greedy], drawn[~is_greedy])


@runs_loops
def test_a_row_need_not_be_contiguous_and_impossible_tokens_give_the_first() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    keys, temperatures = torch.arange(3, device=DEVICE), torch.ones(3, device=DEVICE)
    for view in (logits[:, :20], logits[:, ::2], logits[:, 20:]):
        expected = noisy_scores(view, keys, temperatures).argmax(-1)
        assert torch.equal(triton_sampler(view, keys, temperatures), expected)
    for value in (-torch.inf, torch.nan):
        assert triton_sampler(torch.full_like(logits, value), keys, temperatures).tolist() == [0, 0, 0]


@settings(max_examples=60)
@given(logits(), st.sampled_from(DTYPES), st.sampled_from([16, 128, 1024]))
def test_the_most_probable_tokens_are_those_of_a_sweep(scores: torch.Tensor, dtype: torch.dtype, block: int) -> None:
    scores = scores.to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_sampling, "_BLOCK", block)
        found = unpack_top(triton_top(scores.to(DEVICE)))
    for got, want in zip(found, top_tokens(scores, [scores.shape[1]] * len(scores)), strict=True):
        assert np.array_equal(got, want)


def test_of_a_pass_whose_logits_are_gone_no_token_is_known() -> None:
    ids, values = unpack_top(triton_top(torch.zeros(2, 3, 5, device=DEVICE)[:, :, :0]))
    assert (ids == -1).all() and np.isneginf(values).all()


@runs_loops
def test_the_kernel_passes_the_probe() -> None:
    assert is_sampler_correct(triton_sampler, DEVICE)


@runs_loops
@pytest.mark.parametrize("window", [0, 2], ids=["of seeds", "coupled"])
@pytest.mark.parametrize("is_tree", [False, True])
def test_a_pass_chooses_by_the_kernel(is_tree: bool, window: int) -> None:
    recorder = "as a CUDA graph" if HAS_GPU else "eagerly"
    _, static = pair_of_targets(tiny_model(), recorder, num_slots=3, max_width=4, sampler=triton_sampler)
    parents = [-1, -1, 0] if is_tree else None
    for seed in range(3):
        check_batch(static, [row_of(kind, seed, [7, 6, 7], parents=parents, window=window) for kind in (0, 1, 4)])
    assert static.graph_runner is not None and static.graph_runner.failure is None
