"""Weights are held once: packed or plain, tied or not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ssd.model.layers import packed_linear
from ssd.model.layers.packed_embedding import PackedEmbedding, reader_of
from ssd.model.layers.packed_linear import PackedLinear, pack_linears, packed_types
from ssd.model.layers.replace import plain_logits, replace_layers
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.loading.memory import weight_bytes
from tests.models import tiny_model

DTYPES = packed_types()
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
    assert size > 20e6 and weight_bytes(model).total < 1.01 * size
    with caplog.at_level(logging.INFO, "ssd.model.loading"):
        open_target(model, num_slots=1, max_length=64)
    held = weight_bytes(model)
    assert held.total <= 1.1 * size and held.packed > 0.5 * size
    assert type(model.get_output_embeddings()) is PackedLinear
    assert isinstance(model.get_input_embeddings(), PackedEmbedding if tied else nn.Embedding)
    assert f"weights {held.total / 1e9:.2f}, of them packed {held.packed / 1e9:.2f}" in caplog.text
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
    reader = reader_of(embedding, packed(embedding.weight))
    assert reader is not None
    ids = torch.randint(out, shape)
    assert torch.equal(reader(ids), embedding(ids))
    for wrong in (-1, out):
        with pytest.raises(IndexError, match="token id"):
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
    reader = reader_of(scaled, packed(scaled.weight))
    assert reader is not None and torch.equal(reader(ids), scaled(ids))
    shifted, renormed = (kind.requires_grad_(False) for kind in (_Shifted(9, 5), nn.Embedding(9, 5, max_norm=1.0)))
    for other in (shifted, renormed, nn.Linear(5, 9)):
        assert reader_of(other, packed(other.weight.detach())) is None


def test_a_tied_layer_stays_where_its_embedding_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "reader_of", lambda *_: None)
    model: Any = tiny_model(tie_word_embeddings=True)
    size = weight_bytes(model).total
    assert replace_layers(model, (pack_linears,), expected=plain_logits(model), tolerance=1e-3)
    assert model.lm_head.weight is model.model.embed_tokens.weight and type(model.lm_head) is nn.Linear
    assert weight_bytes(model).plain < size


def test_tied_layers_come_back_tied(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_model(tie_word_embeddings=True)
    expected = plain_logits(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not replace_layers(model, (pack_linears,), expected=[x + 1 for x in expected], tolerance=1e-3)
    assert "stay as they are" in caplog.text
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(found, want) for found, want in zip(plain_logits(model), expected, strict=True))
