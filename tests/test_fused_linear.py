"""Layers that read the same input as one product, by torch's own and by packed weights."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssd.model.layers.fused_linear import FusedLinears, FusedMember, PlainProduct, fuse_linears
from ssd.model.layers.packed_linear import PackedLinear
from ssd.model.layers.replace import plain_logits, replace_layers
from tests.models import tiny_model

PRODUCTS = [PlainProduct, PackedLinear]


def linear(out: int, size: int, *, bias: bool) -> nn.Linear:
    return nn.Linear(size, out, bias=bias).requires_grad_(False)


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


def test_nothing_of_a_pass_stays_in_a_group() -> None:
    group = FusedLinears([linear(2, 3, bias=False), linear(4, 3, bias=False)], PlainProduct)
    x = torch.randn(1, 3)
    group.output(x, 1)
    group.output(x, 0)
    assert group._input is None and group._outputs == [None, None]


def test_a_model_keeps_its_other_layers_and_says_the_same() -> None:
    model = tiny_model()
    expected, num_linears = plain_logits(model), sum(type(module) is nn.Linear for module in model.modules())
    assert replace_layers(model, (fuse_linears,), expected=expected, tolerance=1e-3)
    members = [module for module in model.modules() if isinstance(module, FusedMember)]
    assert len(members) == 5 * model.config.num_hidden_layers
    assert sum(type(module) is nn.Linear for module in model.modules()) == num_linears - len(members)
    assert all(isinstance(member.group.product, PlainProduct) for member in members)
    for found, want in zip(plain_logits(model), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_what_was_fused_comes_apart_again() -> None:
    model = tiny_model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parent, name, again in list(fuse_linears(model)):
        setattr(parent, name, again())
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_layers_that_do_not_fit_together_stay() -> None:
    module = nn.ModuleDict({"gate_proj": linear(3, 4, bias=True), "up_proj": linear(3, 4, bias=False)})
    assert not list(fuse_linears(module))
    module = nn.ModuleDict({"gate_proj": linear(3, 4, bias=False), "up_proj": linear(3, 5, bias=False)})
    assert not list(fuse_linears(module))
    shared = linear(3, 4, bias=False)
    assert not list(fuse_linears(nn.ModuleDict({"gate_proj": shared, "up_proj": shared})))
    module = nn.ModuleDict({"gate_proj": linear(3, 4, bias=False), "up_proj": linear(2, 4, bias=False)})
    assert not list(fuse_linears(module.double())) and len(list(fuse_linears(module.float()))) == 2
