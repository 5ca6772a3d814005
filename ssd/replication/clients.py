"""redis-py clients that bound the size of replies. Only ``connect`` imports this module, because redis-py is optional.

Anyone who can write to a Redis server chooses the size of the values that other clients read, up to 512 MB each. A
reply states the size of each element in advance, so that a reply that is too large is aborted before it takes memory.
The server, its sentinels and its cluster belong to the operator and are trusted.
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

from ssd.replication.redis_stream import MAX_REPLY_BYTES, OversizedReplyError

_ELEMENT_BYTES = 64  # Python's overhead per element, so that many small elements are bounded as well

_MAX_LINE_BYTES = 1 << 16  # longer than any number, size or error of a real server

_PATIENCE_S = 5.0
_MIN_BYTES_PER_S = 8192
"""The minimum rate of a Redis reply in bytes per second. After ``_PATIENCE_S`` seconds, a slower reply is aborted.

The socket's time-out starts again with each read, so a reply that arrives byte by byte would never time out.
"""


class BoundedBuffer(SocketBuffer):
    """redis-py's socket buffer, which also aborts a Redis reply whose lines are too long or that arrives too slowly."""

    _buffer: Any
    _num_reads = 0
    _num_bytes = 0
    _waited_s = 0.0

    def start_reply(self) -> None:
        """Restart the measurement of a reply's size and duration, because a new Redis reply begins."""
        if self._num_reads <= 1:  # the last reply arrived in one read
            self._num_bytes, self._waited_s = 0, 0.0
        self._num_reads = 0

    def readline(self, timeout: float | object = SENTINEL) -> bytes:
        """Return the next line of a Redis reply without its line end; raise InvalidResponse if the line is too long."""
        line: bytes = self._buffer.readline(_MAX_LINE_BYTES)
        while not line.endswith(b"\r\n"):
            if len(line) >= _MAX_LINE_BYTES:
                raise InvalidResponse(f"a line of more than {_MAX_LINE_BYTES} bytes")
            self._read_from_socket(timeout=timeout)
            line += self._buffer.readline(_MAX_LINE_BYTES - len(line))
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
            if self._waited_s > _PATIENCE_S and self._num_bytes < self._waited_s * _MIN_BYTES_PER_S:
                raise RedisTimeoutError(f"Redis replied at less than {_MIN_BYTES_PER_S} bytes/s")
        return True


class BoundedParser(_RESP2Parser):
    """redis-py's parser of the RESP2 protocol, which raises OversizedReplyError if a reply exceeds MAX_REPLY_BYTES.

    redis-py closes the connection if its parser raises an exception, so the rest of the reply is never read. If the
    server is read-only, the parser also raises an exception, because a new connection may lead to a server that accepts
    writes.
    """

    _buffer: Any
    _sock: Any
    socket_read_size: int
    _room = 0
    _unfinished: list[list[Any]]

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = BoundedBuffer(self._sock, self.socket_read_size, connection.socket_timeout)

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        self._room = MAX_REPLY_BYTES
        if self._buffer is not None:
            self._buffer.start_reply()
        self._unfinished = []
        return super().read_response(*arguments, **settings)

    def _read_response(  # type: ignore[override]
        self, disable_decoding: bool = False, **settings: Any
    ) -> Any:
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
    """Return a client for the master of the Redis Sentinel service ``service``; it connects at its first command."""
    is_plain = options.pop("connection_class", None) is None
    sentinels = Sentinel([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = [
        redis.Redis.from_pool(redis.ConnectionPool(**sentinel_options | {"host": host, "port": port}))
        for host, port in hosts
    ]
    managed = SentinelManagedConnection if is_plain else SentinelManagedSSLConnection
    return sentinels.master_for(service, connection_class=managed, **options)  # type: ignore[no-any-return, no-untyped-call]


class LazyCluster(RedisCluster):
    """redis-py's client of a Redis cluster, except that it connects only at its first command."""

    def __init__(self, hosts: tuple[tuple[str, int], ...], options: dict[str, Any]) -> None:
        """Create a client; ``hosts`` are some nodes of the cluster, ``options`` redis-py's options for every node."""
        self._hosts = hosts
        self._options = options
        self._opening = threading.RLock()
        self._is_open = False

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        with self._opened():
            return super().execute_command(*args, **kwargs)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool | None = None, shard_hint: Any = None) -> Any:
        with self._opened():
            return super().pipeline(transaction, shard_hint)  # type: ignore[no-untyped-call]

    def ping(self, **kwargs: Any) -> Any:
        """Ping a random node of the cluster. Later commands show whether other nodes are down."""
        return self.execute_command("PING", target_nodes=self.RANDOM)

    def masters(self) -> list[tuple[str, redis.Redis]]:
        """Return (address, client) of each primary node of the cluster. The caller must not close the clients."""
        with self._opened():
            nodes = sorted(self.get_primaries(), key=lambda node: node.name)  # type: ignore[no-untyped-call]
            return [(node.name, self.get_redis_connection(node)) for node in nodes]

    def node_for(self, key: str) -> redis.Redis:
        """Return a client of the cluster node that stores ``key`` at present. The caller must not close the client."""
        with self._opened():
            return self.get_redis_connection(self.nodes_manager.get_node_from_slot(key_slot(key.encode())))

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Connect to the cluster if necessary, and raise the same exceptions as a client of a single server."""
        try:
            with self._opening:
                if not self._is_open:
                    self._open()
            yield
        except SlotNotCoveredError as error:
            raise ClusterDownError(str(error)) from None
        except RedisClusterException as error:  # no known node answers: the next command connects anew
            self._is_open = False
            raise RedisConnectionError(str(error)) from None

    def _open(self) -> None:
        (host, port), *others = self._hosts
        self._is_open = True  # the constructor executes commands
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
