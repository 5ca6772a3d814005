"""The GPU check: on a CPU and small, so that whoever has a GPU does not begin with its mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check.__main__ import PARTS, Child, Part, main
from benchmarks.gpu_check.marks import marks
from benchmarks.gpu_check.scene import Found, Keep, Scene, read_results


def check(*options: str, out: Path | None = None) -> int:
    where = () if out is None else ("--out", str(out))
    return main(["--device", "cpu", "--here", *options, *where])


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    return found


@pytest.mark.slow
def test_outputs_are_compared_in_every_type(tmp_path: Path) -> None:
    assert check("--parts", "exactness", out=tmp_path) == 0
    result = read_results(tmp_path)
    assert result["exactness"]["float32"]["mismatches"] == 0 and "float16" in result["exactness"]


@pytest.mark.slow
def test_speed_growth_and_soak_run_and_give_every_mark_its_value(tmp_path: Path) -> None:
    parts = ("speed-large", "overhead-large", "growth", "soak")
    assert check("--parts", *parts, out=tmp_path) == 0
    found = marks(read_results(tmp_path))
    missing = [mark.name for mark in found if mark.is_met is None]
    assert all("is right" in name or "positions" in name or "small shape, " in name for name in missing), missing


def part_of(run: Callable[[Scene, Keep], Found]) -> Part:
    return Part(run, 1, needs_kernels=False)


def test_a_part_that_fails_is_said_with_what_it_had_found_and_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(scene: Scene, keep: Keep) -> Found:
        keep({"half": 1})
        raise RuntimeError("on purpose")

    monkeypatch.setitem(PARTS, "soak", part_of(broken))
    monkeypatch.setitem(PARTS, "growth", part_of(lambda scene, keep: {"passed": True}))
    assert check("--parts", "soak", "growth", out=tmp_path) == 1
    assert last_line(capsys)["failed"] == ["soak"]
    result = read_results(tmp_path)
    assert "on purpose" in result["soak"]["failure"] and result["soak"]["half"] == 1
    assert result["growth"]["passed"]


@pytest.mark.slow
def test_a_part_in_a_process_of_its_own_is_cut_and_one_that_dies_is_said() -> None:
    cut = Child("exactness", ["--device", "cpu"]).result(1)
    assert "cut" in cut and not cut["passed"]
    died = Child("exactness", ["--device", "cpu", "no-such-model"]).result(300)
    assert "no-such-model" in died["failure"] and not died["passed"]


def test_marks_read_both_ways_and_what_was_not_measured_is_neither_met_nor_missed() -> None:
    rows = [
        {"batch": 1, "T": 1, "step_ms_p50": 5.0, "of_copy": 0.9, "outside_pass_share": 0.2},
        {"batch": 1, "T": 16, "step_ms_p50": 5.4, "of_copy": 0.8, "outside_pass_share": 0.2},
    ]
    found = {mark.name: mark.is_met for mark in marks({"speed-large": {"steps": {"rows": rows}}})}
    assert found["large shape, plain decoding at batch 1, share of the copy rate"] is True
    assert found["large shape, 16 positions over a plain step"] is True
    assert found["large shape, host time outside the pass, share of a step"] is False
    assert found["large shape, 64 positions over a plain step"] is None
    assert found["tests is right"] is None
