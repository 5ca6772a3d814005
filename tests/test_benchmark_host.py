"""The host benchmark: a target that recites is driven as recorded ones are, and every part of a step is timed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.host.command import main, texts_of
from benchmarks.host.steps import PARTS


@pytest.mark.slow
def test_rows_say_their_texts_and_every_part_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batch", "1", "3", "--steps", "6", "--rounds", "1", "--out", str(tmp_path / "host.json")]
    assert main(small) == 0
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert result["is_right"] and json.loads((tmp_path / "host.json").read_text()) == result
    assert [row["batch"] for row in result["rows"]] == [1] * 4 + [3] * 4
    for row in result["rows"]:
        assert set(row["parts_us_p50"]) == set(PARTS) and 0 < row["exposed_us_p50"] < row["host_us_p50"] * 1.5
        assert row["traffic"] == "new" or (row["drafted_per_row"] == 0) == (row["traffic"] == "off")
        assert row["traffic"] != "again" or row["accepted_per_row"] > 0.9 * row["drafted_per_row"]


def test_texts_begin_at_different_places_and_are_as_long_as_asked() -> None:
    texts = texts_of(np.arange(100, dtype=np.int32), 4, 40)
    assert [len(text) for text in texts] == [40] * 4
    assert [int(text[0]) for text in texts] == [0, 20, 40, 60]
