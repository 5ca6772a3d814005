"""redis-py's clients with a bound for what a server answers. Only ``connect`` imports it, as it needs redis-py."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from select import POLLIN, poll
from typing import Any

import redis
from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.client import Pipeline
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ClusterError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.utils import SENTINEL

from ssd.sharing.stream import MAX_REPLY_BYTES, OversizedReplyError

Host = tuple[str, int]

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
    encoder: Any
    _room = 0
    _unfinished: list[list[Any]]

    def on_connect(self, connection: Any) -> None:
        """Called when the socket connects."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = BoundedBuffer(self._sock, self.socket_read_size, connection.socket_timeout)

    def has_unread(self) -> bool:
        """Whether more came than was asked for."""
        return self._buffer is None or self._buffer.unread_bytes() > 0

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
        line = self._buffer.readline(**settings)
        kind, text = line[:1], line[1:]
        self._room -= _ELEMENT_BYTES + len(text)
        if kind == b"$" and text.isdigit():
            self._room -= int(text)
            if self._room < 0:
                raise OversizedReplyError(self._unfinished)
            text = self._buffer.read(int(text), **settings)
            return self.encoder.decode(text) if self.encoder.decode_responses and not disable_decoding else text
        if self._room < 0:
            raise OversizedReplyError(self._unfinished)
        if kind == b"*" and text.isdigit():
            return self._read_array(int(text), disable_decoding, settings)
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
        return text if disable_decoding else self.encoder.decode(text)

    def _read_array(self, num_elements: int, disable_decoding: bool, settings: dict[str, Any]) -> list[Any]:
        elements: list[Any] = []
        self._unfinished.append(elements)
        for _ in range(num_elements):
            elements.append(self._read_response(disable_decoding, **settings))
        self._unfinished.pop()
        return elements


_LONGEST_NAME = 253


class Sentinels(Sentinel):
    """redis-py's, but that no answer of a sentinel is trusted to have its form, and no connection is kept."""

    def discover_master(self, service_name: str) -> Host:
        """Where the master is. Raises MasterNotFoundError, a connection error; at most 3 s for each sentinel."""
        reason = ""
        for number, sentinel in enumerate(self.sentinels):
            try:
                answer: Any = sentinel.execute_command(  # type: ignore[no-untyped-call]
                    "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service_name
                )
                host = None if answer is None else read_host(answer[0], answer[1])
            except Exception as error:  # nonsense raises whatever it likes
                reason = f": {type(error).__name__}: {error}"
                continue
            finally:
                sentinel.connection_pool.disconnect()
            if host is not None:
                self.sentinels.insert(0, self.sentinels.pop(number))
                return host
        raise MasterNotFoundError(f"no sentinel of {len(self.sentinels)} names a master of {service_name!r}{reason}")


def sentinel_pool(
    hosts: tuple[Host, ...], service: str, sentinel_options: dict[str, Any], options: dict[str, Any]
) -> SentinelConnectionPool:
    """Connections to the master of ``service``. Nothing is sent yet."""
    import redis

    kind = options.pop("connection_class", None)
    sentinels = Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = [
        redis.Redis.from_pool(redis.ConnectionPool(**sentinel_options | {"host": host, "port": port}))
        for host, port in hosts
    ]
    managed = SentinelManagedConnection if kind is None else SentinelManagedSSLConnection
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        service, sentinels, connection_class=managed, **options
    )


def read_host(name: object, port: object) -> Host:
    """A host as servers name it, checked. Raises ConnectionError."""
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else ""
    number = int(port) if isinstance(port, int) or (isinstance(port, bytes) and port.isdigit()) else 0
    if not 0 < len(text) <= _LONGEST_NAME or not text.isprintable() or " " in text or not 0 < number < 1 << 16:
        raise RedisConnectionError("a server named an address that is none")
    return text, number


NUM_SLOTS = 16384

_KEYLESS = frozenset(
    {"ACL", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "FLUSHALL", "INFO", "PING", "ROLE", "SCAN", "TIME"}
)
_KEY_IS_THIRD = frozenset({"OBJECT", "MEMORY", "XINFO"})  # where the subcommand is a word of its own
_KEY_IS_FOURTH = frozenset({"EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO"})


def slot_of(command: Sequence[Any]) -> int | None:
    """The slot of a command's first key, which decides for all its keys; None for a command without."""
    name = str(command[0]).upper()
    if name.partition(" ")[0] in _KEYLESS:
        return None
    if name == "XREAD":
        words = [_bytes(word).upper() for word in command]
        return slot_of_key(command[words.index(b"STREAMS") + 1])
    at = 2 if name in _KEY_IS_THIRD else 3 if name in _KEY_IS_FOURTH else 1
    return slot_of_key(command[at])


def slot_of_key(key: str | bytes) -> int:
    """0 ... 16,383. O(length)."""
    return key_slot(_bytes(key))


def read_slots(answer: Any, asked: Host) -> list[Host | None]:
    """The master of each of the 16,384 slots, from what CLUSTER SLOTS answered, whatever that is.

    ``asked`` : the node that answered, which may leave out its own name. Raises ValueError, and ConnectionError for a
    name that is none.
    """
    owners: list[Host | None] = [None] * NUM_SLOTS
    num_left = NUM_SLOTS
    if not isinstance(answer, list):
        raise ValueError("no list of slots")
    for part in answer:
        if not isinstance(part, list) or len(part) < 3 or not isinstance(part[2], list) or len(part[2]) < 2:
            raise ValueError("no list of slots")
        first, last, (name, port, *_) = part[0], part[1], part[2]
        if type(first) is not int or type(last) is not int or not 0 <= first <= last < NUM_SLOTS:
            raise ValueError("slots that are none")
        num_left -= last + 1 - first
        if num_left < 0:
            raise ValueError("slots that are named twice")
        if name == b"?":
            continue
        owners[first : last + 1] = [read_host(name or asked[0].encode(), port)] * (last + 1 - first)
    return owners


def _bytes(word: object) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


class OneServer(redis.Redis):
    """Safe from any thread. A command is tried once; the connection that failed is closed."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """As ``redis.Redis``."""
        super().__init__(*arguments, **settings)
        self._kept: deque[Any] = deque()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """What the server answers; raises its refusals, and errors of the connection."""
        connection = self._take()
        try:
            command = _packed(args)
            if command is None:
                connection.send_command(*args)
            else:
                connection.send_packed_command((command,))
            return self.parse_response(connection, args[0], **options)  # type: ignore[no-untyped-call]
        except (RedisConnectionError, RedisTimeoutError):
            connection.disconnect()
            raise
        finally:
            if self._kept:  # another thread's
                self.connection_pool.release(connection)
            else:
                self._kept.append(connection)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        """As of ``redis.Redis``, on the connection that is kept."""
        with suppress(IndexError):
            self.connection_pool.release(self._kept.pop())
        return super().pipeline(transaction, shard_hint)

    def _take(self) -> Any:
        try:
            connection = self._kept.pop()
        except IndexError:
            return self.connection_pool.get_connection()
        if self.connection_pool.owns_connection(connection) and _is_quiet(connection):
            return connection
        self.connection_pool.release(connection)  # which looks closer, and connects where that leads now
        return self.connection_pool.get_connection()


def _packed(words: tuple[Any, ...]) -> bytes | None:
    """A command as the server reads it; None where redis-py has to say how a word is written, or where it is two."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        kind = type(word)
        if kind is str:
            written = word.encode()
        elif kind is bytes:
            written = word
        elif kind is int:
            written = b"%d" % word
        else:
            return None
        parts.append(b"$%d\r\n%b\r\n" % (len(written), written))
    return None if " " in str(words[0]) else b"".join(parts)


def _is_quiet(connection: Any) -> bool:
    """Whether it is connected and nothing has come that was not asked for, its end included. One call of the system."""
    wire, parser = connection._sock, connection._parser
    if type(wire) is not socket.socket or parser.has_unread():  # with TLS something may have come that is not text
        return False
    asked = poll()
    asked.register(wire, POLLIN)
    return not asked.poll(0)


_MOST_REDIRECTIONS = 5
_MOST_NODES = 1000
_LOOK_AGAIN_S = 0.1
_LOOK_FOR_S = 2.0
_LOST = (RedisConnectionError, RedisTimeoutError, OSError, ClusterDownError, MasterDownError)

_POLL_MS = 200
"""With streams of several slots one read waits for the busiest of them this long, then all are looked at again."""

_TOGETHER = 8
"""Reads of one node that are sent at once: their replies are in memory together."""


class ClusterClient(redis.Redis):
    """Commands go to the node of their first key; those without one to any. Safe from any thread."""

    def __init__(self, hosts: tuple[Host, ...], options: dict[str, Any]) -> None:
        """``hosts`` : some nodes. ``options`` : of a connection to any of them."""
        self._hosts = hosts
        self._options = options
        self._lock = threading.RLock()
        self._nodes: dict[Host, redis.Redis] = {}
        self._owners: list[Host | None] = [None] * NUM_SLOTS
        self._is_stale = True
        self._may_look_at = 0.0
        self._lost: Host | None = None
        self._turn: list[Any] = []
        super().__init__(connection_pool=self._node(hosts[0]).connection_pool)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """What the node of the command's key answers, at most five redirections later."""
        slot = slot_of(args)
        host = random.choice(self._masters()) if slot is None else self._owner(slot)
        is_asked = False
        for _ in range(_MOST_REDIRECTIONS):
            try:
                return self._asked(host, args, options) if is_asked else self._said(host, args, options)
            except AskError as error:  # MovedError is one
                host, is_asked = self._redirected(error, host), not isinstance(error, MovedError)
            except _LOST:
                self._lose(host)
                raise
        raise ClusterError(f"sent from node to node more than {_MOST_REDIRECTIONS} times")

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> ClusterPipeline:
        """One for commands whose keys have one hash tag."""
        return ClusterPipeline(self, transaction)

    def xread(  # type: ignore[override]
        self, streams: Mapping[Any, Any], count: int | None = None, block: int | None = None
    ) -> Any:
        """As of one server, but for streams of several nodes: some of what is there, or one of them is waited for.

        A server reads streams of one slot at once. So those of several slots are looked at a few at a time, on their
        nodes, until one has something; where none has, the one that had something last is waited for, 0.2 s at most.
        Nothing is lost by an error: ids are not moved by a read.
        """
        if len({slot_of_key(key) for key in streams}) <= 1:
            return super().xread(dict(streams), count=count, block=block)
        turn = {key: number for number, key in enumerate(self._turn)}
        keys = sorted(streams, key=lambda key: turn.get(key, -1))
        by_node: dict[Host, list[Any]] = {}
        for key in keys:  # those that were served last stand last
            by_node.setdefault(self._owner(slot_of_key(key)), []).append(key)
        for host, keys_here in by_node.items():
            for start in range(0, len(keys_here), _TOGETHER):
                found = self._read_some(
                    host, {key: streams[key] for key in keys_here[start : start + _TOGETHER]}, count
                )
                if found:
                    served = [key for key, _ in found]
                    self._turn = [key for key in keys if _encoded(key) not in served]
                    self._turn += [key for key in keys if _encoded(key) in served]
                    return found
        if block is None:
            return []
        busiest = keys[-1]
        return super().xread({busiest: streams[busiest]}, count=count, block=max(1, min(block, _POLL_MS)))

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Keys of all nodes."""
        for _, node in self.masters():
            yield from node.scan_iter(*args, **options)

    def masters(self) -> list[tuple[Host, redis.Redis]]:
        """A client for each node that serves slots, to be asked and not closed."""
        return [(host, self._node(host)) for host in sorted(self._masters())]

    def node_of(self, key: str) -> redis.Redis:
        """A client of the node that serves ``key`` now, not to be closed."""
        return self._node(self._owner(slot_of_key(key)))

    def close(self) -> None:
        """Give all connections back."""
        with self._lock:
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.close()

    def _read_some(self, host: Host, streams: Mapping[Any, Any], count: int | None) -> list[Any]:
        pipeline = self._node(host).pipeline(transaction=False)
        for key, last_id in streams.items():
            pipeline.xread({key: last_id}, count=count)
        try:
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        except _LOST:
            self._lose(host)
            raise
        for answer in answers:
            if isinstance(answer, AskError):
                self._redirected(answer, host)
            if isinstance(answer, _LOST):
                self._lose(host)
            if isinstance(answer, Exception):
                raise answer
        return [stream for answer in answers for stream in answer or ()]

    def _said(self, host: Host, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self._node(host).execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def _asked(self, host: Host, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The one command that a node takes for a slot which is on its way there."""
        pipeline = self._node(host).pipeline(transaction=False)
        pipeline.execute_command("ASKING")  # type: ignore[no-untyped-call]
        pipeline.execute_command(*args, **options)  # type: ignore[no-untyped-call]
        return pipeline.execute()[-1]

    def _redirected(self, error: AskError, host: Host) -> Host:
        """Where ``host`` sends a command."""
        target = read_host((error.host or host[0]).encode(), error.port)
        if isinstance(error, MovedError):
            with self._lock:
                if 0 <= error.slot_id < NUM_SLOTS:
                    self._owners[error.slot_id] = target
                self._is_stale = True
        return target

    def _lose(self, host: Host) -> None:
        with self._lock:
            self._is_stale, self._lost = True, host

    def _node(self, host: Host) -> redis.Redis:
        with self._lock:
            if host not in self._nodes:
                if len(self._nodes) >= _MOST_NODES:
                    raise ClusterError(f"more than {_MOST_NODES} nodes")
                pool = redis.ConnectionPool(**self._options | {"host": host[0], "port": host[1]})
                self._nodes[host] = OneServer.from_pool(pool)
            return self._nodes[host]

    def _owner(self, slot: int) -> Host:
        self._look()
        owner = self._owners[slot]
        if owner is None:
            self._is_stale = True
            raise ClusterDownError("no node of the cluster serves this key")
        return owner

    def _masters(self) -> list[Host]:
        self._look()
        return list({owner for owner in self._owners if owner is not None}) or list(self._hosts)

    def _look(self) -> None:
        """Read the map again where it may be old; an old one is kept where no node answers."""
        with self._lock:
            if not self._is_stale or time.monotonic() < self._may_look_at:
                return
            known = [owner for owner in {*self._owners, *self._hosts} if owner is not None]
            random.shuffle(known)
            known.sort(key=lambda host: host == self._lost)
            deadline = time.monotonic() + _LOOK_FOR_S
            reason: Exception | None = None
            for host in known:
                try:
                    self._owners = read_slots(self._said(host, ("CLUSTER", "SLOTS"), {}), host)
                    self._is_stale = False
                except Exception as error:  # nonsense raises whatever it likes
                    reason = error
                if not self._is_stale or time.monotonic() > deadline:
                    break
            self._may_look_at = time.monotonic() + _LOOK_AGAIN_S
            if self._is_stale and reason is not None and not any(self._owners):
                raise reason
            used = {*self._owners, *self._hosts}
            for host in [host for host in self._nodes if host not in used]:
                self._nodes.pop(host).close()


class ClusterPipeline(Pipeline):
    """A pipeline of redis-py on the node of its first key."""

    def __init__(self, cluster: ClusterClient, transaction: bool) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, transaction, None)
        self._cluster = cluster
        self._host: Host | None = None
        self._is_transaction = transaction

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Queue a command, or run it where a key is watched; the first one with a key chooses the node."""
        slot = slot_of(args) if self._host is None and args[0] not in self.UNWATCH_COMMANDS else None
        if slot is not None:
            self._host = self._cluster._owner(slot)
            self.connection_pool = self._cluster._node(self._host).connection_pool
        host = self._host
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except (AskError, *_LOST) as error:
            self._note(host, error)
            raise

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Answers in order. Of a pipeline that is no transaction, what has moved is asked for where it is now."""
        commands, host = list(self.command_stack), self._host
        if self._is_transaction or self.explicit_transaction:
            try:
                return super().execute(raise_on_error)
            except (AskError, *_LOST) as error:
                self._note(host, error)
                raise
        try:
            answers = super().execute(raise_on_error=False)
        except _LOST as error:
            self._note(host, error)
            raise
        for index, answer in enumerate(answers):
            if isinstance(answer, AskError):
                self._note(host, answer)
                answers[index] = self._again(*commands[index])
            elif isinstance(answer, _LOST):
                self._note(host, answer)
        for answer in answers:
            if raise_on_error and isinstance(answer, Exception):
                raise answer
        return answers

    def reset(self) -> None:  # type: ignore[override]
        """Begin anew, perhaps on another node."""
        super().reset()
        self._host = None

    def _again(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            return self._cluster.execute_command(*args, **options)
        except ResponseError as error:
            return error

    def _note(self, host: Host | None, error: Exception) -> None:
        if host is None:
            return
        if isinstance(error, AskError):
            self._cluster._redirected(error, host)
        else:
            self._cluster._lose(host)


def _encoded(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key
