"""Packed and fused linear layers against torch's own."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssd.bundled import MODEL_PATH
from ssd.target import packed_linear
from ssd.target.loading import load_model, open_target
from ssd.target.packed_linear import FusedLinears, FusedMember, PackedLinear, pack_linears
from ssd.target.probe import plain_logits
from tests.models import tiny_model

TOLERANCE = 1e-3


def linear(out: int, size: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(size, out, bias=bias, dtype=dtype).requires_grad_(False)


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()} & {nn.Linear, PackedLinear, FusedMember}


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    out=st.integers(1, 70),
    size=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
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


@given(
    outs=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    bias=st.booleans(),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=12),
)
def test_fused_layers_answer_in_any_order(outs: list[int], bias: bool, asked: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    layers = [linear(out, 11, bias=bias) for out in outs]
    group = FusedLinears(layers)
    members = [FusedMember(group, member) for member in range(len(layers))]
    inputs = [torch.randn(2, 3, 11) for _ in range(2)]
    with torch.inference_mode():
        for member, number in asked:
            chosen = member % len(layers)
            torch.testing.assert_close(members[chosen](inputs[number]), layers[chosen](inputs[number]))
    for member, layer in zip(members, layers, strict=True):
        weight, kept_bias = member.unpacked()
        assert torch.equal(weight, layer.weight)
        assert kept_bias is None or torch.equal(kept_bias, layer.bias)


def test_nothing_of_a_pass_stays_in_a_group() -> None:
    group = FusedLinears([linear(2, 3, bias=False), linear(4, 3, bias=False)])
    x = torch.randn(1, 3)
    group.output(x, 1)
    group.output(x, 0)
    assert group._input is None and group._outputs == [None, None]


def test_a_model_says_the_same_and_is_packed_once() -> None:
    model = tiny_model()
    expected = plain_logits(model)
    assert pack_linears(model, expected, TOLERANCE)
    assert kinds(model) == {PackedLinear, FusedMember}
    for found, want in zip(plain_logits(model), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert not pack_linears(model, expected, TOLERANCE)


def test_the_bundled_model_decodes_as_its_library_does() -> None:
    model = load_model(MODEL_PATH, dtype="float32", device="cpu")
    library = deepcopy(model)
    target = open_target(model, num_slots=1, max_length=64)
    assert nn.Linear not in kinds(model) and kinds(library) == {nn.Linear}
    ids = torch.arange(40, 56)[None]
    with torch.inference_mode():
        logits = target.forward([0], ids.numpy(), [16])
        torch.testing.assert_close(logits, library(input_ids=ids).logits, rtol=1e-3, atol=1e-3)


class _Reaching(nn.Module):
    """Looks at its layer's weight, as some models do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner.weight.dtype))  # type: ignore[no-any-return]


def test_a_model_that_reaches_into_its_layers_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_model()
    model.lm_head = _Reaching(model.lm_head)
    expected = plain_logits(model)
    with caplog.at_level(logging.WARNING):
        assert not pack_linears(model, expected, TOLERANCE)
    assert kinds(model) == {nn.Linear} and "stay as they are" in caplog.text and "weight" in caplog.text
    for found, want in zip(plain_logits(model), expected, strict=True):
        assert torch.equal(found, want)


def test_a_wrong_kernel_is_found_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_ones(*x.shape[:-1], self.out_features))
    model = tiny_model()
    expected = plain_logits(model)
    with caplog.at_level(logging.WARNING):
        assert not pack_linears(model, expected, TOLERANCE)
    assert kinds(model) == {nn.Linear} and "logits differ by" in caplog.text


def test_layers_with_something_special_stay() -> None:
    class Quantised(nn.Linear):
        pass

    hooked = linear(3, 3, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    module = nn.ModuleDict({"a": Quantised(3, 3), "b": hooked, "c": linear(3, 3, bias=False).to(torch.float64)})
    assert not list(packed_linear._swap(module))


def test_without_the_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_has_operators", lambda: False)
    model = tiny_model()
    assert not pack_linears(model, plain_logits(model), TOLERANCE)
    assert kinds(model) == {nn.Linear}
