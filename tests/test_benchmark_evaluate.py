"""The benchmark of predictions, on a few tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.evaluate import command
from benchmarks.evaluate.command import line
from benchmarks.evaluate.predicted import evaluate, write_log
from benchmarks.report.evaluate import evaluate_section

RESULT = {
    "date": "2026-11-22",
    "environment": {"cpu": "some CPU", "cores": 2},
    "model": "bundled model",
    "dtype": "torch.float32",
    "parameters": {"requests": 32, "max_tokens": 64, "prompt_tokens": 320, "rounds": 3, "seed": 0},
    "workloads": [
        {
            "workload": "mixed",
            "shares": "60% new, 40% repeated",
            "output_tokens": 2000,
            "measured": 1.7,
            "measured_rounds": [1.6, 1.7, 1.8],
            "tokens_per_step": 2.2,
            "predicted": 1.6,
            "predicted_tokens_per_step": 2.0,
            "error": -0.0588,
            "ties": 0,
        }
    ],
    "median_error": 0.0588,
}


def test_each_workload_has_its_error_in_the_table() -> None:
    assert "1.70x" in line(RESULT["workloads"][0]) and "-5.9%" in line(RESULT["workloads"][0])  # type: ignore[index]
    section = evaluate_section([RESULT])
    assert (
        "| bundled model | mixed: 60% new, 40% repeated | 1.70x | 1.60 ... 1.80 | 1.60x | -5.9% | 2.20 / 2.00 |"
        in section
    )
    assert "Median error 5.9%" in section


def test_a_log_of_token_ids_is_what_the_command_reads(tmp_path: Path) -> None:
    write_log(tmp_path / "log.jsonl", [[1, 2], [3]], [[4], [5, 6]])
    records = [json.loads(text) for text in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert records == [{"token_ids": [1, 2, 4], "prompt_length": 2}, {"token_ids": [3, 5, 6], "prompt_length": 1}]


def test_a_command_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="status 2"):
        evaluate(tmp_path / "absent.jsonl", str(tmp_path))


@pytest.mark.slow
def test_predictions_are_held_against_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workloads", "often", "--requests", "3", "--max-tokens", "16", "--rounds", "1"]
    assert command.main([*arguments, "--out", str(tmp_path / "out.json")]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == result
    (found,) = result["workloads"]
    assert found["mismatches"] == 0
    assert found["predicted"] > 0.5 and found["measured"] > 0
    assert found["error"] == pytest.approx(found["predicted"] / found["measured"] - 1, abs=1e-3)
