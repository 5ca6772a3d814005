"""Layers of one launch against the library's many, compiled where there is a GPU, else interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tests.triton_here import DEVICE, HAS_GPU, caches_as_on_a_device

# isort: split

from ssd.model.cpu.cpu_layers import FusedRotary
from ssd.model.layers.replace import Replaced, reference_logits, replace_layers
from ssd.model.loading.replace_weights import replace_weights
from ssd.model.runners.select_runner import device_layers
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.triton.triton_layers import (
    TritonNorm,
    fuse_gates_by_triton,
    fuse_norms_by_triton,
    rotate_by_triton,
    silu_times,
)
from tests.models import tiny_model
from tests.static_targets import have_same_bits

pytestmark = pytest.mark.filterwarnings("default")

# The interpreter computes with numpy, which has no bfloat16.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else [])
NORMS = {"llama": LlamaRMSNorm, "gemma": Gemma2RMSNorm, "olmo": Olmo2RMSNorm}


@settings(max_examples=30)
@given(
    kind=st.sampled_from(list(NORMS)),
    shape=st.lists(st.integers(1, 4), max_size=2),
    size=st.sampled_from([1, 2, 24, 64, 100]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    dtype=st.sampled_from(DTYPES),
    is_cut=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_norm_is_the_librarys_rounding_included(
    kind: str, shape: list[int], size: int, scale: float, dtype: torch.dtype, is_cut: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    own: Any = NORMS[kind](size, 1e-5)
    own.weight = nn.Parameter(torch.randn(size), requires_grad=False)
    own = own.to(DEVICE, dtype)
    model = nn.ModuleDict({"norm": own})
    (replaced,) = fuse_norms_by_triton(model)
    assert isinstance(model["norm"], TritonNorm) and replaced.make_original() is own
    x = (scale * torch.randn(*shape, 3, size + is_cut)).to(DEVICE, dtype)[..., :size]
    with torch.inference_mode():
        found, want = model["norm"](x), own(x)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(found, want, rtol=2 * ulp if dtype != torch.float32 else 1e-5, atol=1e-6)


class CentredRMSNorm(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def test_other_norms_stay() -> None:
    hooked = LlamaRMSNorm(8)
    hooked.register_forward_hook(lambda *_: None)
    others = [CentredRMSNorm(8), hooked, nn.LayerNorm(8), LlamaRMSNorm(8).double()]
    assert not list(fuse_norms_by_triton(nn.ModuleList(others).to(DEVICE)))


@settings(max_examples=30)
@given(
    batch=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 17), st.integers(1, 9)),
    width=st.integers(1, 5),
    dim=st.sampled_from([2, 6, 16, 64]),
    is_cut=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_queries_and_keys_are_turned_as_the_library_turns_them(
    batch: int, heads: tuple[int, int], width: int, dim: int, is_cut: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k = (
        torch.randn(batch, width, count, dim + is_cut).to(DEVICE, dtype)[..., :dim].transpose(1, 2) for count in heads
    )
    cos, sin = (torch.randn(batch, width, dim).to(DEVICE, dtype) for _ in range(2))
    with torch.inference_mode():
        rotary = FusedRotary(_never, rotate_by_triton)
        for found, want in zip(rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert found.dtype == dtype
            assert dtype == torch.float32 or torch.equal(found, want)
            torch.testing.assert_close(found, want)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the usual case was given away")


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=2),
    st.sampled_from([1, 7, 1024, 1500]),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_a_gate_is_silu_times_the_other_half(shape: list[int], size: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    both = (3 * torch.randn(*shape, 2 * size)).to(DEVICE, dtype)
    gate, up = both.split(size, -1)
    found, want = silu_times(gate, up), nn.functional.silu(gate) * up
    assert found.shape == want.shape and found.is_contiguous()
    torch.testing.assert_close(found, want, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act_fn = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_layers_with_another_gate_stay() -> None:
    assert not list(fuse_gates_by_triton(Cubed().to(DEVICE)))


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Gemma 2 (soft caps)", "Mixtral", "GPT-NeoX"])
def test_a_model_of_such_layers_says_what_it_said_and_takes_weights(architecture: str) -> None:
    model = deepcopy(tiny_model(architecture)).to(DEVICE)
    expected, weights = reference_logits(model), deepcopy(model.state_dict())
    kinds = device_layers(DEVICE, model.dtype)
    assert replace_layers(model, kinds, expected=expected, tolerance=1e-4)
    has_norms = any(isinstance(module, TritonNorm) for module in model.modules())
    assert has_norms == (architecture != "GPT-NeoX")
    assert not any(replace_layers(model, [kind], expected=expected, tolerance=1e-4) for kind in kinds), "again"
    replace_weights(model, {name: 0.5 * weight for name, weight in weights.items()})
    halved = [logits.clone() for logits in reference_logits(model)]
    assert not torch.allclose(halved[0], expected[0])
    replace_weights(model, weights)
    for found, want in zip(reference_logits(model), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "mistral", "Qwen2", "Qwen3"])
def test_flat_layers_have_the_bits_of_the_library_s(name: str, dtype: torch.dtype) -> None:
    def opened(is_flat: bool) -> Any:
        model = deepcopy(tiny_model(name)).to(DEVICE, dtype)
        kinds = device_layers(DEVICE, dtype)
        expected = reference_logits(model)
        assert replace_layers(model, kinds if is_flat else kinds[:-1], expected=expected, tolerance=0.05)
        assert all(("forward" in vars(layer)) == is_flat for layer in model.model.layers)
        return SlotRunner(model, 3, 100, 16)

    with caches_as_on_a_device():
        have_same_bits(opened(True), opened(False))


def test_a_compiler_that_fails_leaves_a_model_as_it_was() -> None:
    model = deepcopy(tiny_model()).to(DEVICE)
    expected, before = reference_logits(model), [type(module) for module in model.modules()]

    def fails(module: nn.Module) -> Iterator[Replaced]:
        yield next(fuse_norms_by_triton(module))
        raise OSError("no compiler")

    assert not replace_layers(model, [fails], expected=expected, tolerance=1e-4)
    assert [type(module) for module in model.modules()] == before
