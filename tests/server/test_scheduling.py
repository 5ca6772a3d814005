"""Priorities, reuse and its figures over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from server.command.arguments import parse_arguments
from tests.server.bundled_engine import load_plain
from tests.server.client import greedy_completion, metric, post
from tests.server.failing_engine import RunningServer, serving

PROMPT = list(range(40, 90))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(partial(load_plain, scheduling_policy="priority")) as running:
        yield running


def complete(server: RunningServer, **body: Any) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **body}
    answer: dict[str, Any] = greedy_completion(server.port, **fields).json
    return answer


def cached(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_usage_and_metrics_say_what_was_cached(server: RunningServer) -> None:
    queries, hits = (metric(server.port, f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    first, second = complete(server), complete(server)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert (cached(first), cached(second)) == (0, len(PROMPT) - 1)
    assert metric(server.port, "vllm:prefix_cache_queries_total") == queries + 2 * len(PROMPT)
    assert metric(server.port, "vllm:prefix_cache_hits_total") == hits + len(PROMPT) - 1
    assert metric(server.port, "ssd:integrity_violations_total") == 0


def test_choices_of_one_prompt_do_not_count_each_other_as_cached(server: RunningServer) -> None:
    prompt = list(range(100, 160))
    assert cached(complete(server, prompt=prompt, n=3, temperature=1.0, seed=1)) == 0
    assert cached(complete(server, prompt=prompt, n=3, temperature=1.0, seed=1)) == len(prompt) - 1
    several = complete(server, prompt=[prompt, prompt[::-1]], n=2)
    assert cached(several) == len(prompt) - 1 and several["usage"]["prompt_tokens"] == 2 * len(prompt)


def test_priorities_are_taken_and_checked(server: RunningServer) -> None:
    assert complete(server, priority=-3)["choices"][0]["text"] == complete(server)["choices"][0]["text"]
    refused = post(server.port, "/v1/completions", {"prompt": "x", "priority": 101})
    assert (refused.status, refused.error["param"]) == (400, "priority")
    assert post(server.port, "/v1/completions", {"prompt": "x", "priority": "high"}).status == 400


def test_a_server_takes_no_priorities_unless_told_to() -> None:
    assert parse_arguments([], {}).engine.config.scheduling_policy == "fcfs"
    with serving(partial(load_plain, enable_prefix_caching=False)) as server:
        refused = post(server.port, "/v1/completions", {"prompt": "x", "priority": 1})
        assert (refused.status, refused.error["param"]) == (400, "priority")
        assert post(server.port, "/v1/completions", {"prompt": "x", "priority": 0}).status == 200
        assert [cached(complete(server)) for _ in range(2)] == [0, 0]
