"""A checkpoint is served with all its weights or not at all; how much memory may be in use."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd.errors import ModelError
from ssd.model.loading import memory as kv_budget
from ssd.model.loading.load_target import load_model
from ssd.model.loading.memory import free_bytes, total_bytes, usable_bytes
from tests.models import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model("Llama", num_hidden_layers=2).save_pretrained(tmp_path)
    return tmp_path


def change(checkpoint: Path, **settings: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_whole_checkpoint_is_loaded_without_a_word(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_model(checkpoint, device="cpu")
    assert not caplog.records


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_not_missing_and_others_are(tied: bool, tmp_path: Path) -> None:
    tiny_model("Llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    assert ("lm_head.weight" in load_file(path)) is not tied
    load_model(tmp_path, device="cpu")
    change(tmp_path, tie_word_embeddings=not tied)
    if tied:
        with pytest.raises(ModelError, match=r"lacks 1 of the weights .* lm_head\.weight: "):
            load_model(tmp_path, device="cpu")


def test_layers_that_are_not_there_are_named_and_never_made_up(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change(checkpoint, num_hidden_layers=12)
    with pytest.raises(ModelError, match=r"lacks 90 of the weights .* model\.layers\.2\.input_layernorm") as error:
        load_model(checkpoint, device="cpu")
    assert "\n" not in str(error.value) and "LOAD REPORT" not in "".join(capfd.readouterr())


def test_weights_of_another_shape_are_refused(checkpoint: Path) -> None:
    change(checkpoint, intermediate_size=40)
    with pytest.raises(
        ModelError, match=r"weights have other shapes than its config\.json says, model\.layers\.0\.mlp"
    ):
        load_model(checkpoint, device="cpu")


def test_weights_without_a_place_are_warned_of(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(checkpoint, num_hidden_layers=1)
    load_model(checkpoint, device="cpu")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no place for 9 weights" in caplog.text and "model.layers.1." in caplog.text


def test_a_single_weight_that_is_missing_is_enough(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the weights .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(checkpoint, device="cpu")


def test_a_file_cut_short_is_an_error_of_one_line(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load model"):
        load_model(checkpoint, device="cpu")


def test_a_share_of_all_memory_counts_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_bytes(CPU) <= total_bytes(CPU)
    monkeypatch.setattr(kv_budget, "total_bytes", lambda _device: 1000)
    monkeypatch.setattr(kv_budget, "free_bytes", lambda _device: 700)
    assert [usable_bytes(CPU), usable_bytes(CPU, 0.9), usable_bytes(CPU, 1.0)] == [350, 600, 700]
    for too_low in (0.1, 0.3):
        with pytest.raises(ModelError, match="--gpu-memory-utilization"):
            usable_bytes(CPU, too_low)
