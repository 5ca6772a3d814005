"""Limits for slow or hostile clients on everything for which uvicorn's HTTP protocol would wait forever.

A client may open a connection and send nothing, send the headers of a request byte by byte, continue a body that was
answered already, or not read its answer. Each of these uses a file descriptor and some memory, so each has a limit.
Received bytes are parsed in slices, and the event loop serves other connections in between. A body must arrive within
time limits and fit into a shared memory budget, and large bodies are parsed on another thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pydantic_core
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.admission.fair_executor import FairExecutors
from server.admission.quotas import Reservation, SharedBudget
from server.base.counting import num_values
from server.base.errors import ApiError
from server.base.limits import SMALL_BODY_BYTES, LeakyBucket, Limits
from server.base.request_record import current_record
from ssd.errors import RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")

TOO_MANY = "too_many_connections"
"""The key in ``scope["state"]`` that marks requests on connections above ``max_connections``, which get a 503."""

BODY_FAULT = "body_fault"
"""The key in ``scope["state"]`` whose value is the ApiError for a chunked request body that was rejected early."""

_MAX_BEYOND = 256
_BEYOND_IDLE_S = 5.0
_MAX_CHECK_INTERVAL_S = 5.0
"""The maximum interval in seconds between two checks of a connection for idleness. A check takes about a microsecond.
"""
_HEAD_BYTES = 64 << 10
"""The maximum size of an HTTP request's headers in bytes; the parser (httptools) has no limit of its own."""
_MAX_AHEAD = 8
"""The maximum number of pipelined HTTP requests on a connection that wait while an earlier request is answered. One
more request closes the connection. uvicorn has no such limit.
"""
_UNSENT_BYTES = 64 << 10
"""The maximum number of response bytes buffered for a client; asyncio's default with TLS is eight times as high."""

_RECEIVED_BYTES = 256 << 10
_SLICE_BYTES = 4 << 10
"""The number of bytes of headers or chunked bodies that are parsed in one step. Parsing so many bytes can take 0.3 ms.
"""
_FREE_CHUNKS = 1024
_CHUNK_BYTES = 64
"""The minimum average size in bytes of the HTTP chunks of a request body. Only bodies with more than ``_FREE_CHUNKS``
chunks are checked.
"""
_LINGER_S = 1.0
"""The seconds for which a connection stays open after a response that was sent before the whole request body had
arrived. If it were closed at once, the client might lose the response.
"""


def num_beyond(limits: Limits) -> int:
    """Return the number of connections beyond ``max_connections`` that are accepted, so that their requests get a 503.

    Any further connection is closed immediately.
    """
    return max(1, min(_MAX_BEYOND, limits.max_connections // 8))


class GuardedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP/1.1 protocol class (one object per connection) with limits for slow and hostile clients.

    Received bytes are parsed in small slices, so that a large request does not block the event loop. The connection is
    closed if the client sends a request or reads a response too slowly.
    """

    limits: ClassVar[Limits]
    received: ClassVar[memoryview]
    """The receive buffer that all connections share, because the event loop reads from one connection at a time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection. Above ``max_connections``, mark its requests with ``TOO_MANY``.

        If more than `num_beyond` connections are above ``max_connections``, close the connection immediately.
        """
        super().connection_made(transport)
        transport.set_write_buffer_limits(_UNSENT_BYTES)
        # Responses are written to this object instead of the transport, so that `_finish` closes the connection.
        self._answers = SimpleNamespace(write=transport.write, is_closing=transport.is_closing, close=self._finish)
        self._came = self.loop.time()
        self._head_since: float | None = None
        self._head_bytes = 0  # received bytes of headers, or of trailers after a chunked body
        self._is_head = self._has_body = self._is_chunked = self._is_discarding = False
        self._expected_bytes = 0  # bytes of a body with content-length that have not arrived
        self._pieces: list[bytes] = []  # body chunks in the bytes received last
        self._unanswered: list[RequestResponseCycle] = []
        self._sending: LeakyBucket | None = None
        self._unsent = 0
        self._looking: asyncio.TimerHandle | None = None
        beyond = len(self.connections) - self.limits.max_connections
        self._idle_s = (
            self.limits.max_idle_seconds if beyond <= 0 else min(_BEYOND_IDLE_S, self.limits.max_idle_seconds)
        )
        if beyond > num_beyond(self.limits):
            transport.abort()
            return
        if beyond > 0:
            self.app_state = {**self.app_state, TOO_MANY: True}
        self._schedule_check()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)
        self._answers.close = self.transport.close  # removes a reference cycle
        for cycle in self._unanswered:  # uvicorn notifies only the last one
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next received bytes. It is larger while a body of known length is received."""
        return self.received[: max(_SLICE_BYTES, self._expected_bytes)]

    def buffer_updated(self, num_bytes: int) -> None:
        if not self._is_discarding:
            self.data_received(bytes(self.received[:num_bytes]))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. If no request is being answered, start the time limit for the next headers."""
        self._head_bytes += len(data)
        if self._is_chunked:
            self._body_bytes += len(data)
        super().data_received(data)
        self._append_chunks()
        if self._is_busy():
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self.loop.time()
        if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self._abort("its request headers are too long", b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        self._is_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start handling a request, unless too many pipelined requests on the connection are unanswered."""
        self._head_bytes, self._is_head = 0, False
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        if len(self._unanswered) > _MAX_AHEAD:
            self.transport.abort()
            raise ValueError(
                "too many requests on one connection are not answered yet: wait for answers, or open more connections"
            )
        super().on_headers_complete()
        cycle = self.cycle
        self._unanswered.append(cycle)
        cycle.transport = self._answers  # type: ignore[assignment]
        self._has_body = True
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._expected_bytes = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        if self._is_chunked:
            self._body_bytes = self._content_bytes = self._num_chunks = 0  # ``_body_bytes`` includes chunk headers
            # A response before the end of a chunked body closes the connection, so that the rest need not be parsed.
            self._keeps_alive, cycle.keep_alive = cycle.keep_alive, False
        self.flow.resume_reading()  # uvicorn stops reading here, and would not notice a disconnect

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._expected_bytes -= len(body)
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._append_chunks()
        if self._is_discarding:
            return
        if self._is_chunked and not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        self._has_body = self._is_chunked = False
        super().on_message_complete()

    def _append_chunks(self) -> None:
        """Append received chunks to the request body; reject the body if it is too large or its chunks are tiny."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            content = b"".join(pieces)
            super().on_body(content)
            if self._is_chunked:
                self._content_bytes += len(content)
                self._num_chunks += len(pieces)
        if not self._is_chunked or self._is_discarding:
            return
        if max(self._body_bytes, self._content_bytes) > self.limits.max_body_bytes:
            fault = _too_long(self.limits.max_body_bytes)
        elif self._num_chunks > _FREE_CHUNKS and self._content_bytes < _CHUNK_BYTES * self._num_chunks:
            fault = ApiError(
                400,
                f"the body comes in chunks of less than {_CHUNK_BYTES} bytes on average: send larger chunks, or "
                "the whole body with a content-length",
                code="body_chunks_too_small",
            )
        else:
            return
        self.scope["state"][BODY_FAULT] = fault
        self.cycle.more_body, self._is_discarding = False, True
        self.cycle.message_event.set()

    def _finish(self) -> None:
        """Close the connection after a response. If the body is incomplete, discard its rest for a second first."""
        if not self._has_body or self.transport.is_closing():
            self.transport.close()
            return
        self._is_discarding = True
        self.pipeline.clear()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _schedule_check(self) -> None:
        limits = self.limits
        shortest = min(limits.max_head_seconds, limits.max_send_seconds, self._idle_s)
        # Random, so that connections that opened together are not checked together.
        delay = min(_MAX_CHECK_INTERVAL_S, shortest / 4) * random.uniform(0.8, 1.2)
        self._looking = self.loop.call_later(delay, self._check_limits)

    def _check_limits(self) -> None:
        """Close the connection if the client sends a request or reads a response more slowly than the limits allow."""
        now = self.loop.time()
        if self._reads_too_slowly(now):
            log.debug("a connection was closed: the client does not read the response")
            self.transport.abort()
            return
        if not self.transport.is_closing() and not self._is_busy():
            if self._head_since is not None and now - self._head_since > self.limits.max_head_seconds:
                self._abort("its request did not arrive in time", b"408 Request Timeout")
            elif self._head_since is None and self.cycle is None and now - self._came > self._idle_s:
                self._abort("it sent no request", None)  # after a first request, uvicorn's own time limit applies
        self._schedule_check()

    def _reads_too_slowly(self, now: float) -> bool:
        """Return whether the client has read the response more slowly than ``min_bytes_per_second`` for too long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or (self._is_busy() and not self.flow.write_paused):
            self._sending = None
            return False
        if self._sending is None:
            self._sending = LeakyBucket(self.limits.max_send_seconds, self.limits.min_bytes_per_second, now)
        else:
            self._sending.extend_deadline(max(0, self._unsent - unsent), now)
        self._unsent = unsent
        return now > self._sending.until

    def _abort(self, reason: str, status: bytes | None) -> None:
        log.debug("a connection was closed: %s", reason)
        if status is not None and not self._is_busy() and self._is_head:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


def protocol_within(limits: Limits) -> type[asyncio.Protocol]:
    return type("Protocol", (GuardedProtocol,), {"limits": limits, "received": memoryview(bytearray(_RECEIVED_BYTES))})


class BodyReader:
    """Receives and parses the bodies of all HTTP requests.

    Bodies of more than 64 KiB share a memory budget and are parsed on another thread.
    """

    def __init__(self, limits: Limits, lanes: FairExecutors) -> None:
        self._limits, self._lanes = limits, lanes
        most = max(limits.max_bodies_bytes, limits.max_body_bytes)
        self._memory = SharedBudget(most, "large bodies")

    async def read(self, request: Request, check: Callable[[Any], T], *, max_values: int) -> T:
        """Receive a request's body, parse it as JSON, and return the result of ``check`` for the parsed value.

        A body above 64 KiB may contain at most ``max_values`` JSON values. Raises RequestError if the body is invalid,
        ApiError if it is too large (413), too slow (408) or in tiny chunks (400), or QueueFull.
        """
        with self._memory.reserve() as memory:
            content = await self._receive(request, memory)
            if len(content) <= SMALL_BODY_BYTES:
                return check(_decode(content))
            return await self._lanes.body(len(content)).run(_decode_large, content, check, max_values)

    async def _receive(self, request: Request, memory: Reservation) -> bytes:
        most = self._limits.max_body_bytes
        if int(request.headers.get("content-length", 0)) > most:  # the HTTP parser has checked that it is a number
            raise _too_long(most)
        content = bytearray()
        seconds, rate = self._limits.max_body_seconds, self._limits.min_bytes_per_second
        clock = asyncio.get_running_loop().time
        patience = LeakyBucket(seconds, rate, clock())
        try:
            async with asyncio.timeout_at(patience.until) as timeout:
                async for chunk in request.stream():
                    content += chunk
                    patience.extend_deadline(len(chunk), clock())
                    timeout.reschedule(patience.until)
                    if len(content) > SMALL_BODY_BYTES:
                        memory.grow(len(content) - memory.amount)
        except ClientDisconnect:
            current_record().is_gone = True
            raise RequestError("the connection closed before the whole body had arrived") from None
        except TimeoutError:
            message = f"the body stalled for {seconds:g} seconds, or came with fewer than {rate} bytes a second"
            raise ApiError(408, message, code="body_too_slow") from None
        if (fault := request.scope["state"].get(BODY_FAULT)) is not None:
            raise fault
        return bytes(content)


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most} bytes: split the request", code="body_too_long")


def _decode(content: bytes) -> Any:
    try:
        return pydantic_core.from_json(content, allow_inf_nan=False)
    except ValueError as error:
        half = " (a \\u escape is cut, or half of a pair of surrogates)" if "escape" in str(error) else ""
        raise RequestError(f"the body is not valid JSON: {error}{half}") from None


def _decode_large(content: bytes, check: Callable[[Any], T], max_values: int) -> T:
    count = num_values(content)
    if count > max_values:
        raise ApiError(
            413,
            f"the body has {count} JSON values, but at most {max_values} are accepted: split it into several requests",
            code="body_too_long",
        )
    return check(_decode(content))
