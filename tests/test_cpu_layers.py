"""Loops over vectors: near the exact values, the same bits wherever a number stands, and which layers get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ssd.model.cpu.cpu_layers import Activation, FusedNorm, FusedRotary, fuse_activations, fuse_norms, fuse_rotary
from ssd.model.cpu.simd_functions import FUNCTIONS

EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_every_function_has_an_exact_one() -> None:
    assert EXACT.keys() == FUNCTIONS.keys()


@pytest.mark.parametrize("name", EXACT)
def test_values_are_near_the_exact_ones(name: str) -> None:
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.linspace(-2, 2, 4001), torch.logspace(-30, 0, 500)])
    wanted = EXACT[name](x.double())
    found = Activation(name)(x[None])[0].double()
    assert ((found - wanted).abs() <= 8e-7 * (1 + wanted.abs())).all()


@pytest.mark.parametrize("name", EXACT)
def test_what_is_no_number_stays_so(name: str) -> None:
    assert Activation(name)(torch.tensor([[1.0, float("nan"), 2.0]]))[0].isnan().tolist() == [False, True, False]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(EXACT)),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 5),
    size=st.integers(1, 70),
    gap=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_a_number_alone_has_the_bits_it_has_among_others(
    name: str, dtype: torch.dtype, rows: int, size: int, gap: int, seed: int
) -> None:
    wide = (4 * torch.randn(rows, 2, size + gap, generator=torch.Generator().manual_seed(seed))).to(dtype)
    x = wide[..., :size]
    activation = Activation(name)
    found = activation(x)
    assert found.shape == x.shape and found.dtype == dtype
    for row in range(rows):
        for column in range(0, size, 7):
            assert torch.equal(activation(x[row, 1:, column : column + 1]), found[row, 1:, column : column + 1])


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 90),
    rows=st.integers(1, 9),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_normalised_row_alone_has_the_bits_it_has_among_others(
    dtype: torch.dtype, size: int, rows: int, offset: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    norm = FusedNorm(torch.randn(size, generator=random).to(dtype), 1e-6, offset)
    x = torch.randn(rows, size, generator=random).to(dtype)
    found = norm(x)
    assert torch.equal(torch.cat([norm(row[None]) for row in x]), found)
    wanted = nn.functional.rms_norm(x.double(), (size,), norm.weight.double() + offset, 1e-6)
    error = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert float((found.double() - wanted).norm()) <= error * float(wanted.norm()) + 1e-9


def test_activations_take_the_place_of_those_that_compute_the_same() -> None:
    module = nn.ModuleDict({"a": nn.SiLU(), "b": nn.GELU("tanh"), "c": nn.ReLU(), "d": nn.Linear(2, 2), "e": nn.GELU()})
    replaced = list(fuse_activations(module))
    found = {name: each.name for name, each in module.items() if isinstance(each, Activation)}
    assert found == {"a": "silu", "b": "gelu_tanh", "e": "gelu"}
    for parent, name, again in replaced:
        setattr(parent, name, again())
    assert not any(isinstance(each, Activation) for each in module.values())


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
    assert [(each.parent, each.name) for each in replaced] == [(model, "norm")] and replaced[0].make_original() is own
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


@given(
    batch=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    width=st.integers(1, 5),
    dim=st.sampled_from([2, 6, 16, 64]),
    is_cut=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_it_turns_as_the_library_does_to_the_bit(
    batch: int, heads: tuple[int, int], width: int, dim: int, is_cut: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    # As projections leave them: heads behind positions, and a part of a wider tensor.
    q, k = (torch.randn(batch, width, count, dim + is_cut).to(dtype)[..., :dim].transpose(1, 2) for count in heads)
    cos, sin = torch.randn(batch, width, dim).to(dtype), torch.randn(batch, width, dim).to(dtype)
    with torch.inference_mode():
        for found, want in zip(FusedRotary(_never)(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            assert torch.equal(found, want)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the usual case was given away")


@pytest.mark.parametrize("case", ["type", "partial", "shared angles", "large", "axis"])
def test_what_is_not_the_usual_case_is_the_librarys(case: str) -> None:
    torch.manual_seed(0)
    shape = (2, 3, 4, 8) if case != "large" else (2, 64, 600, 8)
    q, k = torch.randn(shape), torch.randn(shape)
    angles = [torch.randn(shape[0], shape[2], shape[3]) for _ in range(2)]
    options: dict[str, Any] = {}
    if case == "type":
        q, k = q.bfloat16(), k.bfloat16()
    elif case == "shared angles":
        angles = [angle[:1] for angle in angles]
    elif case == "axis":
        q, k, options = q.transpose(1, 2), k.transpose(1, 2), {"unsqueeze_dim": 2}
    elif case == "partial":
        angles = [angle[..., :1] for angle in angles]
    asked: list[tuple[Any, ...]] = []

    def plain(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return apply_rotary_pos_emb(*args, **kwargs)

    for found, want in zip(
        FusedRotary(plain)(q, k, *angles, **options), apply_rotary_pos_emb(q, k, *angles, **options), strict=True
    ):
        assert torch.equal(found, want)
    assert len(asked) == 1


def apply_other(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return q * cos[:, None], k * sin[:, None]


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(x, x, x[:, 0], x[:, 0])


def test_layers_that_turn_in_another_way_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(fuse_rotary(Layer()))) == 1
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", apply_other)
    assert not list(fuse_rotary(Layer()))
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", lambda q: q)
    assert not list(fuse_rotary(Layer()))
    assert not list(fuse_rotary(nn.Linear(2, 2)))
