"""Figures of a replay: counts, costs, prices, calibration, comparison of curves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.drafters import CurvePrice, FixedPrice
from benchmarks.replay import measure_cost
from benchmarks.replay.curves import calibrate, compare, compare_results, geometric_means
from benchmarks.replay.settings import CONTENDER_NAMES, settings_of
from benchmarks.walk import Counts, Steps
from cache_builder.evaluation.costs import CostCurve, StepCosts, flat, read_step_costs
from ssd.drafting.protocol import Draft
from ssd.errors import ConfigError
from tests.reference import walk as reference


def steps_of(drafted: list[int], accepted: list[int], tested: list[int] | None = None) -> Steps:
    tested = tested or [0] * len(drafted)
    columns = np.array([drafted, accepted, tested, [1000] * len(drafted)], np.int32)
    total = sum(tested)
    estimates, hits = np.linspace(0.1, 0.9, total).astype(np.float32), np.arange(total, dtype=np.int32) % 2
    return Steps(columns[0], columns[1], columns[2], columns[3], estimates, hits)


# Counts


def test_estimates_of_the_first_tokens_are_not_judged() -> None:
    counts = Counts(judge_after=2)
    counts.add(steps_of([2, 2, 1], [1, 0, 0], [2, 1, 1]), 4)  # they begin at tokens 0, 2 and 3
    assert len(counts.estimates) == len(counts.hits) == 2
    counts.add(steps_of([3], [2], [3]), 3)
    assert len(counts.estimates) == 5


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


def test_prices_of_a_curve_follow_its_slope_and_what_recent_steps_gave() -> None:
    pricing = CurvePrice(CostCurve("line", np.array([1.0, 2.0]), np.array([1.0, 1.5])), 3)
    assert np.asarray(pricing.prices()) == pytest.approx(0.5)
    for _ in range(2000):
        pricing.learn(num_drafted=2, num_output=3)  # 3 tokens for a cost of 2
    assert np.asarray(pricing.prices()) == pytest.approx(0.5 * (1 + 3) / (1 + 2))


def test_a_draft_is_cut_where_the_rest_does_not_pay() -> None:
    pricing = CurvePrice(CostCurve("line", np.array([1.0, 2.0]), np.array([1.0, 1.5])), 3)
    draft = Draft(np.arange(3, dtype=np.int32), probabilities=np.array([0.9, 0.9, 0.1]))
    assert pricing.paying(draft).token_ids.tolist() == [0, 1]
    assert FixedPrice(0.1).paying(draft) is draft


# Settings


@pytest.mark.parametrize("drafter", CONTENDER_NAMES)
def test_settings_have_names_of_their_own_and_stay_within_the_limit(drafter: str) -> None:
    for curve in (False, True):
        settings = settings_of(drafter, 12, curve=curve, tree=True, priced_by=[flat(32)])
        assert len({setting.name for setting in settings}) == len(settings)
        most = {"none": 0, "sglang": 11}.get(drafter, 12)  # its default has 12 with the token that they follow
        assert max(setting.limit for setting in settings) == most


# Calibration


@given(st.lists(st.tuples(st.sampled_from([0.125, 0.25, 0.5, 1.0]), st.integers(0, 1)), min_size=1), st.integers(1, 8))
def test_calibration_equals_the_slow_one(pairs: list[tuple[float, int]], num_bins: int) -> None:
    estimates, hits = zip(*pairs, strict=True)
    found = calibrate(np.array(estimates), np.array(hits, np.float64), num_bins)
    assert found is not None
    assert found.error == pytest.approx(reference.calibration_error(estimates, hits, num_bins))
    assert int(found.num_tokens.sum()) == len(pairs)
    assert len(found.num_tokens) <= num_bins


# Comparison


def test_curves_are_compared_on_their_overlap_alone() -> None:
    found = compare([(1.0, 1.0), (4.0, 2.0)], [(2.0, 1.0), (16.0, 4.0)], places=(0.0, 0.5, 1.0))
    assert found is not None
    assert found.drafted == pytest.approx([2.0, 8**0.5, 4.0])
    assert found.ratios == pytest.approx([1.5 / 1.0, 1.75 / 1.5, 2.0 / 2.0])


def test_results_are_compared_by_trace_and_averaged() -> None:
    def result(trace: str, drafter: str, setting: str, drafted: float, accepted: float) -> dict[str, object]:
        return {
            "trace": trace, "tokenizer": "t", "drafter": drafter, "setting": setting,
            "drafted_per_step": drafted, "accepted_per_step": accepted,
        }  # fmt: skip

    results = []
    for trace, factor in (("a", 2.0), ("b", 0.5)):
        for drafted in (1.0, 2.0, 4.0):
            results.append(result(trace, "ssd", f"price {drafted}", drafted, factor * drafted))
            results.append(result(trace, "arctic", f"factor {drafted}", drafted, drafted))
        results.append(result(trace, "ssd", "priced by measured", 3.0, 99.0))
    found = compare_results(results, "ssd")
    assert [row["trace"] for row in found["arctic"]["rows"]] == ["a", "b"]
    assert found["arctic"]["rows"][0]["ratios"] == pytest.approx([2.0] * 3)
    assert found["arctic"]["geometric_means"] == pytest.approx([1.0] * 3)
    assert json.loads(json.dumps(found)) == found
    assert compare_results(results[:1], "ssd") == {}
    assert geometric_means([]) == []
