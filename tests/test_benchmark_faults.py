"""The command that injects faults, and the checker that says what they cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reliability import faults
from benchmarks.reliability.clients import History, Verdict, family
from benchmarks.reliability.faults import FAULTS, KINDS, PROBLEMS, drawn
from benchmarks.report.__main__ import section
from benchmarks.servers import find_redis_server
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]


def history(number: int, *promised: int) -> History:
    """So many notes sent to "one" and acknowledged, some of them promised."""
    made = History()
    for _ in range(number):
        made.acknowledge(made.begin("one"))
    made.promise(promised)
    return made


def is_clean(verdict: Verdict) -> bool:
    return not (verdict.lost or verdict.twice or verdict.elsewhere)


def test_what_a_killed_server_acknowledged_is_not_promised_by_the_next_one() -> None:
    made = history(2, 1)
    assert made.begin("one") == 3
    made.end_life(in_order=False)
    made.acknowledge(3)  # its answer had come whole, the client was late to say so
    made.acknowledge(made.begin("one"))
    made.end_life(in_order=True)
    assert made.promised == {1, 4}
    assert is_clean(made.check([("one", 1), ("one", 4), ("one", 3)]))


def test_what_is_wrong_is_said_by_its_kind() -> None:
    made = history(2, 1)
    verdict = made.check([("one", 2), ("one", 2), ("two", 1), ("one", 9)])  # the last was never sent
    assert (verdict.lost, verdict.twice, verdict.elsewhere, verdict.num_promised) == ((1,), (2,), (1, 9), 1)


@given(st.sets(st.integers(1, 30)), st.lists(st.tuples(st.sampled_from(["one", "two"]), st.integers(0, 40))))
def test_a_verdict_is_clean_exactly_when_the_store_is_a_set_between_promised_and_sent(
    promised: set[int], found: list[tuple[str, int]]
) -> None:
    made = history(30, *promised)
    numbers = [number for _, number in found]
    is_right = len(numbers) == len({*numbers}) and promised <= {*numbers} <= {*range(1, 31)}
    assert is_clean(made.check(found)) == (is_right and all(namespace == "one" for namespace, _ in found))


def test_a_seed_says_what_happens_in_each_round() -> None:
    assert drawn(20, 7) == drawn(20, 7) != drawn(20, 8)
    rounds = drawn(2 * len(FAULTS), 7)
    alone = [names[0] for names in rounds if len(names) == 1]
    assert {*alone[: len(FAULTS)]} == {*FAULTS}  # all before any comes again
    together = [names for names in rounds if len(names) > 1]
    assert len(together) == len(rounds) // 4
    assert all(tuple(FAULTS[name].kind for name in names) == KINDS for names in together)


def test_a_note_of_one_store_may_be_in_each_and_is_promised_by_its_own_alone() -> None:
    one, two = family(2)
    first, second = one.begin("here"), two.begin("there")
    one.acknowledge(first)
    two.acknowledge(second)
    for each in (one, two):
        each.end_life(in_order=True)
    assert is_clean(one.check([("here", first), ("there", second)]))
    assert two.check([("here", first)]).lost == (second,)
    assert two.check([("here", first), ("here", second)]).elsewhere == (second,)


def test_a_fault_that_finds_nothing_to_hit_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(faults, "_PATIENCE_S", 0.0)
    fleet: Any = SimpleNamespace(one=lambda: SimpleNamespace(directory=tmp_path), settle=lambda _: None)
    with pytest.raises(AssertionError, match="no segment"):
        faults.segment_damaged(fleet)


def test_promises_are_verified_before_they_end() -> None:
    made = history(2, 1, 2)
    verdict = made.check([("one", 2)])
    assert (verdict.num_promised, verdict.lost) == (2, (1,))
    assert made.check([]) == Verdict(0, (), (), ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--rounds", "2", "--only", "server-kill", "segment-damaged", "--calm", "1"),
        ("--servers", "2", "--rounds", "2", "--only", "server-kill", "log-junk", "--patience", str(PATIENCE_S)),
    ],
    ids=["one server", "a fleet"],
)
def test_faults_are_injected_and_nothing_is_wrong_afterwards(options: tuple[str, ...], tmp_path: Path) -> None:
    if "--servers" in options and find_redis_server() is None:
        pytest.skip("no redis-server")
    question = ["-m", "benchmarks.reliability", "--question", "faults", *options, "--json"]
    command = [sys.executable, *question, "--out", str(tmp_path / "faults.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {name: result[name] for name in PROBLEMS} == dict.fromkeys(PROBLEMS, 0)
    assert len(result["rows"]) == 3
    assert result["right"] > 0
    verified = {row["faults"]: row["promised"] for row in result["rows"] if row["promised"] is not None}
    assert verified.keys() == {"orderly close", *({"segment-damaged"} & {*options})}
    assert all(verified.values()) and sum(verified.values()) == result["promised"]
    assert json.loads((tmp_path / "faults.json").read_text())["right"] == result["right"]
    shown = [FAULTS[name].title for name in ("server-kill", "log-junk") if name in options]
    assert f"| {shown[0]} |" in section(faults, [result])
