"""`ssd-cache evaluate` on small made logs."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder.__main__ import main
from cache_builder.evaluation.costs import CostCurve, StepCosts, flat_curve
from cache_builder.evaluation.decoding import OutputDecoder
from cache_builder.evaluation.evaluate import Plan, count_replayed_tokens, evaluate, replay
from cache_builder.evaluation.log import Log, RecordedOutput
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, IndexConfig
from ssd.cost_model.calibration import FIRST_TOKEN_THRESHOLD
from ssd.drafting.draft_records import SOURCES
from ssd.retrieval.cache_manager import CacheManager, NamespaceCache
from tests.reference.decoding import SlowDecoder

TOKENIZER = str(MODEL_PATH)
COSTS = StepCosts(flat_curve(16), "made")
FINGERPRINT = "0" * 32


def log_of(*requests: tuple[list[int], list[int]]) -> Log:
    texts = [np.array([*prompt, *output], np.int32) for prompt, output in requests]
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    return Log(np.concatenate(texts), starts, np.array([len(prompt) for prompt, _ in requests], np.int64))


def made_log(num_requests: int = 40, seed: int = 0) -> Log:
    """Answers of a few phrases, so that later ones repeat earlier ones."""
    numbers = np.random.default_rng(seed)
    phrases = [numbers.integers(5, 500, 20).tolist() for _ in range(8)]
    requests = []
    for _ in range(num_requests):
        said = [token for which in numbers.integers(0, 8, 4) for token in phrases[which]]
        requests.append((numbers.integers(5, 500, 12).tolist(), [*said, 1]))
    return log_of(*requests)


def plan(**changes: Any) -> Plan:
    return replace(Plan(fingerprint=FINGERPRINT, draft=DraftConfig(num_speculative_tokens=16)), **changes)


def write_log(path: Path, num_records: int = 12) -> Path:
    """Questions whose answers repeat a few sentences, with a kind."""
    chosen = random.Random(3)
    sentences = [f"The {thing} is kept in the {place} until it is needed." for thing in "abcd" for place in "xyz"]
    with path.open("w") as file:
        for number in range(num_records):
            answer = " ".join(chosen.sample(sentences, 4))
            record = {"prompt": f"Question {number}?", "completion": answer, "meta": {"kind": f"kind {number % 3}"}}
            file.write(json.dumps(record) + "\n")
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["evaluate", *arguments, "--tokenizer", TOKENIZER, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_the_report_has_all_its_parts_and_they_agree() -> None:
    log = made_log()
    found = evaluate(replace(log, labels=["one", "two"] * 20), plan(), COSTS)
    assert found["report"] == "evaluate"
    assert found["requests"] == len(log) == sum(each["requests"] for each in found["classes"])
    assert found["output_tokens"] == log.output_lengths.sum() == sum(each["output_tokens"] for each in found["classes"])
    assert sum(each["output_tokens"] for each in found["growth"]) == found["output_tokens"]
    assert found["growth"][-1]["requests"] == len(log)
    accepted = sum(each["accepted"] for each in found["by_source"])
    steps = found["output_tokens"] - accepted
    assert found["tokens_per_step"] == pytest.approx(found["output_tokens"] / steps, abs=1e-3)
    assert 0.5 < found["of_oracle"] <= 1.0
    assert found["speedup"] > 1.5 and count_replayed_tokens(log, plan()) == 2 * found["output_tokens"]
    assert [each["cache"] for each in found["by_cache"]] == ["none", "growing"]
    assert found["by_cache"][0]["speedup"] < found["speedup"]
    assert found["needs"]["disk_bytes"] > 0
    json.dumps(found)


def test_the_figures_are_those_of_decoding_the_log_request_by_request() -> None:
    log = made_log()
    found = evaluate(log, plan(), COSTS)
    decoder, num_steps, num_drafted = OutputDecoder(COSTS.curve, draft=plan().draft), 0, 0
    with CacheManager(CacheConfig(index=IndexConfig()), FINGERPRINT, inline=True) as caches:
        for number in range(len(log)):
            row = log.row(number)
            steps = decoder.decode(row, caches.get().snapshot())
            num_steps, num_drafted = num_steps + len(steps.drafted), num_drafted + int(steps.drafted.sum())
            caches.get().append(row.text(), prompt_length=len(row.context))
            caches.maintain()
    assert found["tokens_per_step"] == pytest.approx(found["output_tokens"] / num_steps, abs=1e-4)
    assert found["drafted_per_step"] == pytest.approx(num_drafted / num_steps, abs=1e-4)


def test_a_small_capacity_forgets_what_a_large_one_drafts_from() -> None:
    log, large = made_log(400), plan(index=IndexConfig(flush_tokens=64))
    small = replace(large, index=replace(large.index, capacity_tokens=128))
    forgetful, mindful = (replay(log, each, COSTS.curve, "growing") for each in (small, large))
    assert forgetful.num_cached_tokens <= 128 < mindful.num_cached_tokens
    assert forgetful.num_steps.sum() > mindful.num_steps.sum()


def test_choices_of_one_call_are_not_drafted_from_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "The list of names is read from the file, and each name is printed on a line of its own."
    choices = [{"index": number, "text": said} for number in range(4)]
    request = {"prompt": "What?", "n": 4}
    (together := tmp_path / "n.jsonl").write_text(
        json.dumps({"request": request, "response": {"object": "text_completion", "choices": choices}}) + "\n"
    )
    (apart := tmp_path / "each.jsonl").write_text((json.dumps({"prompt": "What?", "completion": said}) + "\n") * 4)
    one, four = run_json(capsys, str(together)), run_json(capsys, str(apart))
    assert one["requests"] == four["requests"] == 4 and one["output_tokens"] == four["output_tokens"]
    assert one["by_cache"][0]["tokens_per_step"] == one["tokens_per_step"] < four["tokens_per_step"]


def test_documents_are_learned_and_not_decoded() -> None:
    said = list(range(100, 160))
    log = log_of(([], said), ([7, 8, 9, 100, 101, 102, 103], said[4:]))
    found = evaluate(log, plan(), COSTS)
    assert (found["requests"], found["documents"]) == (1, {"number": 1, "tokens": len(said)})
    assert found["tokens_per_step"] > 5
    alone = evaluate(log_of(([], said)), plan(), COSTS)
    assert (alone["requests"], alone["speedup"], alone["classes"]) == (0, 1.0, [])


def test_the_command_prints_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, str(write_log(tmp_path / "log.jsonl")), "--class-by", "meta.kind")
    assert found["requests"] == 12 and found["inputs"] == ["log.jsonl"]
    assert sorted(each["name"] for each in found["classes"]) == ["kind 0", "kind 1", "kind 2"]
    assert found["parameters"]["class_by"] == "meta.kind"
    assert found["cost"]["source"].startswith("assumed")


def test_the_command_prints_a_summary_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(write_log(tmp_path / "log.jsonl")), "--tokenizer", TOKENIZER]) == 0
    said = capsys.readouterr().out
    assert said.startswith("12 requests are too few for a speed-up: at least 30 are needed\n")
    assert re.search(
        r"\nreplayed: speed-up \d\.\d\dx, .*\n(?:.*\n)*costs of forward passes: assumed .* 32 tokens", said
    )
    assert "Replayed, by searched text" in said and "Limitations" in said


def test_a_page_has_the_curve_of_each_class_and_the_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    lines = [json.loads(line) for line in write_log(tmp_path / "log.jsonl").read_text().splitlines()]
    for line in lines:
        line["meta"]["kind"] = line["meta"]["kind"].replace("kind 1", "<b>$\\x$ 钥匙")
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "page.html"
    found = run_json(capsys, str(tmp_path / "log.jsonl"), "--class-by", "meta.kind", "--html", str(page))
    assert sum(part["output_tokens"] for part in found["growth"]) == found["output_tokens"]
    for each in found["classes"]:
        assert sum(part["output_tokens"] for part in each["growth"]) == each["output_tokens"]
    text = page.read_text()
    assert text.count("<svg") == 1 and "<b>" not in text and text.count("&lt;b&gt;$\\x$ 钥匙") >= 2
    assert "kind 0" in text and "all requests" in text and "Costs of a forward pass: assumed" in text
    assert "Limitations" in text and not re.search(r"<script|(?:src|href)=.http", text)
    command = ["evaluate", str(tmp_path / "log.jsonl"), "--tokenizer", TOKENIZER, "--html"]
    assert main([*command, str(tmp_path / "none" / "page.html")]) == 2
    assert "the directory does not exist" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*command, str(page)]) == 2 and "pip install matplotlib" in capsys.readouterr().err


def test_a_warm_directory_is_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, warm = str(write_log(tmp_path / "log.jsonl")), str(tmp_path / "warm")
    assert main(["build", path, "--tokenizer", TOKENIZER, "--out", warm]) == 0
    capsys.readouterr()
    found = run_json(capsys, path, "--warm", warm, "--cache", "frozen")
    assert [each["cache"] for each in found["by_cache"]] == ["none", "frozen"]
    assert "prebuilt" in [each["source"] for each in found["by_source"]]
    assert found["speedup"] > found["by_cache"][0]["speedup"]
    both = run_json(capsys, path, "--warm", warm)
    assert [each["cache"] for each in both["by_cache"]] == ["none", "frozen", "growing"]


# Outputs decoded by one kernel call each


STEEP = CostCurve("steep", np.array([1.0, 2.0, 8.0]), np.array([1.0, 1.3, 1.6]))


@contextmanager
def small_cache() -> Iterator[NamespaceCache]:
    with CacheManager(CacheConfig(index=IndexConfig(flush_tokens=64)), "0" * 32, inline=True) as caches:
        yield caches.get()


@st.composite
def traffic(draw: st.DrawFn) -> list[RecordedOutput]:
    """Requests of a few phrases in any order, here and there another token."""
    phrases = [draw(st.lists(st.integers(1, 40), min_size=3, max_size=12)) for _ in range(4)]
    rows = []
    for _ in range(draw(st.integers(1, 8))):
        parts = [phrases[i] for i in draw(st.lists(st.integers(0, 3), min_size=2, max_size=8))]
        text = np.array([token for part in parts for token in part], np.int32)
        for place in draw(st.lists(st.integers(0, len(text) - 1), max_size=3)):
            text[place] = draw(st.integers(1, 40))
        cut = draw(st.integers(0, len(text) - 1))
        rows.append(RecordedOutput(text[:cut], text[cut:]))
    return rows


@settings(max_examples=40)
@given(traffic(), st.booleans(), st.sampled_from([1, 2, 5, 16]), st.sampled_from([flat_curve(8), STEEP]), st.booleans())
def test_a_whole_output_at_once_is_decoded_as_step_by_step(
    rows: list[RecordedOutput], tree: bool, limit: int, curve: CostCurve, is_first_drafted: bool
) -> None:
    sure = 0.0 if is_first_drafted else FIRST_TOKEN_THRESHOLD
    fast = OutputDecoder(curve, draft=DraftConfig(num_speculative_tokens=limit), tree=tree, sure=sure)
    slow = SlowDecoder(curve, limit, tree=tree, sure=sure)
    with small_cache() as cache:
        for row in rows:
            expected = slow.decode(row, cache.snapshot())
            found = fast.decode(row, cache.snapshot())
            assert found.drafted.tolist() == [step[0] for step in expected]
            assert found.accepted.tolist() == [step[1] for step in expected]
            drafts = zip(found.sources.tolist(), expected, strict=True)
            assert all(SOURCES[source] == step[2] for source, step in drafts if step[0])
            assert int(found.accepted.sum()) + len(found.accepted) == len(row.output)
            cache.append(row.text(), prompt_length=len(row.context))
            cache.maintain()


def test_what_was_drafted_is_counted_by_source() -> None:
    decoder = OutputDecoder(flat_curve(64), draft=DraftConfig(), sure=0.0)
    phrase = np.arange(1, 33, dtype=np.int32)
    with small_cache() as cache:
        cache.append(np.concatenate([phrase, phrase]))
        steps = decoder.decode(RecordedOutput(phrase, np.append(phrase, np.int32(99))), cache.snapshot())
    by_source = decoder.by_source()
    assert sum(each[1] for each in by_source.values()) == steps.drafted.sum()
    assert sum(each[2] for each in by_source.values()) == steps.accepted.sum()


@pytest.mark.parametrize("limit", [0, 64])
def test_without_a_cache_and_with_one_token_there_is_one_step(limit: int) -> None:
    decoder = OutputDecoder(flat_curve(8), draft=DraftConfig(num_speculative_tokens=limit))
    steps = decoder.decode(RecordedOutput(np.zeros(0, np.int32), np.array([3], np.int32)), None)
    assert steps.accepted.tolist() == [0]
