"""Normalisation as one loop against torch's, and which layers it takes the place of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssd.model.layers.vector_layers import FusedNorm, fuse_norms


@given(
    shape=st.lists(st.integers(1, 6), max_size=3),
    size=st.integers(1, 70),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 1e4]),
    eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
    is_turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_computes_what_torch_does(
    shape: list[int], size: int, scale: float, eps: float, is_turned: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(size), scale * torch.randn(*shape, 2, size)
    if is_turned:
        x = x.transpose(0, -2)
    with torch.inference_mode():
        found = FusedNorm(weight, eps)(x)
        torch.testing.assert_close(found, nn.functional.rms_norm(x, (size,), weight, eps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_inputs_and_other_types_are_torchs(dtype: torch.dtype) -> None:
    weight, x = torch.rand(512), torch.randn(200, 512).to(dtype)
    want = nn.functional.rms_norm(x.float(), (512,), weight, 1e-6).to(dtype)
    torch.testing.assert_close(FusedNorm(weight, 1e-6)(x), want)


def test_what_is_not_a_number_stays_so() -> None:
    x = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    found = FusedNorm(torch.ones(2), 1e-6)(x)
    assert found[0].isnan().all() and found[1].isfinite().all()


class PlainRMSNorm(nn.Module):
    """As Llama writes it, with the weight plus ``shift``."""

    def __init__(self, size: int, *, shift: float = 0.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps, self.shift = nn.Parameter(torch.rand(size)), eps, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight + self.shift) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * gate)


class CentredRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class OtherEpsRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_layers_that_compute_the_same_are_replaced_and_come_again(shift: float) -> None:
    own = PlainRMSNorm(16, shift=shift)
    model = nn.ModuleDict({"norm": own})
    replaced = list(fuse_norms(model))
    assert [(each.parent, each.name) for each in replaced] == [(model, "norm")] and replaced[0].again() is own
    x = torch.randn(3, 16)
    with torch.inference_mode():
        torch.testing.assert_close(model["norm"](x), own(x))
    assert not list(fuse_norms(model))


def test_layers_that_compute_something_else_stay() -> None:
    hooked = PlainRMSNorm(8)
    hooked.register_forward_hook(lambda *_: None)
    low = PlainRMSNorm(8).to(torch.bfloat16)
    others = [GatedRMSNorm(8), CentredRMSNorm(8), OtherEpsRMSNorm(8), hooked, low, nn.LayerNorm(8), nn.Linear(8, 8)]
    assert not list(fuse_norms(nn.ModuleList([*others, PlainRMSNorm(8, shift=0.5)])))
