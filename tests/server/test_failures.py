"""The server over an engine that fails, dawdles or is full."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from server.running.engine_thread import WorkerState
from ssd.errors import ModelError
from tests.server.client import get, post, wait_until
from tests.server.failing_engine import FailingEngine, RunningServer, serving
from tests.waiting import PATIENCE_S

COMPLETIONS = "/v1/completions"


def test_engine_crash_fails_running_requests_with_500_and_turns_health_to_503() -> None:
    engine = FailingEngine(fail_at_step=4)
    with serving(lambda _: engine) as server:
        answer = post(server.port, COMPLETIONS, {"prompt": "abcdef", "max_tokens": 6})
        assert (answer.status, answer.error["code"]) == (500, "engine_failed")
        assert answer.error["type"] == "server_error"
        assert get(server.port, "/health").status == 503
        assert get(server.port, "/live").status == 200
        assert post(server.port, COMPLETIONS, {"prompt": "abc"}).status == 500
        assert get(server.port, "/metrics").status == 200
    assert engine.closed


def test_engine_crash_ends_a_stream_with_an_error_event() -> None:
    with serving(lambda _: FailingEngine(fail_at_step=4)) as server:
        answer = post(server.port, COMPLETIONS, {"prompt": "abcdef", "max_tokens": 6, "stream": True})
    assert answer.status == 200
    *chunks, last = answer.events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "fed"
    assert last["error"]["code"] == "engine_failed"


def test_requests_before_the_engine_is_ready_are_told_to_retry() -> None:
    engine = FailingEngine()
    engine.warm_up_gate = threading.Event()
    with serving(lambda _: engine, wait=False) as server:
        assert get(server.port, "/live").status == 200
        health = get(server.port, "/health")
        assert (health.status, health.json, health.headers["retry-after"]) == (503, {"status": "loading"}, "1")
        answer = post(server.port, COMPLETIONS, {"prompt": "abc"})
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "not_ready", "1")
        assert get(server.port, "/v1/models").status == 503
        assert b"ssd:ready" in get(server.port, "/metrics").content
        engine.warm_up_gate.set()
        server.wait_until(WorkerState.READY)
        assert get(server.port, "/health").status == 200
        assert post(server.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 3}).json["choices"][0]["text"] == "cba"


def test_failure_to_load_is_kept_and_resources_are_closed() -> None:
    engine = FailingEngine()
    engine.load_error = ModelError("no such model")
    with serving(lambda _: engine, wait=False) as server:
        server.wait_until(WorkerState.FAILED)
        assert server.engine_thread.load_error is engine.load_error
        wait_until(lambda: engine.closed)


def test_full_queue_answers_503_with_retry_after_and_keeps_no_choice() -> None:
    with serving(lambda _: FailingEngine(step_s=0.01, max_waiting=3)) as server:
        answer = post(server.port, COMPLETIONS, {"prompt": "abc", "n": 4})
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "queue_full", "1")
        assert server.engine_thread.num_requests == 0
        wait_until(lambda: post(server.port, COMPLETIONS, {"prompt": "abc", "n": 3}).status == 200)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_slots(stream: bool) -> None:
    engine = FailingEngine(step_s=0.02)
    with serving(lambda _: engine) as server:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
            body = {"prompt": "abc", "max_tokens": 400, "n": 2, "stream": stream}
            connection.request("POST", COMPLETIONS, json.dumps(body))
            if stream:
                connection.getresponse().read(10)
            wait_until(lambda: engine.metrics.num_running == 2)
        wait_until(lambda: engine.metrics.num_running == 0)
        assert engine.num_cancelled == 2, "they were left to go on to their end"
        wait_until(lambda: server.engine_thread.num_requests == 0)


def test_silent_stream_gets_keep_alive_comments() -> None:
    with serving(lambda _: FailingEngine(step_s=0.3), keep_alive_s=0.1) as server:
        answer = post(server.port, COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "stream": True})
    assert answer.content.startswith(b": keep-alive\n\n")
    assert "".join(event["choices"][0]["text"] for event in answer.events) == "ba"


def test_drain_lets_short_requests_finish_and_ends_long_ones() -> None:
    engine = FailingEngine(step_s=0.02)
    with serving(lambda _: engine) as server, ThreadPoolExecutor(3) as pool:
        short = pool.submit(post, server.port, COMPLETIONS, {"prompt": "abcdef", "max_tokens": 20})
        long = pool.submit(post, server.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 400})
        streamed = pool.submit(post, server.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 400, "stream": True})
        wait_until(lambda: engine.metrics.num_running == 3)
        _drain(server, 1.0)
        assert short.result().status == 200
        assert (long.result().status, long.result().error["code"]) == (503, "not_ready")
        assert streamed.result().events[-1]["error"]["code"] == "not_ready"
        assert post(server.port, COMPLETIONS, {"prompt": "abc"}).status == 503


def _drain(server: RunningServer, grace_s: float) -> None:
    asyncio.run(server.engine_thread.drain(grace_s))
