"""Layers that take the place of a model's own say what those say, weights are held once, or they go again."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssd.model.cpu import cpu_decoder, packed_linear
from ssd.model.cpu.cpu_layers import FusedNorm, FusedRotary, fuse_norms, fuse_rotary
from ssd.model.cpu.packed_embedding import PackedEmbedding, pack_embedding
from ssd.model.cpu.packed_linear import PackedGroup, PackedLinear, PackedMember, pack_linears, packable_dtypes
from ssd.model.layers.hidden_states import check_hidden_states
from ssd.model.layers.replace import reference_logits, replace_layers
from ssd.model.loading import load_target
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.loading.memory import weight_bytes
from ssd.model.runners.adapted_linear import AdaptedLinear, AdapterRows
from ssd.model.runners.select_runner import CPU_LAYERS
from tests.models import tiny_model
from tests.static_targets import have_same_bits


def linear(out: int, size: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(size, out, bias=bias, dtype=dtype).requires_grad_(False)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    out=st.integers(1, 70),
    size=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from(packable_dtypes()),
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
    monkeypatch.setattr(load_target, "packable_dtypes", lambda: (torch.float32,))
    assert load_target.faster_type(tiny_model().to(torch.bfloat16)) is torch.float32


def test_what_the_library_keeps_in_float32_stays_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    for kind in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(load_target, "faster_type", partial(lambda kind, _: kind, kind))
        model: Any = load_target.load_model(tmp_path, device="cpu")
        assert model.dtype == kind
        assert torch.equal(model.model.rotary_emb.inv_freq, tiny_model().model.rotary_emb.inv_freq)


@given(
    outs=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    bias=st.booleans(),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=12),
)
def test_fused_layers_answer_in_any_order(outs: list[int], bias: bool, asked: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    layers = [linear(out, 11, bias=bias) for out in outs]
    group = PackedGroup(layers)
    members = [PackedMember(group, member) for member in range(len(layers))]
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
    shared = linear(3, 4, bias=False)
    for gate, up, fit in (
        (linear(3, 4, bias=True), linear(3, 4, bias=False), False),
        (linear(3, 4, bias=False), linear(3, 5, bias=False), False),
        (shared, shared, False),
        (linear(3, 4, bias=False), linear(2, 4, bias=False), True),
    ):
        module = nn.ModuleDict({"gate_proj": gate, "up_proj": up})
        list(pack_linears(module))
        assert any(isinstance(each, PackedMember) for each in module.children()) is fit


# -- weights are held once -------------------------------------------------------------------------------------------

DTYPES = packable_dtypes()
WIDE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}


def packed(weight: torch.Tensor) -> torch.Tensor:
    return PackedLinear(weight, None).packed


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_opened_model_holds_its_weights_once(
    name: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = tiny_model(name, **WIDE, tie_word_embeddings=tied)
    made.save_pretrained(tmp_path)  # in float32, so that the loaded weights are those of the mapped file
    model = load_model(tmp_path, device="cpu")
    size = 4 * sum(weight.numel() for weight in model.parameters())
    assert size > 20e6 and weight_bytes(model) < 1.01 * size
    with caplog.at_level(logging.INFO, "ssd.model.loading"):
        open_target(model, num_slots=1, max_length=64)
    held = weight_bytes(model)
    assert held <= 1.1 * size
    assert type(model.get_output_embeddings()) is PackedLinear
    assert isinstance(model.get_input_embeddings(), PackedEmbedding if tied else nn.Embedding)
    assert f"{held / 1e9:.2f} GB of weights and a KV cache" in caplog.text
    assert not any(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())


@given(
    out=st.integers(1, 600),
    size=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 5), max_size=3),
    seed=st.integers(0, 99),
)
def test_rows_of_a_packed_matrix_are_those_it_was_made_of(
    out: int, size: int, dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    embedding = nn.Embedding(out, size, dtype=dtype).requires_grad_(False)
    reader = pack_embedding(embedding, packed(embedding.weight))
    assert reader is not None
    ids = torch.randint(out, shape)
    assert torch.equal(reader(ids), embedding(ids))
    for wrong in (-1, out):
        with pytest.raises(IndexError, match="out of range"):
            reader(torch.tensor([0, wrong]))


class _Scaled(nn.Embedding):
    """As Gemma's."""

    embed_scale = torch.tensor(640**0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class _Shifted(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_that_scales_its_rows_is_read_and_others_are_not(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 8, 3]])
    scaled = _Scaled(9, 5, dtype=dtype).requires_grad_(False)
    reader = pack_embedding(scaled, packed(scaled.weight))
    assert reader is not None and torch.equal(reader(ids), scaled(ids))
    shifted, renormed = (kind.requires_grad_(False) for kind in (_Shifted(9, 5), nn.Embedding(9, 5, max_norm=1.0)))
    for other in (shifted, renormed, nn.Linear(5, 9)):
        assert pack_embedding(other, packed(other.weight.detach())) is None


def test_a_tied_layer_stays_where_its_embedding_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "pack_embedding", lambda *_: None)
    model: Any = tiny_model(tie_word_embeddings=True)
    assert replace_layers(model, (pack_linears,), expected=reference_logits(model), tolerance=1e-3)
    assert model.lm_head.weight is model.model.embed_tokens.weight and type(model.lm_head) is nn.Linear


def test_layers_that_compute_something_else_go_again_and_tied_ones_come_back_tied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = tiny_model(tie_word_embeddings=True)
    expected = reference_logits(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not replace(model, [x + 1 for x in expected])
    assert (
        "keeps its original layers" in caplog.text and "logits differ by" in caplog.text and kinds(model) == {nn.Linear}
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(found, want) for found, want in zip(reference_logits(model), expected, strict=True))


KINDS = (pack_linears, fuse_norms, fuse_rotary)


def replace(model: Any, expected: list[torch.Tensor] | None = None) -> bool:
    return replace_layers(model, KINDS, expected=expected or reference_logits(model), tolerance=1e-3)


def kinds(model: nn.Module) -> set[type]:
    """Of layers that may be replaced, and of what turns queries and keys."""
    changed = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    used = [type(each) for each in model.modules()]
    used += [type(forward.__func__.__globals__["apply_rotary_pos_emb"]) for forward in changed]
    return set(used) & {nn.Linear, PackedLinear, PackedMember, FusedNorm, FusedRotary}


def test_a_model_says_the_same_and_is_changed_once() -> None:
    model = tiny_model()
    expected = reference_logits(model)
    assert replace(model, expected)
    assert kinds(model) == {PackedLinear, PackedMember, FusedNorm, FusedRotary}
    for found, want in zip(reference_logits(model), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert not replace(model, expected)


class _Reaching(nn.Module):
    """Looks at its layer's weight, as some models do, or computes with its numbers."""

    def __init__(self, inner: nn.Linear, with_numbers: bool) -> None:
        super().__init__()
        self.inner, self.with_numbers = inner, with_numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x.to(self.inner.weight.dtype))
        return x if not self.with_numbers or self.inner.bias is None else x + self.inner.bias


def test_a_model_that_computes_with_its_layers_weights_is_left_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_model()
    model.lm_head = _Reaching(model.lm_head, with_numbers=True)
    expected = reference_logits(model)
    with caplog.at_level(logging.WARNING):
        assert not replace(model, expected)
    assert kinds(model) == {nn.Linear}
    assert "keeps its original layers" in caplog.text and "weight" in caplog.text
    for found, want in zip(reference_logits(model), expected, strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("name", ["Llama", "Mamba-2"])
def test_a_model_that_looks_at_the_type_of_a_weight_is_changed(name: str) -> None:
    model: Any = tiny_model(name)
    if name == "Llama":
        model.lm_head = _Reaching(model.lm_head, with_numbers=False)
    expected = reference_logits(model)
    assert replace(model, expected) and PackedLinear in kinds(model) and nn.Linear not in kinds(model)
    for found, want in zip(reference_logits(model), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


# -- whole layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Gemma", "gemma2", "Gemma 3", "Llama", "mistral", "Qwen2", "Qwen3"])
def test_flat_layers_have_the_bits_of_the_library_s(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"layer_types": ["sliding_attention", "full_attention"]} if name == "Gemma 3" else {}

    def opened() -> Any:
        return open_target(tiny_model(name, **changes).to(dtype), num_slots=3, max_length=100)

    flat = opened()
    assert all("forward" in vars(layer) for layer in flat.model.model.layers)
    monkeypatch.setattr(cpu_decoder, "_LAYER_CLASSES", frozenset())
    plain = opened()
    assert not any("forward" in vars(layer) for layer in plain.model.model.layers)
    assert cpu_decoder.is_flat(flat.model) and not cpu_decoder.is_flat(plain.model)
    have_same_bits(flat, plain)
    calls: list[int] = []
    attention = vars(cpu_decoder)["cpu_attention"]

    def counted(*args: Any) -> torch.Tensor:
        calls.append(1)
        return attention(*args)

    monkeypatch.setattr(cpu_decoder, "cpu_attention", counted)
    flat.prefill([1], np.array([[5, 6, 7]]), [3])
    assert len(calls) == len(flat.model.model.layers) - 1, "only keys and values are computed in the last layer"


def test_a_layer_with_adapters_or_hooks_is_the_library_s() -> None:
    model: Any = tiny_model()
    replace_layers(model, CPU_LAYERS, expected=reference_logits(model), tolerance=1e-3)
    layer = model.model.layers[0]
    flat = vars(layer)["forward"].__func__.__self__
    assert flat.is_usable() and cpu_decoder.is_flat(model)
    hook = model.model.norm.register_forward_hook(lambda *_: None)
    assert not cpu_decoder.is_flat(model)
    hook.remove()
    layer.self_attn.q_proj = AdaptedLinear(layer.self_attn.q_proj, {}, AdapterRows())
    assert not flat.is_usable()
    hooked: Any = tiny_model()
    check_hidden_states(
        hooked, (1,)
    )  # the library's collector stays with attention: it wants nothing of passes of slots
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    replace_layers(hooked, CPU_LAYERS, expected=reference_logits(hooked), tolerance=1e-3)
    assert ["forward" in vars(layer) for layer in hooked.model.layers] == [False, True]
