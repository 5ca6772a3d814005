"""Layers as packed weights and several as one product, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssd.model.layers import packed_linear
from ssd.model.layers.fused_linear import FusedLinears, FusedMember, PlainProduct, fuse_linears
from ssd.model.layers.packed_linear import (
    PackedLinear,
    pack_linears,
    packed_types,
    prepare_linears,
    rounded_rows,
)
from ssd.model.loading import load_target
from tests.models import tiny_model


def linear(out: int, size: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(size, out, bias=bias, dtype=dtype).requires_grad_(False)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    out=st.integers(1, 70),
    size=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from(packed_types()),
    seed=st.integers(0, 99),
)
def test_a_packed_layer_computes_what_torch_does(
    shape: list[int], out: int, size: int, bias: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = linear(out, size, bias=bias, dtype=dtype)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(*shape, size).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
    weight, kept_bias = packed.unpacked()
    assert torch.equal(weight, plain.weight)
    assert (kept_bias is None) == (plain.bias is None)


def test_layers_with_something_special_stay() -> None:
    class Quantised(nn.Linear):
        pass

    hooked = linear(3, 3, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    module = nn.ModuleDict({"a": Quantised(3, 3), "b": hooked, "c": linear(3, 3, bias=False).to(torch.float64)})
    assert not list(pack_linears(module))


def test_a_type_that_cannot_be_packed_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_target, "packed_types", lambda: (torch.float32,))
    assert load_target.faster_type(tiny_model().to(torch.bfloat16)) is torch.float32


def test_without_the_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "has_operators", lambda: False)
    model = tiny_model()
    assert not list(pack_linears(model))
    assert {type(module) for module in model.modules()} & {nn.Linear, PackedLinear, FusedMember} == {nn.Linear}


def test_preparing_computes_every_kind_of_layer_once_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    list(pack_linears(model))
    asked: list[tuple[tuple[object, ...], int]] = []

    def product(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        asked.append((self.kind, x.numel() // self.in_features))
        return torch.zeros(*x.shape[:-1], self.out_features)

    monkeypatch.setattr(PackedLinear, "product", product)
    prepare_linears(model)
    assert len(asked) == len(set(asked)) and {size for _, size in asked} == {rounded_rows(n) for n in range(1, 65)}


PRODUCTS = [PlainProduct, PackedLinear]


@given(
    outs=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    bias=st.booleans(),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=12),
    product=st.sampled_from(PRODUCTS),
)
def test_fused_layers_answer_in_any_order(
    outs: list[int], bias: bool, asked: list[tuple[int, int]], product: Any
) -> None:
    torch.manual_seed(0)
    layers = [linear(out, 11, bias=bias) for out in outs]
    group = FusedLinears(layers, product)
    members = [FusedMember(group, member) for member in range(len(layers))]
    inputs = [torch.randn(2, 3, 11) for _ in range(2)]
    with torch.inference_mode():
        for asked_member, number in asked:
            chosen = asked_member % len(layers)
            torch.testing.assert_close(members[chosen](inputs[number]), layers[chosen](inputs[number]))
    for member, layer in zip(members, layers, strict=True):
        weight, kept_bias = member.unpacked()
        assert torch.equal(weight, layer.weight)
        assert kept_bias is None or torch.equal(kept_bias, layer.bias)


def test_layers_that_do_not_fit_together_stay() -> None:
    module = nn.ModuleDict({"gate_proj": linear(3, 4, bias=True), "up_proj": linear(3, 4, bias=False)})
    assert not list(fuse_linears(module))
    module = nn.ModuleDict({"gate_proj": linear(3, 4, bias=False), "up_proj": linear(3, 5, bias=False)})
    assert not list(fuse_linears(module))
    shared = linear(3, 4, bias=False)
    assert not list(fuse_linears(nn.ModuleDict({"gate_proj": shared, "up_proj": shared})))
    module = nn.ModuleDict({"gate_proj": linear(3, 4, bias=False), "up_proj": linear(2, 4, bias=False)})
    assert not list(fuse_linears(module.double())) and len(list(fuse_linears(module.float()))) == 2
