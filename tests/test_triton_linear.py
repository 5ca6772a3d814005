"""Linear layers whose rows have the same bits in any pass, compiled where there is a GPU, else interpreted."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.triton_here import DEVICE, HAS_GPU, caches_as_on_a_device, runs_loops

# isort: split
from ssd.model.layers.replace import Replaced, reference_logits
from ssd.model.loading.replace_weights import replace_weights
from ssd.model.runners import batch_invariance as settle
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.triton.triton_linear import FEW_ROWS, linear, own_linears, products_of
from tests.models import VOCAB, tiny_model

pytestmark = pytest.mark.filterwarnings("default")

# The interpreter computes with numpy, which has no bfloat16.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3} | ({torch.bfloat16: 2e-2} if HAS_GPU else {})


@settings(max_examples=60)
@given(
    width=st.integers(1, 70),
    size=st.sampled_from([1, 7, 32, 64, 100, 129]),
    num_outputs=st.sampled_from([1, 5, 32, 70]),
    has_bias=st.booleans(),
    is_cut=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 999),
    data=st.data(),
)
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_among_others(
    width: int,
    size: int,
    num_outputs: int,
    has_bias: bool,
    is_cut: bool,
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(width, size + is_cut).to(DEVICE, dtype)[:, :size]
    weight = torch.randn(num_outputs, size).to(DEVICE, dtype)
    bias = torch.randn(num_outputs).to(DEVICE, dtype) if has_bias else None
    found = linear(x, weight, bias)
    wanted = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == dtype and found.shape == wanted.shape
    assert float((found.double() - wanted).norm()) <= TOLERANCES[dtype] * float(wanted.norm())
    for place in data.draw(st.sets(st.integers(0, width - 1), min_size=1, max_size=3)):
        assert torch.equal(linear(x[place], weight, bias), found[place])
    first = data.draw(st.integers(0, width - 1))
    last = data.draw(st.integers(first + 1, width))
    assert torch.equal(linear(x[first:last], weight, bias), found[first:last])
    others = torch.randn(data.draw(st.integers(1, 70)), size).to(DEVICE, dtype)
    assert torch.equal(linear(torch.cat([others, x]), weight, bias)[len(others) :], found)


def test_many_outputs_and_no_rows() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8200, 16, device=DEVICE), torch.randn(2, 65, 16, device=DEVICE)
    found = linear(x, weight)
    torch.testing.assert_close(found, nn.functional.linear(x, weight))
    assert torch.equal(linear(x[1, 64:], weight), found[1, 64:])
    assert linear(x[:0], weight).shape == (0, 65, 8200)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2"])  # without biases, and with
@pytest.mark.parametrize("is_exact", [False, True])
def test_a_model_computes_so_takes_weights_and_is_taken_back(architecture: str, is_exact: bool) -> None:
    model = deepcopy(tiny_model(architecture)).to(DEVICE)
    weights, expected = deepcopy(model.state_dict()), reference_logits(model)
    num_linears = sum(type(each) is nn.Linear for each in model.modules())
    replaced = list(own_linears(model))
    assert len(replaced) == num_linears and not list(own_linears(model)), "again"
    products = products_of(model)
    layers = model.config.num_hidden_layers
    assert sorted(len(each.sizes) for each in products) == [1] * (2 * layers + 1) + [2] * layers + [3] * layers
    for product in products:
        product.be_exact(is_exact)
    for found, want in zip(reference_logits(model), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name])
    rows = torch.arange(FEW_ROWS + 3, device=DEVICE)[None]
    hidden = model.get_input_embeddings()(rows)
    queries, keys = (model.get_submodule(f"model.layers.0.self_attn.{name}_proj") for name in "qk")
    alone, among = hidden[:, 3:4], hidden + 0  # what a layer is given anew is computed anew
    if is_exact:
        assert torch.equal(queries(alone), queries(among)[:, 3:4]) and torch.equal(keys(alone), keys(among)[:, 3:4])
    replace_weights(model, {name: 0.5 * weight for name, weight in weights.items()})
    assert not torch.allclose(reference_logits(model)[0], expected[0])
    replace_weights(model, weights)
    take_back(replaced)
    for found, want in zip(reference_logits(model), expected, strict=True):
        assert torch.equal(found, want)
    assert len(list(own_linears(model))) == len(replaced), "after it was taken back"


def take_back(replaced: list[Replaced]) -> None:
    """What was there before."""
    for parent, name, again in replaced:
        setattr(parent, name, again())


def test_other_layers_stay() -> None:
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    assert not list(own_linears(nn.ModuleList([hooked, nn.Linear(4, 4).double(), nn.Bilinear(2, 2, 2)])))


# A target whose passes differ computes with these kernels


# isort: split


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a device that has our kernels, whose libraries' passes differ."""
    with caches_as_on_a_device():
        target = SlotRunner(deepcopy(tiny_model()).to(DEVICE), 2, 48, 12)
        target.can_verify_trees = True

        def asked(target: SlotRunner) -> tuple[int, str]:
            return (0, "some positions differ") if target.kv_cache.kernel is None else ask(target)

        ask = settle._compare_all
        monkeypatch.setattr(settle, "_compare_all", asked)
        monkeypatch.setattr(settle, "_runner_with_invariant_kernels", lambda _: target)
        monkeypatch.setattr(settle, "_results", {})
        monkeypatch.setattr(settle, "_result_file", lambda _: None)
        yield target


def logits(target: SlotRunner, text: np.ndarray[Any, Any], *widths: int) -> torch.Tensor:
    """Of all positions, by passes of these widths."""
    found, place = [], 0
    for width in widths:
        part = text[None, place : place + width]
        found.append(target.forward([0], part, [width]).logits[0].clone())
        place += width
    target.rollback(0, 0)
    return torch.cat(found)


@runs_loops
@torch.inference_mode()
def test_kernels_of_our_own_are_put_in_and_taken_back(target: SlotRunner) -> None:
    renewed = []
    target.recapture_graphs = lambda: renewed.append(target.kv_cache.kernel)
    text = np.random.default_rng(0).integers(0, VOCAB, 30)
    before = logits(target, text, 30)
    settle.verify_batch_invariance(target, "on")
    assert target.batch_invariance.is_invariant and target.batch_invariance.num_compared > 50
    assert target.kv_cache.kernel is not None and not target.can_verify_trees and len(renewed) == 1
    expected = logits(target, text, 30)
    torch.testing.assert_close(expected, before, rtol=1e-3, atol=1e-4)
    for widths in ((1,) * 30, (7, 1, 12, 10)):
        assert torch.equal(logits(target, text, *widths), expected)
    settle.verify_batch_invariance(target, "on")
    assert target.batch_invariance.is_invariant and torch.equal(logits(target, text, 29, 1), expected)
    settle.verify_batch_invariance(target, "off")
    assert target.kv_cache.kernel is None and target.can_verify_trees and renewed[-1] is None
    torch.testing.assert_close(logits(target, text, 30), before, rtol=1e-3, atol=1e-4)  # of joined layers


@runs_loops
def test_trees_are_not_given_up_unasked(target: SlotRunner) -> None:
    settle.verify_batch_invariance(target, "auto")
    assert not target.batch_invariance.is_invariant and "chains" in target.batch_invariance.reason
    assert target.kv_cache.kernel is None and target.can_verify_trees
