"""Functions of vectors: near the exact values, and the same bits wherever a number stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ssd.compiled.functions import FUNCTIONS
from ssd.model.layers.vector_layers import Activation, FusedNorm, fuse_activations

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
