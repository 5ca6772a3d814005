"""The overhead benchmark: every part once, on the bundled model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.overhead import TRAFFIC, bootstrap, main


@pytest.mark.slow
def test_both_kinds_of_traffic_are_compared_and_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batch", "2", "--pairs", "2", "--max-tokens", "4"]) == 0
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert [(row["traffic"], row["batch"]) for row in result["rows"]] == [(traffic, 2) for traffic in TRAFFIC]
    assert result["mismatches"] == 0
    for row in result["rows"]:
        low, high = row["tokens_ratio_95"]
        assert 0 < low <= row["tokens_ratio_p50"] <= high


def test_the_interval_holds_the_median_and_narrows_with_more_pairs() -> None:
    random = np.random.default_rng(0)
    widths = []
    for number in (10, 1000):
        values = random.normal(1.0, 0.1, number).tolist()
        low, high = bootstrap(values)
        assert low < np.median(values) < high
        widths.append(high - low)
    assert widths[1] < widths[0]
