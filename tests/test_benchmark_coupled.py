"""The benchmark of coupled sampling: every part once, on a tiny model; no times."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.coupled.command import main
from benchmarks.coupled.marks import marks_of
from benchmarks.coupled.variants import near_variant
from benchmarks.coupled.windows import aligned, common_prefix, same_place
from benchmarks.coupled.workloads import FIRST_FIFTH, LAST_FIFTH, NEW, REPEATS, VARIANTS
from benchmarks.report.coupled import coupled_section, window_section
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from tests.models import tiny_model

_LITTLE = ["--max-tokens", "10", "--prompt-tokens", "128", "--num-speculative-tokens", "8", "--temperatures", "0.7"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads and writes with the bundled model's tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    vocab_size = json.loads((MODEL_PATH / "config.json").read_text())["vocab_size"]
    tiny_model(vocab_size=vocab_size, max_position_embeddings=256).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL_PATH / name, path / name)
    return path


def run(capsys: pytest.CaptureFixture[str], *asked: str) -> dict[str, Any]:
    assert main([*asked, *_LITTLE]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    return result


@pytest.mark.slow
def test_what_is_asked_again_takes_fewer_passes_and_no_token_changes(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "coupled.json"
    asked = ["--requests", "3", "--growth-requests", "5", "--growth-streams", "2", "--group", "2"]
    result = run(capsys, "--model", str(tiny), "--streams", "1", "3", *asked, "--out", str(out))
    assert json.loads(out.read_text()) == result
    assert result["benchmark"] == "coupled"
    assert result["mismatches"] == 0 and result["compared_tokens"] > 0
    rows = {(row["workload"], row["streams"]): row for row in result["rows"]}
    assert list(rows) == [
        (NEW, 2),
        *((workload, streams) for streams in (1, 3) for workload in (REPEATS, VARIANTS)),
        (FIRST_FIFTH, 2),
        (LAST_FIFTH, 2),
    ]
    for (workload, _), row in rows.items():
        middle, least, most = row["coupled"]["over_off"]
        assert 0 < least <= middle <= most
        if workload == REPEATS:
            assert row["coupled"]["tokens_per_pass"] > 2 * row["uncoupled"]["tokens_per_pass"]
    assert [mark["workload"] for mark in result["marks"]] == [NEW, *2 * [REPEATS, VARIANTS], LAST_FIFTH]
    assert coupled_section([result]).count("\n| ") == len(rows)


@pytest.mark.slow
def test_windows_are_compared_on_the_same_pairs(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "--model", str(tiny), "--requests", "3", "--windows", "2", "4")
    assert result["benchmark"] == "coupled-window" and result["mismatches"] == 0
    assert [row["window"] for row in result["rows"]] == [0, 2, 4]
    assert result["pairs"] == 6
    for row in result["rows"]:
        assert 0 <= row["same_place"][0] <= 1 and 0 <= row["aligned"][0] <= 1
        assert 0 <= row["common_prefix"][0] <= 10 and row["tokens_per_pass"] >= 1
    assert "| a seed each |" in window_section([result])


def test_a_near_variant_differs_in_one_place() -> None:
    for seed in range(3):
        for text in snippets(seed)[:40]:
            changed = near_variant(text, np.random.default_rng(seed))
            assert changed == near_variant(text, np.random.default_rng(seed)) != text
            before = next(i for i, (a, b) in enumerate(zip(text + "\0", changed + "\0", strict=False)) if a != b)
            shared = len(text) - before
            after = next((i for i in range(shared) if text[-1 - i] != changed[-1 - i]), shared)
            assert shared - after <= 60, "what is taken away"
            assert len(changed) - before - after <= 120, "what is put there"


def test_measures_of_agreement_say_what_two_answers_have_in_common() -> None:
    one, other = [1, 2, 3, 4, 5, 6], [1, 2, 9, 3, 4, 5, 6]
    assert same_place(one, other) == pytest.approx(2 / 7)
    assert common_prefix(one, other) == 2
    assert aligned(one, other) == pytest.approx(8 / 13), "the block of two is too short"
    assert same_place(one, one) == aligned(one, one) == 1 and common_prefix(one, one) == 6
    assert same_place([], []) == aligned([], []) == 1 and common_prefix([], [1]) == 0


def test_marks_say_what_is_met() -> None:
    def row(workload: str, over: float, against: list[float]) -> dict[str, Any]:
        return {
            "workload": workload, "temperature": 0.7, "streams": 4, "coupled": {"over_off": [over, over, over]},
            "coupled_over_uncoupled": [0.97, 0.9, 1.1], "coupled_over_uncoupled_95": against,
        }  # fmt: skip

    rows = [row(REPEATS, 6.1, [1, 1]), row(REPEATS, 5.9, [1, 1]), row(VARIANTS, 1.4, [1, 1]), row(FIRST_FIFTH, 1, [])]
    rows += [row(LAST_FIFTH, 1.4, [1, 1]), row(NEW, 0.9, [0.95, 1.01]), row(NEW, 0.9, [0.9, 0.99])]
    assert [mark["met"] for mark in marks_of(rows)] == [True, False, True, False, True, False]
