"""The attention benchmark: candidates that run on a CPU, and the reasons of the others."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.attention import main
from benchmarks.attention.candidates import CANDIDATES, Problem, packed_sdpa, reference


def test_the_command_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--device", "cpu", "--batch", "1", "3", "--width", "1", "5", "--context", "20", "--heads", "4,2,16"]
    assert main([*small, "--rounds", "2"]) == 0
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert len(result["rows"]) == 4 * len(CANDIDATES)
    ran = [row for row in result["rows"] if "absent" not in row]
    assert len(ran) == 4 * 2 and all(row["is_right"] and row["us_p50"] > 0 for row in ran)
    assert all(row["absent"] for row in result["rows"] if row["candidate"] == "ours")


def test_a_wrong_output_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CANDIDATES, "wrong", lambda problem: lambda: packed_sdpa(problem)() * 1.5)
    assert main(["--device", "cpu", "--batch", "2", "--width", "3", "--context", "9", "--heads", "2,1,8"]) == 1


def test_rows_differ_in_length_and_stand_in_other_slots() -> None:
    problem = Problem.random(3, 2, 40, (4, 2, 8), torch.float32, torch.device("cpu"))
    assert problem.lengths.tolist() == [40, 30, 20] and problem.rows.slots.tolist() == [2, 1, 0]
    assert reference(problem).shape == (3, 2, 4, 8)
    assert problem.moved_bytes == (2 * (90 + 6) * 2 * 8 + 2 * 3 * 4 * 2 * 8) * 4


@pytest.mark.parametrize("arguments", [["--heads", "3,2,8"], ["--heads", "4"], ["--batch", "0"]])
def test_impossible_sizes_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
