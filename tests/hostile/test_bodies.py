"""Bodies that cost more to take apart than to send: nobody else waits for them, with a key or without."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace

import pytest

from server.admission.connections import GuardedProtocol
from server.base.limits import Limits
from tests.hostile.test_attacks import LONGEST_WAIT_S, MOST_GROWTH_MB, SMALL, Witness, resident_mb
from tests.server import test_network
from tests.server.client import until_ready
from tests.server.failing_engine import FailingEngine, RunningServer, serving
from tests.server.test_connections import connect, until_closed
from tests.server.test_network import network, trusting
from tests.server.test_process import running
from tests.waiting import PATIENCE_S

files = test_network.files
"""The fixture: certificates."""
FLOOD_S = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, int]]:
    """Process id and port."""
    with running(*SMALL, "--api-key", "secret") as (process, port):
        until_ready(port, process)
        yield process.pid, port


def chunks(content: bytes, size: int, extension: bytes = b"") -> bytes:
    """A body in chunks of so many bytes each, without its end."""
    pieces = (content[begin : begin + size] for begin in range(0, len(content), size))
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)


def head(*headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode()


def flood(port: int, first: bytes, again: bytes) -> int:
    """Send for some seconds, on a new connection whenever the server closes one; returns the bytes that were taken."""
    ends, num_bytes = time.monotonic() + FLOOD_S, 0
    while time.monotonic() < ends:
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) as connection:
            connection.sendall(first)
            while time.monotonic() < ends:
                num_bytes += connection.send(again)
    return num_bytes


ONES = chunks(b" " * 40_000, 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [16, 64])
@pytest.mark.parametrize(
    ("first", "again"),
    [
        (head(), ONES),
        (head("authorization: Bearer secret"), ONES),
        (head("authorization: Bearer secret"), chunks(b" " * 40_000, 66)),
        (b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 12_000, b"\r\n"),
    ],
    ids=["bytes without a key", "bytes with a key", "small chunks with a key", "headers"],
)
def test_a_flood_of_small_pieces_keeps_nobody_waiting(
    server: tuple[int, int], first: bytes, again: bytes, num_clients: int
) -> None:
    process, port = server
    before = resident_mb(process)
    with Witness(process, port) as witness, ThreadPoolExecutor(num_clients) as clients:
        taken = sum(clients.map(lambda _: flood(port, first, again), range(num_clients)))
        time.sleep(0.2)
    waits = ", ".join(f"{name} {1000 * wait:.0f} ms" for name, wait in witness.longest.items())
    print(f"\n{num_clients} clients, {taken / FLOOD_S / 1e6:.0f} MB/s: others waited {waits}")
    assert max(witness.longest.values()) < LONGEST_WAIT_S
    assert resident_mb(process) - before < MOST_GROWTH_MB


@pytest.fixture(scope="module")
def closed() -> Iterator[RunningServer]:
    """A server with a key, whose bodies may have 100 kB."""
    limits = Limits(max_body_bytes=100_000)
    with serving(lambda _: FailingEngine(), api_keys=("secret",), limits=limits) as running:
        yield running


BODY = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
WITH_KEY = head("authorization: Bearer secret")


def answer_to(server: RunningServer, content: bytes) -> tuple[bytes, bytes]:
    """The head and the body of the answer, after which the server closes. All is sent before anything is read."""
    with connect(server) as connection:
        connection.sendall(content)
        found = until_closed(connection)
    assert found.count(b"HTTP/1.1 ") == 1, found
    status, _, rest = found.partition(b"\r\n\r\n")
    return status, rest


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (WITH_KEY + chunks(b" " * 20_000, 1), 400, "body_chunks_too_small"),
        (WITH_KEY + chunks(b" " * 2000, 1), 400, "body_chunks_too_small"),
        (WITH_KEY + chunks(b" " * 1025, 1) + b"0\r\n\r\n", 400, "body_chunks_too_small"),
        (WITH_KEY + chunks(b" " * 90_000, 50), 400, "body_chunks_too_small"),
        (WITH_KEY + chunks(b" " * 5000, 100, b";x=" + b"y" * 4000), 413, "body_too_long"),
        (WITH_KEY + chunks(b" " * 120_000, 1000), 413, "body_too_long"),
        (head() + chunks(b" " * 20_000, 1), 401, "invalid_api_key"),
        (head() + chunks(b" " * 900_000, 1000), 401, "invalid_api_key"),
    ],
    ids=["bytes", "2,000", "1,025 and the end", "of 50", "extensions", "too long", "no key", "long, no key"],
)
def test_a_body_in_chunks_is_refused_and_nothing_behind_it_is_parsed(
    closed: RunningServer, content: bytes, status: int, code: str
) -> None:
    told, error = answer_to(closed, content + b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in told
    assert json.loads(error)["error"]["code"] == code


def test_a_refused_body_is_not_parsed_to_its_end(closed: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    on_body = GuardedProtocol.on_body
    monkeypatch.setattr(
        GuardedProtocol, "on_body", lambda self, body: (sizes.append(len(body)), on_body(self, body))[1]
    )
    for first in (WITH_KEY, head()):
        sizes.clear()
        answer_to(closed, first + chunks(b" " * 500_000, 1))
        assert len(sizes) < 2048
    for first in (WITH_KEY, head()):
        sizes.clear()
        answer_to(closed, first + chunks(b" " * 2_000_000, 1000))
        assert sum(sizes) < 400_000


def test_up_to_a_thousand_small_chunks_are_one_body_and_the_connection_goes_on(closed: RunningServer) -> None:
    ask = WITH_KEY + chunks(BODY + b" " * 900, 1) + b"0\r\n\r\n"
    with connect(closed) as connection:
        for _ in range(2):
            connection.sendall(ask)
            found = b""
            while b"cached_tokens" not in found:
                found += connection.recv(1 << 16)
            assert found.startswith(b"HTTP/1.1 200 ") and b"connection: close" not in found
        connection.sendall(ask * 3 + b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert until_closed(connection).count(b"HTTP/1.1 200 ") == 4


@pytest.mark.parametrize("size", [None, 97, 1000, 70_000])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_bodies_of_many_slices_arrive_whole_and_in_order(
    is_encrypted: bool, size: int | None, files: SimpleNamespace
) -> None:
    """Two requests on each of several connections at once. ``size`` : of chunks; None sends the length instead."""
    engine = FailingEngine()
    engine.max_model_len = 1 << 20
    text = "".join(chr(ord("a") + number * number % 23) for number in range(400_000))
    body = json.dumps({"prompt": text}).encode()
    ask = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    if size is None:
        rest = b"content-length: %d\r\n\r\n%b" % (len(body), body)
    else:
        rest = b"transfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % chunks(body, size)
    tokens = json.dumps([ord(character) for character in text], separators=(",", ":")).encode()
    options = network("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key))

    def ask_twice(port: int) -> bytes:
        with ExitStack() as opened:
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            if is_encrypted:
                connection = opened.enter_context(trusting(files).wrap_socket(connection, server_hostname="localhost"))
            connection.sendall(ask + rest + ask + b"connection: close\r\n" + rest)
            return until_closed(connection)

    with serving(lambda _: engine, network=options if is_encrypted else None) as server, ThreadPoolExecutor(4) as pool:
        for answers in pool.map(ask_twice, [server.port] * 4):
            assert answers.count(b"HTTP/1.1 200 ") == answers.count(tokens) == 2
