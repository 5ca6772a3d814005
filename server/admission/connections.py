"""Connections and bodies that harm nobody: what uvicorn's protocol waits for without end, this one gives up.

A client may keep a connection open and send nothing, send the head of a request byte by byte, go on with a body that
was answered already, or not read what it asked for. Each takes a file and some memory, and has a limit here. A
body that is still wanted is timed where it is read, within a budget of memory and with nothing long on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import pydantic_core
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.admission.account import Budget, Share
from server.admission.lanes import Lanes
from server.base.counting import num_values
from server.base.errors import ApiError
from server.base.limits import SMALL_BODY_BYTES, Limits, Patience
from server.base.record import current_record
from ssd.errors import RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")

TOO_MANY = "too_many_connections"
"""Set in ``scope["state"]`` of requests that came on a connection beyond the limit: it ends with their answer, since
few are kept for those that are to be told so."""

_MOST_BEYOND = 256
_BEYOND_IDLE_S = 5.0
_MOST_LOOK_S = 5.0
"""A connection is looked at this often, or more where the limits are shorter. Looking takes about a microsecond."""
_HEAD_BYTES = 64 << 10
"""Longest head of a request; httptools has no limit."""
_MOST_AHEAD = 8
"""Requests that a client may send before it has the answer of the one before them; uvicorn has no limit."""
_UNSENT_BYTES = 64 << 10
"""Of an answer that waits to be sent; asyncio holds eight times as much where connections are encrypted."""


def num_beyond(limits: Limits) -> int:
    """Connections beyond the limit that are told so; more are closed without a word."""
    return max(1, min(_MOST_BEYOND, limits.max_connections // 8))


class GuardedProtocol(HttpToolsProtocol):
    """One connection: uvicorn's protocol, looked at now and then."""

    limits: ClassVar[Limits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come; beyond the limit it is answered 503 by whoever reads ``TOO_MANY``."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(_UNSENT_BYTES)
        self._came = self.loop.time()
        self._head_since: float | None = None
        self._head_bytes = 0  # that came since the last of anything else: of a head, or behind the chunks of a body
        self._is_head = False
        self._unanswered: list[RequestResponseCycle] = []
        self._sending: Patience | None = None
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
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)
        for cycle in self._unanswered:  # uvicorn tells the last one alone
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Bytes that do not belong to a request under way begin a head, or are the rest of a body nobody wants."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_busy():
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self.loop.time()
        if self._head_bytes > _HEAD_BYTES and not self.transport.is_closing():
            self._give_up("a head that is too long", b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        self._is_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request is under way; raises ValueError, at which uvicorn gives the connection up, for one too many."""
        self._head_bytes, self._is_head = 0, False
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        if len(self._unanswered) > _MOST_AHEAD:
            self.transport.abort()
            raise ValueError("too many requests before an answer")
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        self.flow.resume_reading()  # uvicorn reads no more then, and would not see the client leave

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look_later(self) -> None:
        limits = self.limits
        shortest = min(limits.max_head_seconds, limits.max_send_seconds, self._idle_s)
        # Many come at once; they need not be looked at together.
        delay = min(_MOST_LOOK_S, shortest / 4) * random.uniform(0.8, 1.2)
        self._looking = self.loop.call_later(delay, self._look)

    def _look(self) -> None:
        """Give it up where it has waited, or been waited for, too long."""
        now = self.loop.time()
        if self._takes_nothing(now):
            log.debug("gave up a connection: it takes nothing of what was sent")
            self.transport.abort()
            return
        if not self.transport.is_closing() and not self._is_busy():
            if self._head_since is not None and now - self._head_since > self.limits.max_head_seconds:
                self._give_up("a request that does not arrive", b"408 Request Timeout")
            elif self._head_since is None and self.cycle is None and now - self._came > self._idle_s:
                self._give_up("nothing has come", None)  # after a first request uvicorn waits
        self._look_later()

    def _takes_nothing(self, now: float) -> bool:
        """Whether the client took too little for too long of what waits to be sent, while nothing is added."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or (self._is_busy() and not self.flow.write_paused):
            self._sending = None
            return False
        if self._sending is None:
            self._sending = Patience(self.limits.max_send_seconds, self.limits.min_bytes_per_second, now)
        else:
            self._sending.moved(max(0, self._unsent - unsent), now)
        self._unsent = unsent
        return now > self._sending.until

    def _give_up(self, reason: str, status: bytes | None) -> None:
        log.debug("gave up a connection: %s", reason)
        if status is not None and not self._is_busy() and self._is_head:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


def protocol_within(limits: Limits) -> type[asyncio.Protocol]:
    """What uvicorn is to make for each connection."""
    return type("Protocol", (GuardedProtocol,), {"limits": limits})


class BodyReader:
    """Reads the bodies of all requests; those that are not small share a budget of memory and a thread."""

    def __init__(self, limits: Limits, lanes: Lanes) -> None:
        self._limits, self._lanes = limits, lanes
        most = max(limits.max_bodies_bytes, limits.max_body_bytes)
        self._memory = Budget(most, "large bodies")

    async def read(self, request: Request, check: Callable[[Any], T], *, max_values: int) -> T:
        """What ``check`` makes of the decoded body; raises RequestError, ApiError (413, 408) or QueueFull."""
        share = self._memory.share()
        try:
            content = await self._receive(request, share)
            if len(content) <= SMALL_BODY_BYTES:
                return check(_decode(content))
            return await self._lanes.body(len(content)).run(_decode_large, content, check, max_values)
        finally:
            share.give_back()

    async def _receive(self, request: Request, share: Share) -> bytes:
        most = self._limits.max_body_bytes
        said = request.headers.get("content-length", "")
        if said.isascii() and said.isdecimal() and (len(said) > 18 or int(said) > most):
            raise _too_long(most)
        content = bytearray()
        seconds, rate = self._limits.max_body_seconds, self._limits.min_bytes_per_second
        clock = asyncio.get_running_loop().time
        patience = Patience(seconds, rate, clock())
        try:
            async with asyncio.timeout_at(patience.until) as timeout:
                async for chunk in request.stream():
                    content += chunk
                    patience.moved(len(chunk), clock())
                    timeout.reschedule(patience.until)
                    if len(content) > most:
                        raise _too_long(most)
                    if len(content) > SMALL_BODY_BYTES:
                        share.grow(len(content) - share.amount)
        except ClientDisconnect:
            current_record().is_gone = True
            raise RequestError("the connection closed before the whole body had arrived") from None
        except TimeoutError:
            message = f"the body stalled for {seconds:g} seconds, or came with fewer than {rate} bytes a second"
            raise ApiError(408, message, code="body_too_slow") from None
        return bytes(content)


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most} bytes", code="body_too_long")


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
            413, f"the body has {count} values, at most {max_values} are taken: send several requests",
            code="body_too_long",
        )  # fmt: skip
    return check(_decode(content))
