"""Reads what Redis answers, and no more of it than fits a bound. Needs redis-py, so only ``connect`` imports it.

Whoever can write to a Redis server decides how large the values are that others read from it, up to 512 MB each. A
reply names the size of everything before it comes, so a reply that is too large is given up before it takes memory.
"""

from __future__ import annotations

import time
from typing import Any

from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.utils import SENTINEL

from ssd.sharing.pages import MAX_REPLY_BYTES, OversizedReplyError

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
