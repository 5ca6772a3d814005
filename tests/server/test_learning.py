"""Requests that ask not to be learned: nothing of them is kept, drafts are taken all the same, outputs are equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.client import metric, post
from tests.server.failing_engine import RunningServer
from tests.server.test_cache import PROMPT, served, token_ids


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with served() as running:
        yield running


def test_store_false_and_the_header_keep_a_request_out_of_the_cache(server: RunningServer) -> None:
    before = metric(server.port, "ssd:cache_tokens")
    expected = token_ids(server, store=False)
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "store": False}
    assert post(server.port, "/v1/chat/completions", chat).status == 200
    response = {"input": PROMPT, "max_output_tokens": 8}
    assert post(server.port, "/v1/responses", {**response, "store": False}).status == 200
    assert post(server.port, "/v1/responses", response, headers={"x-ssd-no-learn": "1"}).status == 200
    message = {"messages": chat["messages"], "max_tokens": 8}
    assert post(server.port, "/v1/messages", {**message, "store": False}).status == 200
    assert post(server.port, "/v1/messages", message, headers={"x-ssd-no-learn": "1"}).status == 200
    body = {"prompt": PROMPT, "max_tokens": 60}
    for value in ("1", "true"):
        assert post(server.port, "/v1/completions", body, headers={"x-ssd-no-learn": value}).status == 200
    assert metric(server.port, "ssd:cache_tokens") == before
    assert token_ids(server, store=True) == expected
    assert metric(server.port, "ssd:cache_tokens") > before
    steps = metric(server.port, "ssd:verify_steps_total")
    assert token_ids(server, store=False) == expected
    assert metric(server.port, "ssd:verify_steps_total") - steps < 40, "it is drafted for from what others left"


def test_a_header_that_says_neither_is_refused(server: RunningServer) -> None:
    answer = post(server.port, "/v1/completions", {"prompt": "x"}, headers={"x-ssd-no-learn": "perhaps"})
    assert (answer.status, answer.error["param"]) == (400, "x-ssd-no-learn")
    assert post(server.port, "/v1/completions", {"prompt": "x"}, headers={"x-ssd-no-learn": "0"}).status == 200


def test_store_must_be_a_boolean(server: RunningServer) -> None:
    answer = post(server.port, "/v1/completions", {"prompt": "x", "store": "no"})
    assert (answer.status, answer.error["param"]) == (400, "store")
