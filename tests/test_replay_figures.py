"""Figures of a replay: counts, costs, prices, calibration, comparison of curves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay import measure_cost
from benchmarks.replay.job import CONTENDER_NAMES, settings_of
from cache_builder.evaluation.costs import CostCurve, StepCosts, flat, read_step_costs
from ssd.errors import ConfigError

# Costs and prices


def test_speed_up_is_plain_cost_over_the_cost_of_the_steps() -> None:
    line = CostCurve("line", np.array([1.0, 2.0]), np.array([1.0, 1.5]))
    # Ten tokens in two steps without a draft (cost 1 each) and one that drafted four (cost 1 + 4 / 2).
    assert StepCosts(line, "").speed_up(10, np.array([2, 0, 0, 0, 1])) == pytest.approx(10 / 5)


@pytest.mark.parametrize(
    "text", ["{}", "[", '{"widths": [1, 1], "costs": [1, 2]}', '{"widths": [1, 2], "costs": [2, 3]}'],
    ids=["empty", "torn", "not rising", "not relative"],
)  # fmt: skip
def test_a_curve_that_cannot_be_used_says_how_to_measure_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "verify-cost.json").write_text(text)
    with pytest.raises(ConfigError, match="measure_cost"):
        read_step_costs(tmp_path / "verify-cost.json")


def test_a_measured_curve_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_cost.main(["--rounds", "2", "--context", "32", "--out", str(tmp_path / "cost.json")]) == 0
    result = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert read_step_costs(tmp_path / "cost.json").curve.costs.tolist() == result["costs"]
    assert result["widths"] == list(measure_cost.WIDTHS)
    assert min(result["ms_p50"]) > 0


# Settings


@pytest.mark.parametrize("drafter", CONTENDER_NAMES)
def test_settings_have_names_of_their_own_and_stay_within_the_limit(drafter: str) -> None:
    for curve in (False, True):
        settings = settings_of(drafter, 12, curve=curve, tree=True, costs=[flat(32)])
        assert len({setting.name for setting in settings}) == len(settings)
        most = {"sglang": 11}.get(drafter, 12)  # its default has 12 with the token that they follow
        assert max(setting.limit for setting in settings) == most
