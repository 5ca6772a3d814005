"""The GPU check: on a CPU and small, so that whoever has a GPU does not begin with its mistakes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check.command import PARTS, main


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    return found


def test_passes_attention_and_decode_run_and_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--device", "cpu", "--rounds", "2", "--decode-shape", "tiny", "--decode-context", "64"]
    small += ["--batch", "1", "3", "--width", "1", "4"]
    assert main([*small, "--parts", "passes", "attention", "decode", "--out", str(tmp_path)]) == 0
    result = last_line(capsys)
    for dtype in ("float32", "bfloat16"):
        assert [way["way"] for way in result["passes"][dtype]["ways"]] == ["plain", "static shapes"]
        assert all(way["passed"] and len(way["times"]) == 4 for way in result["passes"][dtype]["ways"])
    assert result["passes"]["float32"]["ways"][1]["tokens_that_differ"] == 0
    assert all(
        row["T"] in (1, 16) for way in ("graphs", "enforce_eager", "fused") for row in result["decode"][way]["rows"]
    )
    assert json.loads((tmp_path / "gpu_check.json").read_text()) == result


def test_a_part_that_fails_is_said_and_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: argparse.Namespace) -> dict[str, Any]:
        raise RuntimeError("on purpose")

    monkeypatch.setitem(PARTS, "passes", broken)
    monkeypatch.setitem(PARTS, "attention", lambda args: {"passed": True})
    assert main(["--device", "cpu", "--parts", "passes", "attention"]) == 1
    result = last_line(capsys)
    assert "on purpose" in result["passes"]["failure"] and result["attention"]["passed"]


def test_no_part_begins_after_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--minutes", "-1"]) == 0
    assert all("skipped" in last for last in [last_line(capsys)[part] for part in ("passes",)])
