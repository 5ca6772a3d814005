"""The flooding benchmark: made traffic, small sizes."""

from __future__ import annotations

import json

import pytest

from benchmarks.flooding.command import MADE, flood, main, traffic

SMALL = ["--cache-tokens", "12000", "--flood", "14000", "--traffic-tokens", "800"]
SMALLER = ["--small", "1000", "--small-traffic-tokens", "1200"]


def test_what_was_drafted_from_is_drafted_from_after_a_flood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MADE, *SMALL, *SMALLER]) == 0
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    found = {row["policy"]: row["tokens_per_step"] for row in result["flooded"]}
    assert found["fifo"]["known"] == found["used"]["known"] > 3 * found["fifo"]["young"]
    assert found["used"]["after 14,000"] > 0.9 * found["used"]["known"]
    assert found["fifo"]["after 14,000"] < 0.5 * found["fifo"]["known"]
    (row,) = result["unflooded"]
    assert row["cache_tokens"] == 1000
    assert row["tokens_per_step"]["used"] > 0.98 * row["tokens_per_step"]["fifo"]


def test_a_flood_has_its_size_and_is_the_same_for_one_seed() -> None:
    turns = list(flood(2500, 100, seed=3))
    assert [len(turn.row.context) + len(turn.row.output) for turn in turns] == [1000, 1000, 500]
    assert not any(turn.is_scored for turn in turns)
    again = list(flood(2500, 100, seed=3))
    assert all((a.row.context == b.row.context).all() for a, b in zip(turns, again, strict=True))


def test_traffic_keeps_to_its_size() -> None:
    turns = traffic(MADE, None, 1000)
    assert 500 < sum(len(turn.row.output) for turn in turns) <= 1000


def test_a_trace_without_a_tokenizer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
