"""Where the costs of a replay come from."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.evaluate import main as benchmark
from benchmarks.evaluate import merged
from cache_builder.evaluation import costs as cost_sources
from cache_builder.evaluation.costs import (
    CostCurve,
    StepCosts,
    add_cost_arguments,
    costs_from_options,
    flat_curve,
    measure_costs,
    parse_step_costs,
    read_step_costs,
)
from cache_builder.evaluation.evaluate import (
    LEAST_REQUESTS,
    compute_figures,
    evaluate,
    log_of_measurement,
    summarize_measurement,
)
from cache_builder.evaluation.log import Log
from cache_builder.evaluation.report import headline, summary
from ssd.bundled import MODEL_PATH
from ssd.engine import profile_cli
from ssd.errors import ConfigError, ModelError
from ssd.text.codec import TextCodec
from tests.test_evaluate_command import COSTS, made_log, plan

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
    costs = StepCosts(flat_curve(4), "made", step_ms=10.0, overhead=0.5, recycling=0.25)
    steps = np.array([4, 0, 0, 2], np.int64)
    assert costs.speed_up(12, steps) == pytest.approx(12 / (4 * 1.5 + 2 * 1.5) + 0.25)


def test_proposals_are_charged_where_no_overhead_was_measured() -> None:
    steps = np.array([10], np.int64)
    assert StepCosts(flat_curve(4), "made", step_ms=10.0).speed_up(10, steps, propose_s=0.1) == pytest.approx(0.5)
    assert StepCosts(flat_curve(4), "made", step_ms=10.0, overhead=0.0).speed_up(10, steps, propose_s=0.1) == 1.0
    assert StepCosts(flat_curve(4), "made").speed_up(10, steps, propose_s=0.1) == 1.0
    assert StepCosts(flat_curve(4), "made").speed_up(0, np.zeros(1, np.int64)) == 1.0


def test_a_saved_measurement_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_sources, "measure_costs", lambda model, prompts: MEASURED)
    kept = tmp_path / "cost.json"
    made = costs_from_options(chosen("--measure", "m", "--save-cost", str(kept)), lambda: [[1, 2, 3]])
    read = costs_from_options(chosen("--cost", str(kept)), list)
    assert made.as_json() == read.as_json()
    assert (read.step_ms, read.overhead, read.recycling) == (5.0, 0.05, 1.25)
    assert read.source == "measured: some-model, cpu, float32, batch size 1"


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
        costs = parse_step_costs(value, "x.json")
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert costs.recycling >= 0.0


@pytest.mark.parametrize("key", ["step_ms", "overhead", "recycling"])
@pytest.mark.parametrize("value", ["5", None, True, float("nan"), -1, [1]])
def test_a_number_that_is_none_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} of x.json"):
        parse_step_costs({**MEASURED, key: value}, "x.json")


Measured = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def measured_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Measured:
    """Status and last line of the measuring program: what of, with which model, asked what."""

    def run(what: str, model: Path = MODEL_PATH, **asked: Any) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
        status = profile_cli.main([what, str(model)])
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def log_asked(**changes: Any) -> dict[str, Any]:
    codec = TextCodec.load(str(MODEL_PATH))
    prompts = [codec.encode_prompt(text) for text in ("def read(path):\n", "import os\n", "def read(path):\n")]
    return {
        "prompts": [*prompts, [5] * 10_000],
        "lengths": [24, 8, 24, 5],
        "temperatures": [0.0, 0.8],
        "minutes": 5,
        "fingerprint": codec.fingerprint,
        "draft_limit": 16,
        "warm": [],
        "learns": True,
        **changes,
    }


@pytest.mark.parametrize(
    ("what", "changes", "says"),
    [
        *(("costs", {"prompts": prompts}, "prompts") for prompts in ([[1, 2], [3, -4]], [], 7, [["a", "b"]])),
        ("log", {"fingerprint": "0" * 32}, "another tokenizer"),
        ("log", {"prompts": [[5] * 10_000], "lengths": [5]}, "no prompt of the log fits"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    what: str, changes: dict[str, Any], says: str, measured_here: Measured
) -> None:
    status, said = measured_here(what, **(changes if what == "costs" else log_asked(**changes)))
    assert status == 2 and says in said["error"] and "\n" not in said["error"]


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, measured_here: Measured) -> None:
    status, said = measured_here("costs", tmp_path)
    assert status == 2 and "\n" not in said["error"]


@pytest.mark.slow
def test_what_the_measuring_program_says_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot measure {tmp_path}: .*tokenizer"):
        measure_costs(str(tmp_path), [[1, 2, 3]])


def test_a_program_that_says_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_sources, "_PROGRAM", "this")
    with pytest.raises(ModelError, match="status 0"):
        measure_costs("some-model", [])


def test_costs_are_measured_with_the_engine(measured_here: Measured) -> None:
    asked = {"prompts": [[5, 6, 7, 8], [9, 10]], "rounds": 2, "tokens": 6, "context": 16}
    status, result = measured_here("costs", **asked)
    assert status == 0
    costs = parse_step_costs(result, "x.json")
    assert costs.curve.widths.tolist() == list(profile_cli.WIDTHS)
    assert (np.diff(costs.curve.costs) >= 0).all()
    assert costs.step_ms is not None and costs.step_ms > 0
    assert costs.overhead is not None and costs.overhead >= 0
    assert "threads" in costs.source


# Requests of a log decoded by a model, with drafts and without


@cache
def evaluation() -> dict[str, Any]:
    """Of a made log, with figures that tests know."""
    found = evaluate(replace(made_log(), labels=["asked again", "new text"] * 20), plan(), COSTS)
    known = {"speedup": 1.84, "requests": 1200, "inputs": ["monday.jsonl"], "tokenizer": "some-tokenizer"}
    return {**found, **known, "cost": {**found["cost"], "condition": "if passes are free (assumed)"}}


def row(number: int, without_s: float, with_s: float, *, same: bool = True) -> dict[str, Any]:
    ways: dict[str, dict[str, Any]] = {
        way: {"seconds": seconds, "first_s": 0.5, "tokens": 10, "passes": passes, "drafted": 0, "accepted": 0}
        for way, seconds, passes in (("none", without_s, 10), ("ssd", with_s, 4))
    }
    ways["ssd"]["said"] = [7] * 10
    return {"request": number, "same": same, **ways}


def found(count: int, **changes: Any) -> dict[str, Any]:
    rows = [row(number, 2.0, 2.5 if number == 1 else 1.0) for number in range(count)]
    way = {"temperature": 0.0, "requests": rows, "bits_compared": 3, "bits_differ": 0, **changes}
    return {"model": "m", "device": "cpu", "dtype": "float32", "threads": 2, "too_long": 1, "temperatures": [way]}


def log(count: int) -> Log:
    return Log(np.arange(4 * count, dtype=np.int32), np.arange(0, 4 * count + 1, 4), np.full(count, 2))


def evaluated(count: int, **changes: Any) -> dict[str, Any]:
    measured = summarize_measurement(found(count, **changes))
    return {**evaluation(), "measured": {**measured, "replayed": {"speedup": 1.9}}}


def test_figures_are_sums_over_requests() -> None:
    both = compute_figures([row(0, 2.0, 1.0), row(1, 2.0, 1.5)])
    assert (both["requests"], both["output_tokens"], both["passes_without"], both["passes_with"]) == (2, 20, 20, 8)
    assert (both["without_per_s"], both["with_per_s"]) == (5.0, 8.0)
    assert both["speedup"] == 1.6
    assert compute_figures([])["speedup"] == compute_figures([])["output_speedup"] == 1.0


def test_the_speed_up_of_the_output_is_what_a_replay_counts() -> None:
    """A pass of a prompt takes 5 s, a plain step 1 s; a draft of 61 tokens makes its pass 2 s longer."""
    none, ssd = {"seconds": 5.0 + 63.0, "first_s": 5.0}, {"seconds": 7.0 + 1.0, "first_s": 7.0}
    repeated = row(0, 0.0, 0.0)
    for name, took in (("none", none), ("ssd", ssd)):
        repeated[name] |= {**took, "tokens": 64}
    drafted = np.bincount([61, 0])
    costs = StepCosts(CostCurve("made", np.array([1.0, 62.0]), np.array([1.0, 3.0])), "made")
    assert compute_figures([repeated])["output_speedup"] == pytest.approx(costs.speed_up(64, drafted)) == 16.0
    alone = {"seconds": 5.0, "first_s": 5.0, "tokens": 1}
    assert compute_figures([{**repeated, "none": {**repeated["none"], **alone}}])["output_speedup"] == 1.0


def test_measurements_of_several_rounds_are_kept_as_one(tmp_path: Path) -> None:
    rounds = [
        {**MEASURED, "requests": 4, "ms": [5.0, 6.0, ms], "costs": [1.0, cost, 1.9], "overhead": overhead}
        for ms, cost, overhead in ((8.0, 1.1, 0.0), (9.0, 1.8, 0.2), (7.0, 1.2, 0.1))
    ]
    one = merged(rounds)
    assert (one["ms"], one["costs"], one["overhead"], one["requests"]) == ([5.0, 6.0, 8.0], [1.0, 1.2, 1.9], 0.1, 12)
    (kept := tmp_path / "cost.json").write_text(json.dumps(one))
    assert read_step_costs(kept).as_json() == parse_step_costs(one, kept.name).as_json()


@pytest.mark.parametrize("option", [("--dtype", "bfloat16"), ("--device", "cpu")])
def test_the_benchmark_refuses_what_the_command_does_not_take(option: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark([*option, "--json"])


def test_losses_and_parts_are_shown() -> None:
    (way,) = evaluated(40)["measured"]["temperatures"]
    assert (way["requests"], way["slower"]) == (40, [2])
    assert [part["up_to"] for part in way["growth"]] == list(range(4, 41, 4))
    assert sum(part["output_tokens"] for part in way["growth"]) == way["output_tokens"]
    text = summary(evaluated(40))
    for said in ("a replay predicts 1.90x", "did not fit", "1.84", "1,200", "asked again", "memory ", "MB", "traffic"):
        assert said in text, said


def test_what_logs_call_things_is_shown_and_never_obeyed() -> None:
    classes = [{**evaluation()["classes"][0], "name": "\x1b[2J"}]
    text = summary({**evaluation(), "classes": classes, "inputs": ["\u202e\0"], "tokenizer": "\x1b"})
    assert text.replace("\n", "").isprintable()


def test_a_headline_needs_enough_requests_and_equal_outputs() -> None:
    assert headline(evaluated(LEAST_REQUESTS)).startswith("1.9")
    assert "greedy on 30 requests: " in headline(evaluated(LEAST_REQUESTS))
    assert headline(evaluated(LEAST_REQUESTS - 1)) == "29 requests are too few for a speed-up: at least 30 are needed"
    assert headline(evaluated(40, bits_differ=1)).startswith("Outputs differ with drafts")


def test_without_a_model_the_headline_is_its_assumption_too() -> None:
    assert headline(evaluation()) == "1.84x expected on 1,200 requests, if passes are free (assumed)"
    assert headline({**evaluation(), "requests": 8}) == "8 requests are too few for a speed-up: at least 30 are needed"


def test_what_the_model_said_becomes_a_log() -> None:
    made = log_of_measurement(found(3), log(3))
    assert made is not None and made.prompt_lengths.tolist() == [2, 2, 2] and made.output_lengths.tolist() == [10] * 3
    assert made.row(1).context.tolist() == [4, 5] and made.row(1).output.tolist() == [7] * 10
    assert log_of_measurement(found(3, temperature=0.8), log(3)) is None


def test_a_model_decodes_both_ways_and_says_the_same(measured_here: Measured) -> None:
    status, result = measured_here("log", **log_asked())
    assert (status, result["too_long"]) == (0, 1)
    for way in result["temperatures"]:
        assert [each["request"] for each in way["requests"]] == [0, 1, 2] and all(
            each["same"] for each in way["requests"]
        )
        assert (way["bits_compared"], way["bits_differ"]) == (3, 0)
        assert all(each["none"]["drafted"] == 0 < each["none"]["passes"] for each in way["requests"])
    first, _, again = result["temperatures"][0]["requests"]
    assert again["ssd"]["passes"] < first["ssd"]["passes"] and again["ssd"]["said"] == first["ssd"]["said"]
