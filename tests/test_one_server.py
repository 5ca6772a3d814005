"""The client of one server: a connection that is kept unless something happened to it, and the bytes that it sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import Connection

from ssd.sharing.clients import _packed
from ssd.sharing.connection import connect
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]  # the fixture

_WORDS = st.one_of(st.binary(max_size=9), st.text(max_size=5), st.integers(-(1 << 70), 1 << 70), st.floats(0, 1))


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with closing(connect(redis_server.url)) as client:
        yield client


@given(st.sampled_from(["XADD", b"GET", "CONFIG SET"]), st.lists(_WORDS, max_size=5))
def test_a_command_is_written_as_redis_py_writes_it(name: str | bytes, words: list[Any]) -> None:
    packed = _packed((name, *words))
    if packed is None:
        assert name == "CONFIG SET" or any(isinstance(word, float) for word in words)
    else:
        assert packed == b"".join(Connection().pack_command(name, *words))


def test_one_connection_serves_commands_pipelines_and_refusals(client: Any) -> None:
    number = client.client_id()
    assert client.set("a", 1) and client.get("a") == b"1"
    with pytest.raises(redis.ResponseError):
        client.xadd("a", {"e": "1"})
    assert client.pipeline().incr("a").client_id().execute() == [2, number]
    assert client.client_id() == number


def test_a_connection_that_the_server_ended_is_replaced_before_it_is_used(
    client: Any, redis_server: RedisServer
) -> None:
    number = client.client_id()
    with closing(connect(redis_server.url)) as other:
        other.client_kill_filter(_id=number)
    assert client.client_id() != number
    redis_server.kill()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    redis_server.start()
    assert client.ping()


def test_threads_have_a_connection_each_while_they_wait(client: Any, redis_server: RedisServer) -> None:
    client.ping()
    waiting = threading.Thread(target=client.blpop, args=(["queue"],))
    waiting.start()
    with closing(connect(redis_server.url)) as other:
        while other.info("clients")["blocked_clients"] == 0:
            pass
    assert client.rpush("queue", "x") == 1
    waiting.join()
    assert client.get("a") is None


def test_what_was_not_asked_for_is_no_answer() -> None:
    """A server that sends a reply too many: the connection is given up before the next command."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def serve() -> None:
            for extra in (b":2\r\n", b""):
                peer, _ = listening.accept()
                with peer:
                    while (asked := peer.recv(1 << 16)) and b"DBSIZE" not in asked:
                        peer.sendall(b"+OK\r\n" * asked.count(b"*"))
                    peer.sendall((b":1\r\n" if extra else b":3\r\n") + extra)
                    while extra and peer.recv(1 << 16):
                        pass

        server = threading.Thread(target=serve)
        server.start()
        with closing(connect(f"redis://127.0.0.1:{port}/0")) as client:
            assert client.dbsize() == 1
            assert client.dbsize() == 3
        server.join()
