"""The benchmark of sources: every part once, on a tiny model with a head of random weights; no times."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.sources.command import main
from benchmarks.sources.contenders import ALL, HEAD, MODEL, OFF, RECYCLING, RETRIEVAL, contenders, own_head
from benchmarks.sources.rounds import Outcome, Tally
from ssd.bundled import MODEL_PATH
from tests import published_heads as published
from tests.models import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads and writes with the bundled model's tokenizer, and heads beside it."""
    path = tmp_path_factory.mktemp("tiny")
    vocab_size = json.loads((MODEL_PATH / "config.json").read_text())["vocab_size"]
    model = tiny_model(vocab_size=vocab_size, max_position_embeddings=256)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL_PATH / name, path / name)
    size = model.config.hidden_size
    tensors: dict[str, torch.Tensor] = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = published.random(size, size, seed=head)
        tensors[f"{head}.0.linear.bias"] = published.random(size, seed=head + 10)
        tensors[f"{head}.1.weight"] = model.get_output_embeddings().weight.detach().clone()
    config = {"hidden_size": size, "vocab_size": vocab_size, "medusa_num_heads": 2}
    published.write(path / "heads", config, tensors)
    return path


@pytest.mark.slow
def test_every_source_alone_and_all_together_say_what_speculation_off_says(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sources.json"
    asked = ["--model", str(tiny), "--head", str(tiny / "heads"), "--requests", "3", "--rounds", "2", "--out", str(out)]
    assert main([*asked, "--max-tokens", "12", "--prompt-tokens", "48", "--num-speculative-tokens", "8"]) == 0
    line = capsys.readouterr().out.strip().split("\n")[-1]
    result = json.loads(line)
    assert out.read_text() == line + "\n"
    assert result["parameters"]["draft_head"] == "heads"
    assert [run["sampling"] for run in result["runs"]] == ["greedy", "sampled"]
    for run in result["runs"]:
        assert run["mismatches"] == 0 and run["compared_tokens"] > 0
        rows = {row["source"]: row for row in run["rows"]}
        assert list(rows) == [OFF, RETRIEVAL, RECYCLING, HEAD, ALL]
        assert rows[OFF]["tokens_per_pass"][0] <= 1.1 and rows[OFF]["drafted_per_pass"][0] == 0
        assert run["all_over_best"]["best"] in (RETRIEVAL, RECYCLING, HEAD)
        for row in rows.values():
            middle, least, most = row["over_off"]
            assert 0 < least <= middle <= most


def test_all_together_is_compared_with_the_best_source_alone() -> None:
    def tally(seconds: float) -> Tally:
        return Tally(seconds=seconds, cpu_s=2 * seconds, tokens=100, passes=50)

    rounds = [
        {OFF: tally(10.0), RETRIEVAL: tally(8.0), RECYCLING: tally(5.0), ALL: tally(seconds)} for seconds in (4.0, 5.0)
    ]
    found = Outcome(rounds).all_over_best()
    assert found == {"best": RECYCLING, "ratio": [1.125, 1.0, 1.25], "ratio_by_cpu_time": [1.125, 1.0, 1.25]}
    assert Outcome([{OFF: tally(1.0)}]).all_over_best() is None


def test_each_contender_alone_has_one_source_and_all_together_has_each(tmp_path: Path) -> None:
    found = {contender.name: contender for contender in contenders(tmp_path, "a model")}
    assert list(found) == [OFF, RETRIEVAL, RECYCLING, HEAD, MODEL, ALL]
    sources = [
        [contender.retrieval, contender.recycling, contender.head is not None, contender.draft_model is not None]
        for contender in found.values()
    ]
    assert [sum(each) for each in sources] == [0, 1, 1, 1, 1, 4]
    assert [contender.name for contender in contenders(None, None)] == [OFF, RETRIEVAL, RECYCLING, ALL]
    assert own_head(tmp_path) is None
