"""The server over an engine that fails, dawdles or is full."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.base.errors import ServerNotReady
from server.running.engine_thread import Inbox, Worker, WorkerState
from ssd.config import SamplingParams
from ssd.engine import Request
from ssd.errors import ModelError, StoreUnavailable
from tests.server.client import get, post, wait_until
from tests.server.failing_engine import FailingEngine, serving

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


def test_a_request_that_comes_while_all_are_ended_is_refused_and_not_left_waiting() -> None:
    async def submit_late(worker: Worker) -> None:
        request = Request(request_id="late", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=1))
        with worker._lock:  # held between what the other thread looks at and what it adds
            late = asyncio.create_task(asyncio.to_thread(worker.submit, request, Inbox()))
            await asyncio.sleep(0.1)
            await worker.drain(grace_s=0)
        with pytest.raises(ServerNotReady):
            await late
        assert worker.num_requests == 0

    with serving(lambda _: FailingEngine()) as server:
        asyncio.run(submit_late(server.engine_thread))


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


@pytest.mark.parametrize("kind", [StoreUnavailable, RuntimeError])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_nobody_foresaw_is_in_the_log_and_not_in_the_answer(
    kind: type[Exception], is_streamed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Request) -> None:
        raise kind(why)

    engine, why = FailingEngine(), "what only the log may say"
    monkeypatch.setattr(engine, "submit", refuse)
    with serving(lambda _: engine) as server:
        answer = post(server.port, COMPLETIONS, {"prompt": "abc", "stream": is_streamed})
    assert (answer.status, answer.error["message"]) == (500, "internal error; see the server's log")
    assert caplog.text.count(why) == 1


def test_full_queue_answers_503_with_retry_after_and_keeps_no_choice() -> None:
    with serving(lambda _: FailingEngine(step_s=0.01, max_waiting=3)) as server:
        answer = post(server.port, COMPLETIONS, {"prompt": "abc", "n": 4})
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "queue_full", "1")
        assert server.engine_thread.num_requests == 0
        wait_until(lambda: post(server.port, COMPLETIONS, {"prompt": "abc", "n": 3}).status == 200)
