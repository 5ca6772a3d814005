"""The server and its retrieval cache: speculation changes no token, and replicas learn from each other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from server.command.arguments import parse_arguments
from server.command.start import EngineLoader, make_settings, make_tenants
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture
from tests.server.apis import APIS
from tests.server.client import metric, post, wait_until
from tests.server.failing_engine import RunningServer, serving

SMALL = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "2", "--max-model-len", "256"]
PROMPT = "class Queue:\n    def __init__(self):\n"


def served(*arguments: str) -> AbstractContextManager[RunningServer]:
    """A server as the command line would make it, inside this process."""
    options = parse_arguments([*SMALL, "--cache-tokens", "65536", *arguments], environment={})
    loader, settings = EngineLoader(options), make_settings(options)
    return serving(
        loader,
        tenants=make_tenants(options, settings),
        sharing_stats=loader.sharing_stats,
        model=settings.model,
        namespace=settings.namespace,
        sampling_defaults=settings.sampling_defaults,
    )


def token_ids(server: RunningServer, **fields: Any) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = post(server.port, "/v1/completions", body)
    assert answer.status == 200, answer.content
    ids: list[int] = answer.json["choices"][0]["token_ids"]
    return ids


def test_replicas_learn_from_each_other_and_live_on_without_redis(redis_server: RedisServer) -> None:
    arguments = ("--redis", redis_server.url, "--namespace", "team")
    with served(*arguments) as first, served(*arguments) as second:
        for server in (first, second):
            wait_until(lambda server=server: metric(server.port, "ssd:replication_connected") == 1)  # type: ignore[misc]
        expected = token_ids(first)
        wait_until(lambda: metric(second.port, "ssd:cache_tokens", namespace="team") > 60)
        assert metric(second.port, "ssd:replication_received_total", namespace="team") >= 1
        assert token_ids(second) == expected
        assert metric(second.port, "ssd:verify_steps_total") < 30
        with ThreadPoolExecutor(2) as lanes:
            answers = [lanes.submit(token_ids, server) for server in (first, second) * 6]
            wait_until(lambda: sum(answer.done() for answer in answers) >= 2)
            redis_server.kill()  # kill -9 under load: no request fails, no output changes
            assert all(answer.result() == expected for answer in answers)
        wait_until(lambda: metric(first.port, "ssd:replication_connected") == 0)
        assert token_ids(first) == token_ids(second) == expected
        redis_server.start()  # empty: sharing goes on by itself
        num_received = metric(second.port, "ssd:replication_received_total")
        new = {"prompt": "def unheard_of(value):\n"}
        wait_until(
            lambda: token_ids(first, **new) and metric(second.port, "ssd:replication_received_total") > num_received
        )
        assert token_ids(second, **new) == token_ids(first, **new)


# -- what is not to be learned --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with served() as running:
        yield running


def test_store_false_and_the_header_keep_a_request_out_of_the_cache(server: RunningServer) -> None:
    before = metric(server.port, "ssd:cache_tokens")
    expected = token_ids(server, store=False)
    for api in APIS.values():
        assert api.post(server.port, PROMPT, store=False).status == 200
        for value in ("no-store", "No-Store"):
            assert api.post(server.port, PROMPT, headers={"x-ssd-cache-control": value}).status == 200
    assert metric(server.port, "ssd:cache_tokens") == before
    assert token_ids(server, store=True) == expected
    assert metric(server.port, "ssd:cache_tokens") > before
    steps = metric(server.port, "ssd:verify_steps_total")
    assert token_ids(server, store=False) == expected
    assert metric(server.port, "ssd:verify_steps_total") - steps < 40, "it is drafted for from what others left"


def test_another_value_of_the_header_is_refused(server: RunningServer) -> None:
    answer = post(server.port, "/v1/completions", {"prompt": "x"}, headers={"x-ssd-cache-control": "no-cache"})
    assert (answer.status, answer.error["param"]) == (400, "x-ssd-cache-control")
    assert post(server.port, "/v1/completions", {"prompt": "x"}, headers={"x-ssd-cache-control": ""}).status == 200
