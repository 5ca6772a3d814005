"""The mixed benchmark: rows say their texts whatever prices their drafts have, and its clock is not the machine's."""

from __future__ import annotations

import json

import pytest

from benchmarks.mixed.command import main


@pytest.mark.slow
def test_every_way_of_pricing_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batch", "2", "--cost", "cpu", "--steps", "8", "--seeds", "1"]) == 0
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    rows = {row["prices"]: row for row in result["rows"]}
    assert result["is_right"] and rows["own"]["over_own"] == 1.0 and sum(row["is_oracle"] for row in rows.values()) == 1
    # A pass of two positions, and both classes alike: without drafts the clock says what the cost model says.
    seconds = 4.6e-3 + 2 * 7.8e-5
    assert rows["off"]["tokens_per_s"] == pytest.approx(2 / seconds, rel=1e-3) and rows["off"]["width"] == 1.0


def test_odd_batches_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--batch", "3"])
    assert "even" in capsys.readouterr().err
