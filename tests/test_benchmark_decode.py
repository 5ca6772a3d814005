"""The decode benchmark: on a tiny model, every part of it once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decode.baselines import time_generate
from benchmarks.decode.command import main
from benchmarks.decode.shapes import SHAPES, random_model
from benchmarks.decode.steps import BareForward, Shape, Tokens, cache_bytes, time_steps, weight_bytes
from ssd.model.loading.load_target import open_target
from tests.models import VOCAB, tiny_model

PLAIN_MODEL = tiny_model()


def prompts(num: int) -> list[Tokens]:
    return [np.random.default_rng(row).integers(3, VOCAB, 9).astype(np.int32) for row in range(num)]


@pytest.mark.parametrize("runs_beside_host", [False, True])
def test_drafts_of_known_text_are_accepted_whole_and_change_nothing(runs_beside_host: bool) -> None:
    target = open_target(tiny_model(), num_slots=2, max_length=64, max_draft_tokens=3)
    target.runs_beside_host = runs_beside_host
    plain = time_steps(target, prompts(2), Shape(2, 16, 0), 24, [], PLAIN_MODEL)
    drafted = time_steps(target, prompts(2), Shape(2, 16, 3), 5, plain.outputs, PLAIN_MODEL)
    assert drafted.num_tokens == 2 * 4 * len(drafted.steps)
    assert len(drafted.targets) == len(drafted.outside) >= 2 and len(drafted.steps) == len(drafted.forwards) >= 2
    assert runs_beside_host or len(drafted.steps) == len(drafted.targets)
    for said, text in zip(drafted.outputs, plain.outputs, strict=True):
        assert said == text[: len(said)]
    weights = sum(p.numel() * p.element_size() for p in PLAIN_MODEL.parameters())
    assert 0 < weight_bytes(PLAIN_MODEL) <= weights
    assert 0 < cache_bytes(target, Shape(2, 16, 3)) <= target.num_slots * 64 * 10_000


@pytest.mark.parametrize("name", ["Gemma 3", "Mistral (sliding window)"])
def test_a_bare_forward_of_a_model_with_a_window_that_is_full_can_be_repeated(name: str) -> None:
    model = tiny_model(name)
    window = model.config.get_text_config().sliding_window
    forward = BareForward(model, Shape(2, window, 3), 3 * window)
    assert min(forward.seconds() for _ in range(4)) > 0
    assert forward._cache.get_seq_length() == 3 * window


def test_generate_says_the_same_every_way_or_why_it_does_not_run() -> None:
    target = open_target(tiny_model(), num_slots=1, max_length=64)
    found = time_generate(PLAIN_MODEL, target, prompts(1)[0], 4, 1)
    assert found["eager"]["equal_to_eager"] and found["eager"]["tokens_per_s"] > 0
    assert found["engine"]["equal_to_eager"] and found["engine"]["engine_over_it"] == 1.0
    assert all("error" in way or way["equal_to_eager"] for way in found.values())


def test_the_command_ends_with_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batch", "1", "2", "--context", "24", "--draft", "0", "3", "--rounds", "3", "--copy-mb", "8"]
    assert main([*small, "--no-baselines", "--out", str(tmp_path / "decode.json")]) == 0
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert [(row["batch"], row["T"]) for row in result["rows"]] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert all(row["step_ms_p50"] > 0 and row["forward_ms_p50"] > 0 for row in result["rows"])
    assert json.loads((tmp_path / "decode.json").read_text()) == result


def test_shapes_are_those_of_the_models_they_stand_for() -> None:
    assert SHAPES["8b"].num_hidden_layers == 32 and SHAPES["1b"].tie_word_embeddings


def test_impossible_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--batch", "0"])
    assert "from 1" in capsys.readouterr().err


def test_a_model_that_speaks_names_the_next_token_clearly_in_bfloat16() -> None:
    model = random_model("tiny", dtype="bfloat16", device="cpu", speaks=True)
    tokens = torch.arange(3, 99)[None]
    with torch.inference_mode():
        best = model(input_ids=tokens).logits[0].float().topk(2)
    assert (best.values[:, 0] > 1.5 * best.values[:, 1]).all()
    followers = best.indices[:, 0]
    assert len(followers.unique()) == tokens.numel() and (followers != tokens[0]).all()
