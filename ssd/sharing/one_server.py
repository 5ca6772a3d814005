"""A client of one server that keeps its connection from one command to the next. Only ``connect`` imports it.

redis-py takes a connection from its pool for each command and gives it back, counts that for its own metrics, and asks
the socket three times whether it may be used: several times the work of the command itself, all of it under the
interpreter's lock, which the thread that steps the engine needs.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress
from select import POLLIN, poll
from typing import Any

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError


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
