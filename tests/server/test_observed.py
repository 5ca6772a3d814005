"""What a real engine's requests leave behind: metrics, access lines, spans' times, the drafts of an answer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.base.request_record import RequestRecord
from server.observe.metrics import MAX_NAMED, OTHERS, Families, NamespaceFamilies
from ssd.retrieval.cache_state import CacheStats
from tests.server.bundled_engine import load_bundled
from tests.server.client import get, greedy_completion, metric, post
from tests.server.conftest import Log
from tests.server.failing_engine import RunningServer, serving
from tests.server.test_web_ui import SOURCES

REPEATS = {"prompt": [7, 8, 9] * 20, "max_tokens": 40, "ignore_eos": True}
SPANS: list[RequestRecord] = []


def keep_span(record: RequestRecord, path: str, ended_s: float) -> tuple[str, str]:
    SPANS.append(record)
    return "1" * 32, "2" * 16


@pytest.fixture(scope="module")
def server(log: Log) -> Iterator[RunningServer]:
    with serving(load_bundled, span=keep_span, spec_decode_metrics="detailed") as running:
        yield running


def metrics(server: RunningServer) -> dict[str, float]:
    """Values by name, of families with one sample of that name."""
    text = get(server.port, "/metrics").content.decode()
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_the_line_says_where_time_and_tokens_went(server: RunningServer, log: Log) -> None:
    answer = post(server.port, "/v1/completions", {**REPEATS, "temperature": 0}, headers={"x-request-id": "real-1"})
    line = log.of("real-1")
    usage = answer.json["usage"]
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 <= line["queue_s"] < line["ttft_s"] <= line["total_s"]
    assert line["passes"] + line["accepted_tokens"] == line["output_tokens"]
    assert line["accepted_per_pass"] == pytest.approx(line["accepted_tokens"] / line["passes"], abs=1e-5)
    assert sum(line["sources"].values()) == line["accepted_tokens"] > 0
    assert (line["trace_id"], line["span_id"], line["namespace"]) == ("1" * 32, "2" * 16, "default")
    record = SPANS[-1]
    times = [record.received_s, record.submitted_s, record.started_s, record.first_token_s, record.last_token_s]
    assert times == sorted(times) and times[0] > 0


def test_an_answer_says_how_its_drafts_fared_where_the_operator_lets_it(server: RunningServer) -> None:
    body = {**REPEATS, "temperature": 0}
    whole = post(server.port, "/v1/completions", body).json["metrics"]["speculative_decoding"]
    accepted, drafted = whole["per_step_accepted"], whole["per_step_drafted"]
    assert len(accepted) == len(drafted) == whole["num_spec_steps"] == sum(whole["acceptance_histogram"]) > 0
    assert sum(accepted) == whole["num_accepted_draft_tokens"]
    assert sum(accepted) == sum(size * times for size, times in enumerate(whole["acceptance_histogram"]))
    assert sum(drafted) == whole["num_draft_tokens"]
    assert math.isclose(whole["mean_acceptance_length"], 1 + sum(accepted) / len(accepted))
    assert math.isclose(whole["draft_acceptance_rate"], sum(accepted) / sum(drafted))
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = post(server.port, "/v1/completions", stream).events
    assert [event for event in events if "metrics" in event] == events[-1:]
    assert "metrics" not in post(server.port, "/v1/completions", {**body, "n": 2}).json


def test_vllm_s_counters_and_histograms_count_what_was_served(server: RunningServer) -> None:
    def ended() -> float:
        return metric(server.port, "vllm:request_success_total", finished_reason="length")

    before, length = metrics(server), ended()
    for _ in range(2):
        greedy_completion(server.port, **REPEATS)
    after = metrics(server)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    for name in ("queue", "prefill", "decode", "inference"):
        assert grown[f"vllm:request_{name}_time_seconds_count"] == 2
        assert grown[f"vllm:request_{name}_time_seconds_sum"] >= 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert grown[f"vllm:{name}_count"] == 2
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:request_prompt_tokens_sum"] == 120
    assert grown["vllm:generation_tokens_total"] == grown["vllm:request_generation_tokens_sum"] == 80
    assert grown["vllm:request_params_max_tokens_sum"] == 80
    assert (grown["vllm:request_params_n_count"], grown["vllm:request_params_n_sum"]) == (2, 2)
    assert grown["vllm:inter_token_latency_seconds_count"] == grown["ssd:verify_steps_total"] - 2
    assert grown["vllm:iteration_tokens_total_sum"] >= 80
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted <= grown["vllm:spec_decode_num_draft_tokens_total"]
    assert grown["ssd:verify_steps_total"] + accepted == 80
    by_source = (metric(server.port, "ssd:source_accepted_tokens_total", source=source) for source in SOURCES)
    assert sum(by_source) == metric(server.port, "vllm:spec_decode_num_accepted_tokens_total")
    assert metric(server.port, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") > 0
    assert ended() == length + 2
    assert (after["vllm:num_requests_running"], after["vllm:num_requests_waiting"]) == (0, 0)
    assert after["ssd:ready"] == after["ssd:model_runner_info"] == 1 and after["ssd:cache_tokens"] > 0
    parts = grown["vllm:request_prefill_time_seconds_sum"] + grown["vllm:request_decode_time_seconds_sum"]
    assert parts == pytest.approx(grown["vllm:request_inference_time_seconds_sum"])
    assert grown["vllm:inter_token_latency_seconds_sum"] == pytest.approx(grown["vllm:request_decode_time_seconds_sum"])


def test_every_family_says_what_it_is(server: RunningServer) -> None:
    families = list(text_string_to_metric_families(get(server.port, "/metrics").content.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        assert family.documentation.endswith(".") and len(family.documentation) > 8, family.name
        assert re.fullmatch(r"(vllm:|ssd:|process_|http_)[a-z0-9_]+", family.name), family.name


def stats_of(tokens: int) -> CacheStats:
    return CacheStats(**dict.fromkeys(CacheStats.__dataclass_fields__, tokens))


def test_many_namespaces_are_few_series_and_their_counts_never_shrink() -> None:
    texts = {"num_tokens": "Tokens.", "num_appended_tokens": "Tokens given."}
    families = NamespaceFamilies("ssd:cache", texts, Families(("m", "0")))

    def values(stats: dict[str, CacheStats], name: str) -> dict[str, float]:
        found: list[Any] = [family for family in families.collect(stats) if family.name == name]
        return {sample.labels["namespace"]: sample.value for sample in found[0].samples}

    stats = {f"n{number}": stats_of(1) for number in range(MAX_NAMED + 10)}
    appended = values(stats, "ssd:cache_appended_tokens")
    assert len(appended) == MAX_NAMED + 1 and appended[OTHERS] == 10
    del stats["n70"]
    stats["n71"] = stats_of(5)
    assert values(stats, "ssd:cache_appended_tokens")[OTHERS] == 14
    assert values(stats, "ssd:cache_tokens")[OTHERS] == 8 + 5
    stats["n70"] = stats_of(2)  # another one of that name
    assert values(stats, "ssd:cache_appended_tokens")[OTHERS] == 16
    assert set(values({"n70": stats_of(2)}, "ssd:cache_appended_tokens")) == {OTHERS}
