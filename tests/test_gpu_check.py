"""The check on a GPU: on a CPU and small, so that whoever has a GPU does not begin with its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check

Found = dict[str, Any]
_LARGE = "8B shape: {} cache, throughput relative to speculation off"


@pytest.mark.slow
def test_parts_run_and_give_every_mark_its_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name, kept = "right", gpu_check.PARTS["right"]
    monkeypatch.setitem(gpu_check.PARTS, name, (kept[0], tuple(each for each in kept[1] if "pytest" not in each)))
    parts = ("right", "speed-large", "repeats", "drafting", "overhead-large", "exact-cost", "soak", "profile")
    assert gpu_check.main(["--device", "cpu", "--parts", *parts, "--out", str(tmp_path)]) == 0
    result = gpu_check.read_results(tmp_path)
    types = {row["dtype"] for row in gpu_check.rows_of(result, "right", "exact")}
    assert types == {"float32", "bfloat16", "float16"}
    missing = [mark.name for mark in gpu_check.marks(result) if mark.value is None]
    # Random weights at temperature 1 never say what they said before, so nothing is drafted of what lies.
    unseen = ("growth-real", "overhead-small", "pass of", "batch 64", "1B", "8B shape: misleading", "bundled model")
    assert all(any(each in name for each in unseen) for name in missing), missing
    assert list((tmp_path / "traces").iterdir()) and "part soak: all programs passed" in gpu_check.section(result)


_SCRIPT = """
import json, pathlib, sys, time
pathlib.Path(sys.argv[-1]).write_text(json.dumps({"benchmark": "made", "half": 1}))
time.sleep(float(sys.argv[1]))
sys.exit("on purpose")
"""


def play(
    monkeypatch: pytest.MonkeyPatch, path: Path, parts: dict[str, tuple[str, ...]], seconds: float = 3
) -> tuple[int, Found]:
    """The status of a check whose parts are these commands, and all results that then lie in ``path``."""
    (path / "made_part.py").write_text(_SCRIPT)
    (path / "test_made.py").write_text("import pytest\n\n@pytest.mark.skip\ndef test_nothing(): ...\n")
    monkeypatch.setenv("PYTHONPATH", str(path), prepend=":")
    for name, commands in parts.items():
        monkeypatch.setitem(gpu_check.PARTS, name, (1, commands))
    status = gpu_check.main(["--device", "cpu", "--seconds", str(seconds), "--parts", *parts, "--out", str(path)])
    return status, gpu_check.read_results(path)


def test_a_part_that_fails_or_hangs_is_said_with_what_it_had_found_and_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = {"soak": ("made_part 0", "made_part 0.1"), "drafting": ("made_part 60",), "profile": ()}
    status, result = play(monkeypatch, tmp_path, parts)
    said: Found = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert status == 1 and said["not_passed"] == ["soak", "drafting", "profile"]
    assert [failure.split(":")[0] for failure in result["soak"]["failures"]] == ["made_part 0", "made_part 0.1"]
    assert "on purpose" in result["soak"]["failures"][1] and "time was over" in result["drafting"]["cut"][0]
    assert [result[part]["results"][0]["half"] for part in ("soak", "drafting")] == [1, 1]
    assert "skipped" in result["profile"] and not result["profile"]["passed"]


def test_a_failure_counts_and_is_said_whatever_else_was_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, result = play(monkeypatch, tmp_path, {"right": ("made_part 60", "made_part 0")})
    assert result["right"]["cut"] and met(result)["part right: all programs passed (1: yes, 0: no)"] is False
    page = gpu_check.section(result)
    assert "In the part `right`, `made_part` failed with status 1 on cpu, " in page


def test_tests_that_are_all_skipped_have_not_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "test_made.py"
    status, result = play(
        monkeypatch, tmp_path, {"right": (f"pytest -p no:cacheprovider --noconftest {path}",)}, seconds=30
    )
    assert status == 1 and "all were skipped" in result["right"]["failures"][0]


def test_tests_whose_time_is_over_say_which_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "test_slow.py"
    path.write_text("import time\n\ndef test_wrong(): assert False\n\ndef test_endless(): time.sleep(99)\n")
    monkeypatch.setattr(gpu_check, "_LAST_SECONDS", 20)
    command = f"pytest -v -o addopts= -n 2 -p no:cacheprovider --noconftest {path}"
    status, result = play(monkeypatch, tmp_path, {"right": (command,)}, seconds=80)
    assert status == 1 and "test_slow.py::test_wrong" in result["right"]["failures"][0]


def made(date: str, commit: str, **parts: Found) -> Found:
    head = {"benchmark": "gpu_check", "date": date, "environment": {"commit": commit}, "device": f"of {commit}"}
    return {**head, **parts}


def test_each_part_is_the_newest_with_its_own_head_and_a_rerun_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    soak, right = {"passed": True, "results": []}, {"passed": False, "results": [], "cut": "pytest"}
    of_another = {"passed": True, "results": [made("2020-01-01", "c")]}
    (tmp_path / "gpu_check.json").write_text(
        json.dumps(made("2020-01-02", "a", soak=soak, right=right, repeats=of_another))
    )
    (tmp_path / "gpu_check-1.json").write_text(json.dumps(made("2020-01-03", "b", right={**right, "passed": True})))
    found = gpu_check.read_results(tmp_path)
    assert (found["date"], found["environment"]["commit"]) == ("2020-01-03", "b")
    heads = {name: found[name]["environment"]["commit"] for name in ("soak", "right", "repeats")}
    assert heads == {"soak": "a", "right": "b", "repeats": "c"} and found["right"]["passed"]
    assert found["repeats"]["device"] == "of c" and found["repeats"]["date"] == "2020-01-01"

    _, found = play(monkeypatch, tmp_path, {"right": ("made_part 0",)})
    assert found["soak"]["passed"] and found["right"]["failures"] and "--parts right" in found["right"]["command"]
    assert found["right"]["date"] > found["soak"]["date"]
    monkeypatch.setattr(gpu_check, "_LEAST_SHARE", 1e9)
    _, found = play(monkeypatch, tmp_path, {"right": ()})
    assert found["right"]["failures"] and "skipped" not in found["right"]


def met(results: Found) -> dict[str, bool | None]:
    return {mark.name: mark.is_met for mark in gpu_check.marks(results)}


def test_marks_read_both_ways_and_what_was_not_measured_is_neither_met_nor_missed() -> None:
    rows = [
        {"batch": 1, "T": 1, "pass_ms": 5.0, "of_copy": 0.9, "outside_pass_share": 0.2},
        {"batch": 1, "T": 16, "pass_ms": 5.4, "of_copy": 0.8, "outside_pass_share": 0.2},
    ]
    by_name = met({"speed-large": {"passed": True, "results": [{"benchmark": "decode", "rows": rows}]}})
    assert by_name["8B shape: share of the memory copy rate, batch 1, without drafts"] is True
    assert by_name["8B shape: time of a pass of 16 tokens, relative to 1 token"] is True
    assert by_name["8B shape: share of the step outside the forward pass, batch 1"] is False
    assert by_name["8B shape: time of a pass of 64 tokens, relative to 1 token"] is None
    assert by_name["part soak: all programs passed (1: yes, 0: no)"] is None


def overhead(traffic: str, batch: int, over: float, low: float, high: float, drafted: float = 0.5) -> Found:
    return {
        "traffic": traffic,
        "batch": batch,
        "over_off": [over, low, high],
        "over_off_95": [low, high],
        "drafted_per_pass": [drafted, 0.0, drafted],
    }


def test_marks_of_all_batches_are_of_all_of_them_and_as_sure_as_the_least_sure() -> None:
    rows = [
        overhead("cold", 1, 1.0, 0.99, 1.01),
        overhead("cold", 16, 1.1, 0.99, 1.3),
        overhead("adversarial", 1, 0.9, 0.8, 0.95),
        overhead("adversarial", 16, 1.0, 0.99, 1.0),
    ]

    def marked(rows: list[Found], batch: tuple[int, ...] = (1, 16), **more: Any) -> tuple[bool | None, bool | None]:
        run = {"benchmark": "overhead", "parameters": {"batch": batch}, "rows": rows, **more}
        found = met({"overhead-large": {"passed": True, "results": [run]}})
        return found[_LARGE.format("empty")], found[_LARGE.format("misleading")]

    assert marked(rows) == (True, False)
    assert marked([overhead("cold", 1, 1.0, 0.62, 1.61), *rows[1:]]) == (None, False)  # it cannot be told
    assert marked(rows[:3]) == (True, None) and marked(rows, is_cut=True) == (None, None)
    assert marked([overhead("adversarial", batch, 1.0, 1.0, 1.0, drafted=0.0) for batch in (1, 16)]) == (None, None)
    drafting = {"benchmark": "decode", "rows": [{"batch": 64, "T": 1, "drafting_share": 0.01}]}
    name = "8B shape: share of drafting in the step, 64 rows"
    assert met({"drafting": {"passed": True, "results": [drafting]}})[name] is True
    assert met({"drafting": {"passed": False, "results": [drafting], "cut": ["decode"]}})[name] is None


def test_outputs_that_differ_are_counted_where_none_may() -> None:
    exact = {
        "benchmark": "exact",
        "dtype": "torch.bfloat16",
        "rows": [{"dtype": "bfloat16", "num_different": 1, "num_positions": 20_000}],
    }
    again: Found = {"repeated_requests": {"mismatches": 2, "speedup_second": 9.0}, "rows": [{"mismatches": 4}]}
    growth = [{"benchmark": "growth", "dtype": f"torch.{kind}", **again} for kind in ("float32", "bfloat16")]

    def number(*results: Found, passed: bool = True) -> int | None:
        return gpu_check.num_different({"right": {"passed": passed, "results": list(results)}}, "right")

    assert number(exact, *growth) == number(exact, *growth, passed=False) == 7
    assert number(growth[1]) is None  # in bfloat16, without exactness
    assert number({**growth[1], "is_exact": True}) == 6
    assert number(growth[1], passed=False) is None
    assert (
        met({"right": {"passed": False, "results": [exact], "cut": ["growth"]}})[
            "part right: outputs that differ but must be equal"
        ]
        is False
    )
