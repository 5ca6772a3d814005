"""Packed and fused linear layers against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssd.model.layers import packed_linear
from ssd.model.layers.fused_linear import FusedMember
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


def test_few_numbers_of_rows_are_computed() -> None:
    sizes = [rounded_rows(n) for n in range(1, 1025)]
    assert sizes[:16] == list(range(1, 17))
    assert all(n <= size <= 1.125 * n + 1 for n, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len(set(sizes)) == 16 + 8 * 6
    assert all(rounded_rows(size) == size for size in sizes)


@given(num_rows=st.integers(17, 70), seed=st.integers(0, 99))
def test_rows_that_were_added_change_nothing(num_rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    plain = linear(5, 12, bias=True)
    x = torch.randn(num_rows, 2, 12)[:, 1:]
    with torch.inference_mode():
        found = PackedLinear(plain.weight, plain.bias)(x)
        assert found.shape == (num_rows, 1, 5)
        torch.testing.assert_close(found, plain(x))


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
