"""The GPU check: on a CPU and small, so that whoever has a GPU does not begin with its mistakes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.marks import marks
from benchmarks.gpu_check.plan import PARTS, Child, Part
from benchmarks.gpu_check.scene import ON_CPU, Found, Keep, Scene, read_results


def check(*options: str, out: Path | None = None) -> int:
    where = () if out is None else ("--out", str(out))
    return main(["--device", "cpu", "--here", *options, *where])


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    return found


def test_attention_of_every_kind_is_compared_and_the_result_is_written(tmp_path: Path) -> None:
    assert check("--parts", "attention", out=tmp_path) == 0
    found = read_results(tmp_path)["attention"]
    assert found["passed"] and len(found["cases"]) == 29
    assert found["worst"]["float32"] < 1e-4


@pytest.mark.slow
def test_passes_say_the_same_in_every_way_and_type(tmp_path: Path) -> None:
    assert check("--parts", "passes", out=tmp_path) == 0
    result = read_results(tmp_path)
    for dtype in ("float32", "bfloat16", "float16"):
        assert [way["way"] for way in result["passes"][dtype]["ways"]] == ["plain", "static shapes"]
        assert all(way["passed"] and len(way["times"]) == 4 for way in result["passes"][dtype]["ways"])
    assert result["passes"]["float32"]["ways"][1]["tokens_that_differ"] == 0


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

    monkeypatch.setitem(PARTS, "passes", part_of(broken))
    monkeypatch.setitem(PARTS, "attention", part_of(lambda scene, keep: {"passed": True}))
    assert check("--parts", "passes", "attention", out=tmp_path) == 1
    assert last_line(capsys)["failed"] == ["passes"]
    result = read_results(tmp_path)
    assert "on purpose" in result["passes"]["failure"] and result["passes"]["half"] == 1
    assert result["attention"]["passed"]


def slow(scene: Scene, keep: Keep) -> Found:
    keep({"half": 1})
    time.sleep(600)
    return {"passed": True}


def dies(scene: Scene, keep: Keep) -> Found:
    keep({"half": 1})
    raise SystemExit(7)


@pytest.mark.slow
def test_a_part_in_a_process_of_its_own_is_cut_and_what_it_had_found_stands() -> None:
    scene = Scene("", None, "cpu", ON_CPU, None)
    children = [Child(run, scene) for run in (slow, dies)]
    found = children[1].result(120)  # the other one has begun by then
    assert found["half"] == 1 and "status 7" in found["failure"] and not found["passed"]
    found = children[0].result(20)
    assert found["half"] == 1 and "cut" in found and not found["passed"]


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
    assert found["attention is right"] is None
