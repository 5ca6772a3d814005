"""The draft head that ships with the bundled model: small, loads as a published one does, foresees what it should."""

from __future__ import annotations

import json
from functools import cache

import torch
from transformers import PreTrainedModel

from benchmarks.training.measure import acceptance, write
from ssd.bundled import HEAD_PATH, MODEL_PATH
from ssd.model.heads.layouts import load_head
from ssd.model.heads.networks import Eagle3Head
from ssd.model.loading.load_target import load_model


@cache
def bundled_model() -> PreTrainedModel:
    return load_model(MODEL_PATH, dtype="float32", device="cpu")


@cache
def head() -> Eagle3Head:
    loaded = load_head(HEAD_PATH, bundled_model())
    assert isinstance(loaded, Eagle3Head)
    loaded.config._attn_implementation = "sdpa"
    return loaded


def test_weights_and_description_are_at_most_3_megabytes() -> None:
    assert sum(file.stat().st_size for file in HEAD_PATH.iterdir()) <= 3_000_000
    assert {"README.md", "config.json", "model.safetensors", "training.jsonl"} == {
        file.name for file in HEAD_PATH.iterdir()
    }


def test_it_reads_three_hidden_states_and_drafts_frequent_tokens() -> None:
    assert head().feature_layers == (2, 4, 6)
    ids = head().draft_to_target
    assert ids is not None and len(ids) == 2048 and bool((ids.diff() > 0).all()) and int(ids[-1]) < 4096


def test_it_agrees_with_the_model_about_as_often_as_when_it_was_trained() -> None:
    lines = [json.loads(line) for line in (HEAD_PATH / "training.jsonl").read_text().splitlines()]
    recorded = next(line for line in lines if "held_out" in line)["held_out"][0]["most_probable"]
    prefixes = torch.tensor([[5, 300, 7, 41], [900, 12, 600, 33], [64, 250, 1000, 77], [2000, 9, 10, 400]])
    texts = write(bundled_model(), prefixes, 100, 0.0, seed=0)
    found = acceptance(bundled_model(), head(), texts)["most_probable"]
    assert found["accepted_to_depth"][0] > 0.5 * recorded["accepted_to_depth"][0]
