"""redis-py's clients, with a bound for what a server answers. Needs redis-py, so only ``connect`` imports it.

Whoever can write to a Redis server decides how large the values are that others read from it, up to 512 MB each. A
reply names the size of everything before it comes, so a reply that is too large is given up before it takes memory.
The server itself, its sentinels and its cluster are the operator's, and are believed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import (
    ClusterDownError,
    InvalidResponse,
    ReadOnlyError,
    RedisClusterException,
    SlotNotCoveredError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.utils import SENTINEL

from ssd.sharing.stream import MAX_REPLY_BYTES, OversizedReplyError

_ELEMENT_BYTES = 64  # what an element takes in Python beside its own bytes, so that many small ones are bounded as well

_LONGEST_LINE = 1 << 16
"""Of an answer: what is longer is no number, no size and no error that a server writes."""

_PATIENCE_S = 5.0
_LEAST_BYTES_PER_S = 8192
"""Replies whose rest was waited for longer than _PATIENCE_S have to have come at this rate: a byte now and then would
never time out, and a new connection may be better."""


class BoundedBuffer(SocketBuffer):
    """redis-py's buffer with bounds: of a line, and of how slowly a reply may come."""

    _buffer: Any
    _num_reads = 0
    _num_bytes = 0
    _waited_s = 0.0

    def begin(self) -> None:
        """A reply is awaited."""
        if self._num_reads <= 1:  # the last one came at once
            self._num_bytes, self._waited_s = 0, 0.0
        self._num_reads = 0

    def readline(self, timeout: float | object = SENTINEL) -> bytes:
        """Up to the next end of a line, which is left out."""
        line: bytes = self._buffer.readline(_LONGEST_LINE)
        while not line.endswith(b"\r\n"):
            if len(line) >= _LONGEST_LINE:
                raise InvalidResponse(f"a line of more than {_LONGEST_LINE} bytes")
            self._read_from_socket(timeout=timeout)
            line += self._buffer.readline(_LONGEST_LINE - len(line))
        return line[:-2]

    def _read_from_socket(self, length: int | None = None, **settings: Any) -> bool:  # type: ignore[override]
        num_wanted = 1 if length is None else length
        while num_wanted > 0:
            num_before, began = self._buffer.getbuffer().nbytes, time.monotonic()
            if not super()._read_from_socket(**settings):
                return False
            num_read = self._buffer.getbuffer().nbytes - num_before
            num_wanted -= num_read
            self._num_bytes += num_read
            self._waited_s += time.monotonic() - began if self._num_reads else 0.0
            self._num_reads += 1
            if self._waited_s > _PATIENCE_S and self._num_bytes < self._waited_s * _LEAST_BYTES_PER_S:
                raise RedisTimeoutError(f"replies came at less than {_LEAST_BYTES_PER_S} bytes/s")
        return True


class BoundedParser(_RESP2Parser):
    """redis-py's parser of protocol 2 with a bound for each reply; raises OversizedReplyError.

    redis-py closes the connection when its parser raises, so the rest of the reply is never read. It is made to do so
    as well where a server says that it takes no writes any more: another one does, and a new connection may lead there.
    """

    _buffer: Any
    _sock: Any
    socket_read_size: int
    _room = 0
    _unfinished: list[list[Any]]

    def on_connect(self, connection: Any) -> None:
        """Called when the socket connects."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = BoundedBuffer(self._sock, self.socket_read_size, connection.socket_timeout)

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """One reply."""
        self._room = MAX_REPLY_BYTES
        if self._buffer is not None:
            self._buffer.begin()
        self._unfinished = []
        return super().read_response(*arguments, **settings)

    def _read_response(  # type: ignore[override]
        self, disable_decoding: bool = False, **settings: Any
    ) -> Any:
        """As bytes in any case: `connect` says that nothing is decoded."""
        line = self._buffer.readline(**settings)
        kind, text = line[:1], line[1:]
        self._room -= _ELEMENT_BYTES + len(text)
        if kind == b"$" and text.isdigit():
            self._room -= int(text)
            if self._room < 0:
                raise OversizedReplyError(self._unfinished)
            return self._buffer.read(int(text), **settings)
        if self._room < 0:
            raise OversizedReplyError(self._unfinished)
        if kind == b"*" and text.isdigit():
            return self._read_array(int(text), settings)
        if kind == b"-":
            error = self.parse_error(text.decode("utf-8", errors="replace"))  # type: ignore[no-untyped-call]
            if isinstance(error, RedisConnectionError):
                raise error
            if isinstance(error, ReadOnlyError):
                raise RedisConnectionError(f"READONLY: {error}")
            return error
        if kind == b":":
            return int(text)
        if kind in (b"$", b"*") and text == b"-1":
            return None
        if kind != b"+":
            raise InvalidResponse(f"Protocol Error: {line[:80]!r}")
        return text

    def _read_array(self, num_elements: int, settings: dict[str, Any]) -> list[Any]:
        elements: list[Any] = []
        self._unfinished.append(elements)
        for _ in range(num_elements):
            elements.append(self._read_response(**settings))
        self._unfinished.pop()
        return elements


def sentinel_client(
    hosts: tuple[tuple[str, int], ...], service: str, sentinel_options: dict[str, Any], options: dict[str, Any]
) -> redis.Redis:
    """A client of the master of ``service``. Nothing is sent yet."""
    is_plain = options.pop("connection_class", None) is None
    sentinels = Sentinel([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = [
        redis.Redis.from_pool(redis.ConnectionPool(**sentinel_options | {"host": host, "port": port}))
        for host, port in hosts
    ]
    managed = SentinelManagedConnection if is_plain else SentinelManagedSSLConnection
    return sentinels.master_for(service, connection_class=managed, **options)  # type: ignore[no-any-return, no-untyped-call]


class Cluster(RedisCluster):
    """redis-py's, but that nothing is sent before the first command. Transactions are of keys with one hash tag."""

    def __init__(self, hosts: tuple[tuple[str, int], ...], options: dict[str, Any]) -> None:
        """``hosts`` : some nodes. ``options`` : of a connection to any of them. redis-py's part is made when asked."""
        self._hosts = hosts
        self._options = options
        self._opening = threading.RLock()
        self._is_open = False

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """What the node of the command's key answers."""
        with self._opened():
            return super().execute_command(*args, **kwargs)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool | None = None, shard_hint: Any = None) -> Any:
        """As of redis-py."""
        with self._opened():
            return super().pipeline(transaction, shard_hint)  # type: ignore[no-untyped-call]

    def ping(self, **kwargs: Any) -> Any:
        """Whether one of the nodes answers: what is lost of the others shows in what is asked of them."""
        return self.execute_command("PING", target_nodes=self.RANDOM)

    def masters(self) -> list[tuple[str, redis.Redis]]:
        """A client for each node that serves slots, by its address, to be asked and not closed."""
        with self._opened():
            nodes = sorted(self.get_primaries(), key=lambda node: node.name)  # type: ignore[no-untyped-call]
            return [(node.name, self.get_redis_connection(node)) for node in nodes]

    def node_of(self, key: str) -> redis.Redis:
        """A client of the node that serves ``key`` now, not to be closed."""
        with self._opened():
            return self.get_redis_connection(self.nodes_manager.get_node_from_slot(key_slot(key.encode())))

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """redis-py's part is made, and raises what it does of one server."""
        try:
            with self._opening:
                if not self._is_open:
                    self._open()
            yield
        except SlotNotCoveredError as error:
            raise ClusterDownError(str(error)) from None
        except RedisClusterException as error:  # none of the nodes it knows answers: the next command asks the first
            self._is_open = False
            raise RedisConnectionError(str(error)) from None

    def _open(self) -> None:
        (host, port), *others = self._hosts
        self._is_open = True  # it asks for the server's commands while it is made
        try:
            super().__init__(
                url=f"redis://[{host}]:{port}" if ":" in host else f"redis://{host}:{port}",
                startup_nodes=[ClusterNode(*other) for other in others],  # type: ignore[no-untyped-call]
                connection_pool_class=lambda **node: redis.ConnectionPool(**node | self._options),
                retry=Retry(NoBackoff(), 0),
                require_full_coverage=False,
                protocol=2,
            )
        except BaseException:
            self._is_open = False
            raise
