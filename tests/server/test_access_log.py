"""One line a request, and what the counts say of it."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.observe.logs import JsonFormatter, QueuedLogHandler
from server.running.engine_thread import WorkerState
from tests.server.client import ask, get, metric, post, wait_until
from tests.server.conftest import Log, logging_to
from tests.server.failing_engine import FailingEngine, RunningServer, serving

KEY = "sk-very-secret-key"
AUTHORISED = {"authorization": f"Bearer {KEY}"}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def server(log: Log) -> Iterator[RunningServer]:
    with serving(lambda _: FailingEngine(step_s=0.002), api_keys=(KEY,)) as running:
        yield running


def send(server: RunningServer, request_id: str, body: Any, *, path: str = "/v1/completions", **headers: str) -> int:
    return ask(server.port, "POST", path, body, headers={**AUTHORISED, "x-request-id": request_id, **headers}).status


def test_the_line_of_a_request_holds_its_counts_and_times(server: RunningServer, log: Log) -> None:
    status = send(server, "plain-1", {"prompt": "abcdef", "max_tokens": 4, "n": 2})
    line = log.of("plain-1")
    assert status == line["status"] == 200
    assert (line["method"], line["path"], line["message"]) == ("POST", "/v1/completions", "request")
    assert (line["prompt_tokens"], line["output_tokens"], line["choices"]) == (6, 8, 2)
    assert (line["finish_reasons"], line["model"], line["stream"]) == (["length"], "test-model", False)
    assert line["total_s"] > 0 and "reason" not in line and "disconnected" not in line
    assert line["response_id"].startswith("cmpl-")
    assert line["tenant"] and KEY not in line["tenant"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_said_to_have_left(server: RunningServer, log: Log, stream: bool) -> None:
    name = f"gone-{stream}"
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        body = json.dumps({"prompt": "x" * 300, "max_tokens": 200, "stream": stream})
        connection.request("POST", "/v1/completions", body, {**AUTHORISED, "x-request-id": name})
        if stream:
            connection.getresponse().read(10)
        else:
            wait_until(lambda: server.engine_thread.num_requests > 0)
    line = log.of(name)
    assert line["disconnected"] is True
    assert line["status"] == (200 if stream else 499)
    assert line["output_tokens"] < 200 and "finish_reasons" not in line


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "reason"),
    [
        ("/v1/completions", {"prompt": "a", "n": 0}, {}, 400, "invalid"),
        ("/v1/completions", {"prompt": "a" * 600}, {}, 400, "too_long"),
        ("/v1/completions", {"prompt": "a", "model": "who"}, {}, 404, "not_found"),
        ("/nothing/here", {}, {}, 404, "not_found"),
        ("/v1/models", {}, {}, 405, "method"),
        ("/v1/completions", {"prompt": "a"}, {"authorization": "Bearer wrong"}, 401, "auth"),
    ],
)
def test_refused_requests_say_why_and_are_counted(
    server: RunningServer, log: Log, path: str, body: Any, headers: dict[str, str], status: int, reason: str
) -> None:
    name = f"refused-{status}-{reason}-{len(path)}"
    before = metric(server.port, "ssd:requests_rejected_total", reason=reason)
    assert send(server, name, body, path=path, **headers) == status
    line = log.of(name)
    assert (line["status"], line["reason"]) == (status, reason)
    assert line["path"] in ("/v1/completions", "/v1/models", "other")
    assert metric(server.port, "ssd:requests_rejected_total", reason=reason) == before + 1
    assert line.get("param") == {"invalid": "n"}.get(reason, "model" if "model" in body else line.get("param"))
    assert "path_prefix" not in line


def test_a_line_holds_no_field_and_no_path_that_may_be_a_text(server: RunningServer, log: Log) -> None:
    for field, named in (("my_secret", "other"), ("repeat_penalty", "repeat_penalty"), ("stop", "stop")):
        assert send(server, f"field-{field}", {"prompt": "a", field: {"my_secret": 1}}) == 400
        assert log.of(f"field-{field}")["param"] == named
    for path, begins in (("/v1/secret", None), ("/v1/embeddings/secret", "/v1/embeddings"), ("/filessecret", None)):
        assert send(server, f"path-{path}", {}, path=path) == 404
        assert log.of(f"path-{path}").get("path_prefix") == begins


def test_the_trace_of_a_client_is_in_the_line(server: RunningServer, log: Log) -> None:
    send(server, "traced", {"prompt": "abc", "max_tokens": 1}, traceparent=f"00-{TRACE}-{PARENT}-01")
    line = log.of("traced")
    assert (line["trace_id"], line["span_id"]) == (TRACE, PARENT)
    send(server, "untraced", {"prompt": "abc", "max_tokens": 1}, traceparent=f"00-{'0' * 32}-{PARENT}-01")
    assert "trace_id" not in log.of("untraced")


def test_probes_leave_no_line_at_the_usual_level(log: Log) -> None:
    with serving(lambda _: FailingEngine(), wait=False) as starting:
        get(starting.port, "/health", headers={"x-request-id": "probe-while-loading"})
        starting.wait_until(WorkerState.READY)
        for path in ("/live", "/health", "/metrics", "/ui/stats"):
            assert get(starting.port, path, headers={"x-request-id": f"probe{path}"}).status == 200
        post(starting.port, "/v1/completions", {"prompt": "a"}, headers={"x-request-id": "after-probes"})
        log.of("after-probes")
        assert not any(str(line.get("request_id")).startswith("probe") for line in log.lines)


def test_no_lines_where_nobody_wants_them(log: Log) -> None:
    with serving(lambda _: FailingEngine(), no_access_log=True) as quiet:
        before = len(log.lines)
        assert post(quiet.port, "/v1/completions", {"prompt": "a"}).status == 200
        assert len(log.lines) == before
        assert "http_requests_total{" in get(quiet.port, "/metrics").content.decode()


@given(secret=st.text(min_size=6, max_size=40), where=st.integers(0, 8))
def test_neither_log_nor_metrics_hold_what_a_client_wrote(
    server: RunningServer, log: Log, secret: str, where: int
) -> None:
    """Whatever it is and wherever it stands: text, salt, key, model, path, query, names of fields and headers."""
    marked = f"MARK{secret}KRAM"
    in_path = "MARK" + "".join(f"%{byte:02x}" for byte in secret.encode("utf-8", "replace"))
    in_header = "MARK" + "".join(c for c in secret if " " <= c < "\x7f") + "KRAM"
    usual = "/v1/completions"
    places: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        (usual, {"prompt": marked}, {}),
        (usual, {"cache_salt": marked}, {}),
        (usual, {"model": marked}, {}),
        (usual, {marked: marked}, {}),
        (usual, {"user": marked, "stop": [marked], "metadata": {"a": marked}, "temperature": marked}, {}),
        (f"/{in_path}", {}, {}),
        (f"{usual}?q={in_path}", {}, {}),
        (usual, {}, {"authorization": f"Bearer {in_header}"}),
        (usual, {}, {"traceparent": in_header, "x-request-id": f"{in_header} with a space", "tracestate": in_header}),
    ]
    path, fields, more = places[where]
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 1, **fields}
    answer = ask(server.port, "POST", path, body, headers={**AUTHORISED, **more})
    assert answer.status in (200, 400, 401, 404)
    metrics = get(server.port, "/metrics").content.decode()
    for told in (log.text, metrics):
        assert "MARK" not in told and KEY not in told


def test_a_log_that_is_not_read_costs_lines_and_no_time() -> None:
    class Stuck(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.setFormatter(JsonFormatter())
            self.may_go, self.written = threading.Event(), list[str]()

        def emit(self, record: logging.LogRecord) -> None:
            self.may_go.wait()
            self.written.append(self.format(record))

    stuck = Stuck()
    handler = QueuedLogHandler(stuck, most_waiting=10)
    for number in range(50):
        handler.handle(logging.LogRecord("server", logging.INFO, "", 0, "line %d", (number,), None))
    assert 38 <= handler.num_dropped <= 40
    stuck.may_go.set()
    handler.flush()
    handler.close()
    assert any("log lines were dropped" in line for line in stuck.written)


def test_a_traceback_shows_code_and_no_values() -> None:
    with logging_to() as log:
        try:
            try:
                int("what a user wrote")
            except ValueError as error:
                raise RuntimeError("the pass failed") from error
        except RuntimeError:
            logging.getLogger("server").exception("unforeseen")
        (line,) = log.lines
    assert "what a user wrote" not in line["exception"].replace('int("what a user wrote")', "")
    assert "ValueError" in line["exception"] and "RuntimeError: the pass failed" in line["exception"]
    assert line["level"] == "error" and line["message"] == "unforeseen"
