"""The command that injects faults between servers and Redis, and what it counts with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.history import family
from benchmarks.fleet_faults.__main__ import PROBLEMS
from benchmarks.fleet_faults.faults import MEMBERS, NAMES, NETWORK, STORE, drawn
from benchmarks.processes import find_redis_server
from benchmarks.report.service import fleet_faults_section
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


def test_a_seed_says_what_happens_in_each_round() -> None:
    assert drawn(20, seed=7) == drawn(20, seed=7) != drawn(20, seed=8)
    rounds = drawn(2 * len(NAMES), seed=7)
    alone = [faults[0].name for faults in rounds if len(faults) == 1]
    assert len({*alone[: len(NAMES)]}) == len(NAMES)  # all before any comes again
    together = [faults for faults in rounds if len(faults) > 1]
    assert len(together) == len(rounds) // 4
    assert all((a in NETWORK, b in STORE, c in MEMBERS) == (True, True, True) for a, b, c in together)


def test_a_note_of_one_store_may_be_in_each_and_is_promised_by_its_own_alone() -> None:
    one, two = family(2)
    first, second = one.begin("here"), two.begin("there")
    one.acknowledge(first)
    two.acknowledge(second)
    for each in (one, two):
        each.end_life(in_order=True)
    assert one.check([("here", first), ("there", second)]).is_clean
    assert two.check([("here", first)]).lost == (second,)
    assert two.check([("here", first), ("here", second)]).elsewhere == (second,)
    two.lose_all()
    assert two.check([]).is_clean


@pytest.mark.slow
@pytest.mark.skipif(find_redis_server() is None, reason="no redis-server")
def test_a_fleet_comes_through_faults_and_nothing_is_wrong_afterwards(tmp_path: Path) -> None:
    options = ["--servers", "2", "--rounds", "2", "--only", "resets", "log-junk", "--json"]
    options += ["--patience", str(PATIENCE_S)]
    command = [sys.executable, "-m", "benchmarks.fleet_faults", *options, "--out", str(tmp_path / "result.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {name: result[name] for name in PROBLEMS} == dict.fromkeys(PROBLEMS, 0)
    assert result["right"] > 0 and result["promised"] > 0
    assert all(row["sharing_back_s"] is not None for row in result["rows"][:2])
    assert "| log-junk |" in fleet_faults_section(result)
