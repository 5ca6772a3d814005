"""Clients that are slow, silent or many, on real sockets: they are given up, and nobody else notices."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.reliability.soak import main as soak
from server.base.limits import Limits
from tests.server.client import get, post, wait_until
from tests.server.failing_engine import FailingEngine, RunningServer, serving

COMPLETIONS = "/v1/completions"
LIMITS = Limits(
    max_head_seconds=1, max_body_seconds=1, max_idle_seconds=1.5, max_send_seconds=1, min_bytes_per_second=4096
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(lambda _: FailingEngine(step_s=0.001), limits=LIMITS) as running:
        yield running


def connect(server: RunningServer, *, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    return connection


def request(body: bytes, num_bytes: int | None = None, *, headers: bytes = b"") -> bytes:
    """A completion's head, with the beginning of a body of so many bytes; else with all of it."""
    length = len(body) if num_bytes is None else num_bytes
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + headers
    return head + b"content-length: %d\r\n\r\n" % length + body


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the server closes; fails where it does not within 20 s."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def drip(connection: socket.socket, content: bytes, pause_s: float) -> bytes:
    """Send byte by byte until the server has enough of it; returns what it says."""
    try:
        for byte in content:
            connection.sendall(bytes([byte]))
            time.sleep(pause_s)
    except OSError:
        pass
    return until_closed(connection)


def test_a_head_that_drips_is_answered_408(server: RunningServer) -> None:
    with connect(server) as connection:
        said = drip(connection, b"GET /live HTTP/1.1\r\n" + b"x-a: b\r\n" * 100, 0.05)
    assert said.startswith(b"HTTP/1.1 408 ")


def flood(connection: socket.socket) -> bytes:
    """Send 400 KB without an end of line, or until the server has enough of it; returns what it says."""
    try:
        for _ in range(100):
            connection.sendall(b"x" * 4096)
            time.sleep(0.001)
    except OSError:
        return until_closed(connection)
    raise AssertionError("all of it was taken")


def test_a_head_without_end_is_refused(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nx-long: ")
        assert flood(connection)[:12] in (b"HTTP/1.1 431", b"")


def test_a_head_without_end_behind_a_body_that_was_answered_already_is_refused(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"xGET /live HTTP/1.1\r\nx-long: ")
        flood(connection)


def test_trailers_without_end_are_refused(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-long: "
        )
        flood(connection)


def test_a_head_without_end_during_an_answer_ends_both() -> None:
    engine = FailingEngine(step_s=0.05)
    body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": True}).encode()  # 20 s of work
    with serving(lambda _: engine, limits=LIMITS) as server, connect(server) as connection:
        connection.sendall(request(body))
        wait_until(lambda: engine.metrics.num_running == 1)
        connection.sendall(b"GET /live HTTP/1.1\r\nx-long: ")
        assert b" 431 " not in flood(connection)
        wait_until(lambda: engine.num_cancelled == 1)


def test_connections_that_say_nothing_are_closed(server: RunningServer) -> None:
    with connect(server) as connection:
        assert until_closed(connection) == b""


def test_a_body_that_stalls_or_drips_is_given_up(server: RunningServer) -> None:
    with connect(server) as stalled, connect(server) as dripping:
        stalled.sendall(request(b'{"prompt": "a', 1000))
        said = drip(dripping, request(b" " * 900, 1000), 0.01)
        assert said.startswith(b"HTTP/1.1 408 ") and b"connection: close" in said
        assert until_closed(stalled).startswith(b"HTTP/1.1 408 ")


def test_a_slow_honest_uplink_is_waited_for(server: RunningServer) -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 2}).encode() + b" " * 90_000
    with connect(server) as connection:
        started = time.monotonic()
        connection.sendall(request(b"", len(body), headers=b"connection: close\r\n"))
        for begin in range(0, len(body), 4000):
            connection.sendall(body[begin : begin + 4000])
            time.sleep(0.1)
        assert time.monotonic() - started > 2 * LIMITS.max_body_seconds
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


def test_the_rest_of_a_body_that_was_answered_already_is_not_waited_for(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n")
        said = drip(connection, b" " * 400, 0.02)
    assert said.startswith(b"HTTP/1.1 404 ")


def test_a_connection_that_idles_after_a_late_body_is_told_nothing(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"12345")
        assert b" 408 " not in until_closed(connection)


def test_requests_sent_ahead_are_answered_and_no_more_than_some_may_wait(server: RunningServer) -> None:
    ask = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(5 * ask)
        found = b""
        while found.count(b"HTTP/1.1 200 ") < 5:
            piece = connection.recv(1 << 16)
            assert piece, found
            found += piece
    with connect(server) as connection:
        connection.sendall(1000 * ask)
        assert until_closed(connection).count(b"HTTP/1.1 200 ") < 20


def test_the_work_of_a_client_that_asked_ahead_ends_when_it_leaves() -> None:
    engine = FailingEngine(step_s=0.05)
    body = json.dumps({"prompt": "a", "max_tokens": 400}).encode()
    with serving(lambda _: engine, limits=LIMITS) as server:
        with connect(server) as connection:
            connection.sendall(request(body))
            wait_until(lambda: engine.metrics.num_running == 1)
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            time.sleep(0.2)  # it has come
        wait_until(lambda: engine.num_cancelled == 1)


def test_a_client_that_does_not_read_its_stream_is_given_up_and_its_work_ends() -> None:
    engine = FailingEngine(step_s=0.05)
    body = json.dumps({"prompt": "a", "max_tokens": 400, "n": 40, "stream": True}).encode()  # 20 s of work
    with serving(lambda _: engine, limits=LIMITS) as server, connect(server, receive_bytes=4096) as connection:
        connection.sendall(request(body))
        wait_until(lambda: engine.metrics.num_running == 40)
        assert post(server.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 5}).status == 200  # nobody else waits
        wait_until(lambda: engine.metrics.num_running == 0)
        assert engine.num_cancelled == 40, "they were left to go on to their end"
        wait_until(lambda: not server.has_connections)


def test_a_client_that_does_not_read_a_whole_answer_is_given_up(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a" * 300, "max_tokens": 200, "n": 100, "echo": True}).encode()
    with connect(server, receive_bytes=4096) as connection:
        connection.sendall(request(body))
        wait_until(lambda: server.engine_thread.num_requests == 100)
        wait_until(lambda: server.engine_thread.num_requests == 0)
        wait_until(lambda: not server.has_connections)


def test_a_slow_reader_that_reads_gets_all(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 200, "n": 10, "stream": True}).encode()
    with connect(server, receive_bytes=4096) as connection:
        connection.sendall(request(body, headers=b"connection: close\r\n"))
        found = b""
        started = time.monotonic()
        while piece := connection.recv(10_000):
            found += piece
            time.sleep(0.03)
        assert time.monotonic() - started > 2 * LIMITS.max_send_seconds
    assert b"data: [DONE]" in found


def test_many_slow_clients_keep_nobody_waiting(server: RunningServer) -> None:
    """Slowloris: heads and bodies without end on 300 connections, beside a client that works."""
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(300)]
        for number, connection in enumerate(slow):
            body = b"content-length: 99\r\n\r\n{" if number % 2 else b""
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + body)
        for _ in range(20):
            started = time.monotonic()
            assert post(server.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 5}).status == 200
            assert time.monotonic() - started < 5
        assert all(until_closed(connection).startswith(b"HTTP/1.1 408 ") for connection in slow)
    wait_until(lambda: not server.has_connections)


def test_connections_beyond_the_limit_are_answered_503_but_not_to_supervisors() -> None:
    with serving(lambda _: FailingEngine(), limits=Limits(max_connections=3)) as server, ExitStack() as stack:
        held = [stack.enter_context(connect(server)) for _ in range(3)]
        for connection in held:
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        refused = post(server.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 5})
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "queue_full", "1")
        assert refused.headers["connection"] == "close" and refused.headers["x-request-id"]
        assert get(server.port, "/live").status == get(server.port, "/health").status == 200
        with connect(server) as beyond:  # keeps no place of those that others are told on
            beyond.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            said = until_closed(beyond)
            assert said.startswith(b"HTTP/1.1 200 ") and b"connection: close" in said
        held[0].close()
        wait_until(lambda: post(server.port, COMPLETIONS, {"prompt": "abc", "max_tokens": 5}).status == 200)


# -- the benchmarks at a smaller size ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_answer_is_right_under_random_cancels() -> None:
    # Memory is still growing so early; all else is judged.
    status = soak(
        ["--seconds", "12", "--clients", "16", "--questions", "45", "--max-tokens", "16", "--most-growth", "9"]
    )
    assert status == 0
