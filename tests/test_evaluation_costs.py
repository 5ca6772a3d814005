"""Where the costs of a replay come from."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.evaluation import costs as cost_sources
from cache_builder.evaluation.costs import (
    StepCosts,
    add_cost_arguments,
    costs_of,
    flat,
    measure,
    read_step_costs,
    step_costs,
)
from ssd.bundled import MODEL_PATH
from ssd.engine import measured
from ssd.errors import ConfigError, ModelError

MEASURED = {
    "model": "some-model",
    "device": "cpu",
    "dtype": "float32",
    "widths": [1, 2, 9],
    "costs": [1.0, 1.2, 1.9],
    "step_ms": 5.0,
    "overhead": 0.05,
    "recycling": 1.25,
}


def chosen(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_cost_arguments(parser)
    return parser.parse_args(arguments)


def test_steps_cost_their_pass_and_their_overhead_and_own_candidates_add_to_the_rate() -> None:
    costs = StepCosts(flat(4), "made", step_ms=10.0, overhead=0.5, recycling=0.25)
    steps = np.array([4, 0, 0, 2], np.int64)
    assert costs.speed_up(12, steps) == pytest.approx(12 / (4 * 1.5 + 2 * 1.5) + 0.25)


def test_proposals_are_charged_where_no_overhead_was_measured() -> None:
    steps = np.array([10], np.int64)
    assert StepCosts(flat(4), "made", step_ms=10.0).speed_up(10, steps, propose_s=0.1) == pytest.approx(0.5)
    assert StepCosts(flat(4), "made", step_ms=10.0, overhead=0.0).speed_up(10, steps, propose_s=0.1) == 1.0
    assert StepCosts(flat(4), "made").speed_up(10, steps, propose_s=0.1) == 1.0
    assert StepCosts(flat(4), "made").speed_up(0, np.zeros(1, np.int64)) == 1.0


def test_without_a_word_passes_are_taken_as_free_and_the_report_says_so() -> None:
    costs = costs_of(chosen(), list)
    assert costs.curve.name == "flat 32"
    assert costs.source.startswith("an assumption")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--save-cost", "x.json"], "name the model"),
        (["--cost", "/nowhere/x.json"], "no cost curve in x.json"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        costs_of(chosen(*arguments), list)
    assert "\n" not in str(raised.value)


def test_a_saved_measurement_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_sources, "measure", lambda model, prompts: MEASURED)
    kept = tmp_path / "cost.json"
    made = costs_of(chosen("--measure", "m", "--save-cost", str(kept)), lambda: [[1, 2, 3]])
    read = costs_of(chosen("--cost", str(kept)), list)
    assert made.as_json() == read.as_json()
    assert (read.step_ms, read.overhead, read.recycling) == (5.0, 0.05, 1.25)
    assert read.source == "measured: some-model, cpu, float32, batch 1"


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(MEASURED)), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_whatever_a_file_holds_is_costs_or_one_sentence(value: Any) -> None:
    try:
        costs = step_costs(value, "x.json")
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert costs.recycling >= 0.0


@pytest.mark.parametrize("key", ["step_ms", "overhead", "recycling"])
@pytest.mark.parametrize("value", ["5", None, True, float("nan"), -1, [1]])
def test_a_number_that_is_none_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} of x.json"):
        step_costs({**MEASURED, key: value}, "x.json")


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(" " * (2 << 20))
    with pytest.raises(ConfigError, match="is no cost curve"):
        read_step_costs(tmp_path / "x.json")


def measured_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, **asked: Any
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    status = measured.main(["costs", str(model)])
    return status, json.loads(capsys.readouterr().out)


def test_a_model_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = measured_here(monkeypatch, capsys, tmp_path)
    assert status == 2 and "\n" not in said["error"]


@pytest.mark.slow
def test_what_the_measuring_program_says_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot measure {tmp_path}: .*tokenizer"):
        measure(str(tmp_path), [[1, 2, 3]])


def test_a_program_that_says_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_sources, "_PROGRAM", "this")
    with pytest.raises(ModelError, match="status 0"):
        measure("some-model", [])


def test_costs_are_measured_with_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"prompts": [[5, 6, 7, 8], [9, 10]], "rounds": 2, "tokens": 6, "context": 16}
    status, result = measured_here(monkeypatch, capsys, MODEL_PATH, **asked)
    assert status == 0
    costs = step_costs(result, "x.json")
    assert costs.curve.widths.tolist() == list(measured.WIDTHS)
    assert (np.diff(costs.curve.costs) >= 0).all()
    assert costs.step_ms is not None and costs.step_ms > 0
    assert costs.overhead is not None and costs.overhead >= 0
    assert costs.source == "measured: model, cpu, float32, 1 threads, batch 1" or "threads" in costs.source


@pytest.mark.parametrize("prompts", [[[1, 2], [3, -4]], [], 7, [["a", "b"]]])
def test_prompts_that_cannot_be_run_are_one_line(
    prompts: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = measured_here(monkeypatch, capsys, MODEL_PATH, prompts=prompts)
    assert status == 2 and "prompts" in said["error"]
