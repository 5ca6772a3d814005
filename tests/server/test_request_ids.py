"""The id of a request: the client's own where it brings one, on whatever is answered, and in the answer's id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.client import ask, get, official_client, post
from tests.server.failing_engine import FailingEngine, RunningServer, serving

NAMES = ("maker/a-model", "short", "a/b/c")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}]}
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "abc"}, "cmpl-"),
    ("/v1/chat/completions", CHAT, "chatcmpl-"),
    ("/v1/responses", {"input": "abc"}, "resp_"),
    ("/v1/messages", {**CHAT, "max_tokens": 3}, "msg_"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(lambda _: FailingEngine(step_s=0.01), model_names=NAMES) as running:
        yield running


@pytest.mark.parametrize(("path", "body", "prefix"), CALLS)
def test_an_answer_is_named_after_its_request(
    server: RunningServer, path: str, body: dict[str, Any], prefix: str
) -> None:
    headers = {"x-request-id": "trace-1/2:3"}
    whole = post(server.port, path, body, headers=headers)
    assert (whole.status, whole.headers["x-request-id"]) == (200, "trace-1/2:3")
    assert whole.json["id"] == f"{prefix}trace-1/2:3"
    stream = post(server.port, path, {**body, "stream": True}, headers=headers)
    assert stream.headers["x-request-id"] == "trace-1/2:3"
    assert f'"id":"{prefix}trace-1/2:3"'.encode() in stream.content
    made = post(server.port, path, body)
    assert made.json["id"] == prefix + made.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/completions", 400), ("POST", "/v1/responses", 400), ("POST", "/v1/messages", 400),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405), ("GET", "/v1/responses/resp_1", 404), ("GET", "/health", 200),
        ("GET", "/v1/models/nobody", 404),
    ],
)  # fmt: skip
def test_whatever_is_answered_has_the_id(server: RunningServer, method: str, path: str, status: int) -> None:
    answer = ask(server.port, method, path, {} if method == "POST" else None, headers={"x-request-id": "mine"})
    assert (answer.status, answer.headers["x-request-id"]) == (status, "mine")


@pytest.mark.parametrize("given", ["", "two words", "é".encode().decode("latin-1"), "x" * 129])
def test_what_is_no_id_is_replaced_by_one(server: RunningServer, given: str) -> None:
    answer = get(server.port, "/live", headers={"x-request-id": given})
    assert answer.headers["x-request-id"].startswith("req_")


def test_models_are_found_by_names_with_slashes(server: RunningServer) -> None:
    with official_client(server.port) as client:
        for name in NAMES:
            assert client.models.retrieve(name).id == name
    assert get(server.port, "/v1/models/maker%2Fa-model").json["id"] == "maker/a-model"
    assert get(server.port, "/v1/models/maker").status == 404
