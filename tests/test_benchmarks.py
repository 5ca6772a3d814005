"""Every benchmark once, small: it runs, its last line is its result, what it compares is equal. No time is judged."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._autograd import DeviceType

from benchmarks.contenders import ALL, OFF, QUESTIONS
from benchmarks.coupled import REPEATS
from benchmarks.growth import repeat
from benchmarks.index import measures
from benchmarks.index.longest_match import longest_match
from benchmarks.index.measures import (
    CONTEXT_TOKENS,
    Prober,
    completions,
    drafted_contexts,
    measure,
    sample_contexts,
)
from benchmarks.profile import summary
from benchmarks.reliability.clients import Answer, Load, Question, _Received
from benchmarks.reliability.engine import num_changed
from benchmarks.run import Option, Run, bootstrap, in_turn, table
from benchmarks.servers import Server
from benchmarks.ways import ask, requests_of
from benchmarks.workloads import MIXED, NO_REPEATS, checksum, stream
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams
from ssd.model.loading import threads
from ssd.model.loading.load_target import load_model
from ssd.text.codec import TextCodec
from tests.engines import make_engine, prompt_of
from tests.reference.drafting import make_snapshot

Found = dict[str, Any]

_SMALL = ("--max-tokens", "10", "--prompt-tokens", "128", "--num-speculative-tokens", "8", "--temperatures", "0.7")
_STEPS = ("--context", "24", "--draft", "0", "3", "--rounds", "3")


def rows(number: int) -> Callable[[Found], bool]:
    return lambda found: len(found["rows"]) == number


def few_passes_when_asked_again(found: Found) -> bool:
    again = [row for row in found["rows"] if row["workload"] == REPEATS]
    return all(row["coupled"]["tokens_per_pass"] > 2 * row["uncoupled"]["tokens_per_pass"] for row in again)


def as_many_positions_as_texts_have(found: Found) -> bool:
    (row,) = found["rows"]
    return bool(0 < row["num_distinct"] <= 2 * 2 * 6 < row["num_logprobs"] < row["num_positions"])


_FEW = ("--requests", "2", "--rounds", "1", "--max-tokens", "8", "--prompt-tokens", "48")
PROGRAMS: tuple[tuple[str, Sequence[str], Callable[[Found], object]], ...] = (
    ("contenders", ("--question", "overhead", "--batch", "2", "--rounds", "2", "--max-tokens", "4"), rows(3)),
    (
        "contenders",
        ("--question", "mechanisms", "--traffic", "new", *_FEW),
        rows(2 * len(QUESTIONS["mechanisms"].ways)),
    ),
    ("contenders", _FEW, lambda f: {row["way"] for row in f["rows"]} >= {"retrieval", "draft head", ALL}),
    (
        "exact",
        ("--dtype", "float32", "--prompts", "2", "--max-tokens", "6", "--rounds", "1"),
        as_many_positions_as_texts_have,
    ),
    ("evaluate", ("--workloads", "often", "--requests", "3", "--max-tokens", "16", "--rounds", "1"), rows(1)),
    ("growth", ("--requests", "6", "--repeated", "2", "--max-tokens", "8", "--window", "3"), rows(4)),
    ("coupled", ("--requests", "3", "--group", "2", "--streams", "3", *_SMALL), few_passes_when_asked_again),
    ("decode", ("--batch", "1", "2", *_STEPS, "--copy-mb", "8", "--no-baselines"), rows(4)),
    (
        "decode",
        ("--shape", "tiny", "--device", "cpu", "--batch", "2", *_STEPS, "--profiled", "2", "--baseline-tokens", "8"),
        lambda f: len(f["baselines"]) == 5 and not any("error" in each for each in f["baselines"].values()),
    ),
    (
        "index.__main__",
        ("--tokens", "60000", "--static", "40000", "--seconds", "1"),
        lambda f: f["freshness_ms_p99"] > 0,
    ),
    (
        "limits",
        ("--batch", "2", "--draft", "3", "--context", "16", "--passes", "1", "--rounds", "1"),
        lambda f: f["rows"][1]["speed_ups"] == sorted(f["rows"][1]["speed_ups"]),
    ),
    ("http", ("--rounds", "1", "--requests", "4", "--kind", "one", "plain-stream"), rows(2)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments", "is_right"), PROGRAMS, ids=[f"{name} {arguments[0]}" for name, arguments, _ in PROGRAMS]
)
def test_a_small_run_ends_with_its_result(
    program: str,
    arguments: Sequence[str],
    is_right: Callable[[Found], object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = importlib.import_module(f"benchmarks.{program}").main
    assert main([*arguments, "--out", str(tmp_path / "result.json")]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert json.loads((tmp_path / "result.json").read_text()) == found
    assert found["parameters"] and found["environment"]["commit"] and is_right(found)


def test_a_run_refuses_what_is_below_its_least_and_says_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"rounds": 3, "draft": Option(default=[0, 1], least=0), "out_of_it": 5}
    run = Run("made", "Is it?\n\nSo.", ["--rounds", "2", "--draft", "4"], options, unsaid=("out_of_it",))
    assert run.parameters == {"rounds": 2, "draft": [4]} and run.under[0] == "benchmarks/made.py"
    assert Run("vllm_changes", "Is it?", [], {"left_out": None}, program="vllm.changes").under[0].endswith("changes.py")
    assert Run("replay", "Is it?", [], {}).under[0] == "benchmarks/replay"
    assert run.end(value=1, is_wrong=True) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["value"] == 1
    for wrong in (["--rounds", "0"], ["--draft", "-1"]):
        with pytest.raises(SystemExit):
            Run("made", "Is it?", wrong, options)


def test_passes_are_made_on_the_threads_that_the_product_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "tune_threads", lambda _: torch.set_num_threads(1))
    try:
        run = Run("made", "Is it?", ["--json"], {}, has_model=True)
        run.load()
    finally:
        torch.set_num_threads(before)
    assert run.facts["threads"] == 1


def test_speculation_off_keeps_prompts_where_all_together_does() -> None:
    for question in QUESTIONS.values():
        assert question.off.name == OFF and question.ways[-1].name == ALL
        assert question.off.keeps_prompts == question.ways[-1].keeps_prompts


@pytest.mark.parametrize(
    ("text", "is_whole", "word"),
    [
        ("ab", True, "right"),
        ("ac", True, "changed"),
        ("a", True, "changed"),
        ("a", False, "cancelled"),
        ("b", False, "changed"),
    ],
)
def test_a_wrong_answer_is_found(text: str, is_whole: bool, word: str, tmp_path: Path) -> None:
    asked = Load(Server(tmp_path / "log"))
    question = Question("made", "/v1/completions", {}, (Answer((7,), "ab", "stop"),))
    found = _Received(1)
    found.add({"choices": [{"index": 0, "text": text, "token_ids": [7], "finish_reason": "stop"}]})
    assert asked._outcome(question, found, is_whole=is_whole) == word
    assert len(asked.failures) == (word == "changed")


def test_tables_turns_and_intervals() -> None:
    lines = table((("a", "{a}"), (">b", "{b[0]:.1f}")), [{"a": "x", "b": [1.25]}])
    assert lines == ["| a | b |", "|---|--:|", "| x | 1.2 |"]
    assert [in_turn("abc", number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    random = np.random.default_rng(0)
    widths = []
    for number in (10, 1000):
        values = random.normal(1.0, 0.1, number).tolist()
        low, high = bootstrap(values)
        assert low < np.median(values) < high
        widths.append(high - low)
    assert widths[1] < widths[0]


def test_a_profiled_step_of_two_kernels_is_busy_and_waits_for_the_host() -> None:
    def named(key: str, us: float, *, on: DeviceType = DeviceType.CPU, count: int = 2) -> Any:
        return SimpleNamespace(
            key=key, device_type=on, count=count, cpu_time_total=us, self_cpu_time_total=us, self_device_time_total=us
        )

    host = [named("step", 2000), named("launch", 300), named("aten::mm", 60), named("cudaEventSynchronize", 1300)]
    kernels = [named("_attend_split", 400, on=DeviceType.CUDA), named("nvjet_gemm", 990, on=DeviceType.CUDA)]
    # Each of the second kind is launched while the one before it ends, and waits in its own time.
    busy = [(2000.0, 2200.0), (100.0, 300.0), (280.0, 775.0), (2150.0, 2645.0), (300.0, 500.0)]
    found = summary([*host, *kernels, named("step", 1900, on=DeviceType.CUDA)], busy, 2)
    assert found["step_ms"] == 1.0 and found["phases_ms"]["launch"] == 0.15
    assert found["device_busy_ms"] == 0.66 and found["waits_for_host_ms"] == 0.34
    assert found["host_waits_ms"] == 0.65 and found["kernels"] == 2.0
    assert found["groups_ms"] == {"matrix products": 0.495, "attention": 0.2}
    alone = summary(host, (), 2)
    assert alone["operators_ms"] == 0.68 and alone["outside_operators_ms"] == 0.32


def test_a_soak_sees_an_answer_that_is_wrong_every_time() -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    questions = [(list(prompt_of(seed)), greedy) for seed in range(3)]
    plain = make_engine("none")
    said = ask(plain, requests_of([prompt for prompt, _ in questions], [greedy] * 3))
    right = {index: tuple(tokens) for index, tokens in enumerate(said)}
    assert num_changed(plain, questions, {index: {answer} for index, answer in right.items()}) == 0
    wrong = (right[1][0] ^ 1, *right[1][1:])
    assert num_changed(plain, questions, {0: {right[0]}, 1: {wrong}, 2: {right[2], right[2][:-1]}}) == 2


def test_contexts_that_an_index_is_asked_for_occur_as_far_as_they_say() -> None:
    parts = [
        [token for text in islice(completions(2000, seed), 12) for token in (*text.tolist(), -1)] for seed in (1, 2)
    ]
    snapshot = make_snapshot(parts)
    contexts = sample_contexts(snapshot, 40, np.random.default_rng(0))
    assert [context.is_present for context in contexts] == [True, False] * 20
    for context in contexts:
        known = longest_match(snapshot, context.tokens, CONTEXT_TOKENS).length
        assert known == context.known and (context.is_present or 1 <= known <= 10)


def test_an_index_that_drafts_nothing_or_something_else_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [token for tokens in islice(completions(2000, 1), 12) for token in (*tokens.tolist(), -1)]
    snapshot, random = make_snapshot([text]), np.random.default_rng(0)
    assert measure(snapshot, random, passes=1, count=20)["checked_drafts"] > 0
    assert all(context.is_present for context in drafted_contexts(snapshot, 3, random))
    for draft in ([], [-1]):
        for name in ("one", "row"):
            monkeypatch.setattr(Prober, name, lambda *_, draft=draft: (1.0, np.array(draft, np.int32)))
        with pytest.raises(AssertionError, match="only 0 drafts are what follows"):
            measure(snapshot, random, passes=1, count=20)
        with pytest.raises(AssertionError, match="none was drafted from"):
            drafted_contexts(snapshot, 3, random)
    monkeypatch.setattr(measures, "longest_match", lambda *_: SimpleNamespace(support=2))
    monkeypatch.setattr(measures, "_break", lambda *_: True)
    with pytest.raises(AssertionError, match="of 0 contexts"):
        measure(snapshot, random, passes=1, count=20)


@pytest.mark.slow
def test_the_same_requests_again_need_far_fewer_passes() -> None:
    """At least 3x fewer; where own text drafted the first run well, 1.5x fewer and 8 tokens a step."""
    codec = TextCodec.load(str(MODEL_PATH))
    found = repeat(load_model(MODEL_PATH, dtype="float32", device="cpu"), codec, 50, 32)
    assert found["mismatches"] == 0
    fewer = found["steps_first"] / found["steps_second"]
    assert fewer >= 3 or (fewer >= 1.5 and found["tokens_per_step_second"] >= 8), found


def test_a_stream_is_the_same_every_time_and_has_its_shares() -> None:
    requests = stream(MIXED, 300, seed=3)
    assert checksum(requests) == checksum(stream(MIXED, 300, seed=3)) != checksum(stream(MIXED, 300, seed=4))
    kinds = [request.kind for request in requests]
    assert abs(kinds.count("variant") / 300 - MIXED.variant) < 0.08
    assert kinds[:60].count("repeat") < kinds[-60:].count("repeat")  # what is known grows with use
    asked = [request.text for request in requests if request.kind != "variant"]
    assert len(set(asked)) == len(asked) - kinds.count("repeat")
    assert {request.kind for request in stream(NO_REPEATS, 50)} == {"new"}
    assert not any(request.text.rstrip("\n").endswith(" ") for request in requests)
