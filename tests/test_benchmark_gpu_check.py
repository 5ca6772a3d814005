"""The GPU check: on a CPU and small, so that whoever has a GPU does not begin with its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import PARTS, main, marks, read_results


def check(*options: str, out: Path) -> int:
    return main(["--device", "cpu", *options, "--out", str(out)])


@pytest.mark.slow
def test_parts_run_and_give_every_mark_its_value(tmp_path: Path) -> None:
    parts = ("exactness", "speed-large", "repeats", "drafting", "overhead-large", "growth", "soak", "profile")
    assert check("--parts", *parts, out=tmp_path) == 0
    result = read_results(tmp_path)
    assert [row["dtype"] for row in result["exactness"]["results"][0]["rows"]] == ["float32", "bfloat16", "float16"]
    missing = [mark.name for mark in marks(result) if mark.is_met is None]
    assert all("is right" in name or "positions" in name or "small shape, " in name for name in missing), missing
    assert list((tmp_path / "traces").iterdir())


_SCRIPT = """
import json, pathlib, sys, time
pathlib.Path(sys.argv[-1]).write_text(json.dumps({"benchmark": "made", "half": 1}))
time.sleep(float(sys.argv[1]))
sys.exit("on purpose")
"""


def test_a_part_that_fails_or_hangs_is_said_with_what_it_had_found_and_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "made_part.py").write_text(_SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("benchmarks.gpu_check._SECONDS", 3)
    for name, commands in {"soak": ("made_part 0",), "growth": ("made_part 60",), "profile": ()}.items():
        monkeypatch.setitem(PARTS, name, (1, commands))
    assert check("--parts", "soak", "growth", "profile", out=tmp_path) == 1
    said: dict[str, Any] = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert said["failed"][:2] == ["soak", "growth"]
    result = read_results(tmp_path)
    assert "on purpose" in result["soak"]["failure"] and "time was over" in result["growth"]["cut"]
    assert [result[part]["results"][0]["half"] for part in ("soak", "growth")] == [1, 1]
    assert result["profile"]["passed"] and "skipped" in result["profile"]


def test_marks_read_both_ways_and_what_was_not_measured_is_neither_met_nor_missed() -> None:
    rows = [
        {"batch": 1, "T": 1, "step_ms_p50": 5.0, "of_copy": 0.9, "outside_pass_share": 0.2},
        {"batch": 1, "T": 16, "step_ms_p50": 5.4, "of_copy": 0.8, "outside_pass_share": 0.2},
    ]
    found = marks({"speed-large": {"passed": True, "results": [{"benchmark": "decode", "rows": rows}]}})
    by_name = {mark.name: mark.is_met for mark in found}
    assert by_name["large shape, plain decoding at batch 1, share of the copy rate"] is True
    assert by_name["large shape, 16 positions over a plain step"] is True
    assert by_name["large shape, host time outside the pass, share of a step"] is False
    assert by_name["large shape, 64 positions over a plain step"] is None
    assert by_name["tests is right"] is None
