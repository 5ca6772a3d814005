"""Reads what Redis answers, and no more of it than fits a bound. Needs redis-py, so only ``connect`` imports it.

Whoever can write to a Redis server decides how large the values are that others read from it, up to 512 MB each. A
reply names the size of everything before it comes, so a reply that is too large is given up before it takes memory.
"""

from __future__ import annotations

from typing import Any

from redis._parsers import _RESP2Parser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

from ssd.sharing.pages import MAX_REPLY_BYTES, OversizedReplyError

_ELEMENT_BYTES = 64  # what an element takes in Python beside its own bytes, so that many small ones are bounded as well


class BoundedParser(_RESP2Parser):
    """redis-py's parser of protocol 2 with a bound for each reply; raises OversizedReplyError.

    redis-py closes the connection when its parser raises, so the rest of the reply is never read.
    """

    _buffer: Any
    encoder: Any
    _room = 0
    _unfinished: list[list[Any]]

    def read_response(self, *arguments: Any, **settings: Any) -> Any:
        """One reply."""
        self._room = MAX_REPLY_BYTES
        self._unfinished = []
        return super().read_response(*arguments, **settings)

    def _read_response(  # type: ignore[override]
        self, disable_decoding: bool = False, **settings: Any
    ) -> Any:
        line = self._buffer.readline(**settings)
        kind, text = line[:1], line[1:]
        self._take(_ELEMENT_BYTES + len(text))
        if kind == b"-":
            error = self.parse_error(text.decode("utf-8", errors="replace"))  # type: ignore[no-untyped-call]
            if isinstance(error, RedisConnectionError):
                raise error
            return error
        if kind == b":":
            return int(text)
        if kind in (b"$", b"*") and text == b"-1":
            return None
        if kind == b"*":
            return self._read_array(int(text), disable_decoding, settings)
        if kind == b"$":
            self._take(int(text))
            text = self._buffer.read(int(text), **settings)
        elif kind != b"+":
            raise InvalidResponse(f"Protocol Error: {line[:80]!r}")
        return text if disable_decoding else self.encoder.decode(text)

    def _read_array(self, num_elements: int, disable_decoding: bool, settings: dict[str, Any]) -> list[Any]:
        elements: list[Any] = []
        self._unfinished.append(elements)
        for _ in range(num_elements):
            elements.append(self._read_response(disable_decoding, **settings))
        self._unfinished.pop()
        return elements

    def _take(self, num_bytes: int) -> None:
        self._room -= num_bytes
        if self._room < 0:
            raise OversizedReplyError(self._unfinished)
