"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import pydantic_core
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ssd.errors import SSDError

from .bodies import Bodies
from .errors import error_body
from .generation import Generation
from .schema import StreamOptions

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_PADDED_BYTES = 256
"""With obfuscation an event's length is a multiple of this, so that it does not tell how many tokens it carries."""


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` while the client is there; raises ClientGone, with the work cancelled, once it is not.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for running in (task, watch):
            running.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come. The generation is closed at the end, whoever caused it."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._events = events
        # Proxies must neither store nor collect events.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """As a response without a body of its own, hence without content-length."""
        self.body = b""
        super().init_headers(headers)
        del self.headers["content-length"]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client goes."""
        try:
            await until_disconnect(receive, self._send(send))
        except ClientGone:
            log.debug("client left a stream")
        finally:
            self._generation.close()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(
    generation: Generation, bodies: Bodies, options: StreamOptions, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """The events of a generation: chunks, usage if asked for, and the end mark; an error is an event, too."""
    begun: set[int] = set()
    pad = bool(options.include_obfuscation)

    def event(choices: list[dict[str, Any]]) -> bytes:
        chunk = bodies.chunk(choices)
        if options.continuous_usage_stats and options.include_usage:
            chunk["usage"] = generation.usage.body()
        elif options.include_usage:
            chunk["usage"] = None
        return encode_event(chunk, pad=pad)

    ready = bytearray()
    try:
        async for arrived in generation.outputs(wait_s=keep_alive_s):
            if arrived is None:
                yield KEEP_ALIVE
                continue
            index, output = arrived
            if index not in begun:
                begun.add(index)
                ready += await _opening(generation, bodies, index, event)
            ended = generation.choices[index] if output.finish_reason is not None else None
            if bodies.is_shown(output):
                content = bodies.text_chunk(index, output)
                ready += event([bodies.chunk_choice(index, content, output.token_ids, ended)])
            # What arrived together goes out together: a write costs more than all the rest of an event.
            if ready and not generation.has_more_now:
                yield bytes(ready)
                ready.clear()
        if options.include_usage:
            ready += encode_event({**bodies.chunk([]), "usage": generation.usage.body()}, pad=pad)
    except Exception as error:
        if not isinstance(error, SSDError):
            log.exception("a stream failed")
        ready += encode_event(error_body(error), pad=False)
    yield bytes(ready + DONE)


async def _opening(
    generation: Generation, bodies: Bodies, index: int, event: Callable[[list[dict[str, Any]]], bytes]
) -> bytes:
    """The events before the first text of a choice; where they hold a prompt's tokens they are written aside."""

    def write() -> bytes:
        return b"".join(
            event([bodies.chunk_choice(index, content)]) for content in bodies.first_chunks(generation, index)
        )

    return write() if bodies.is_short(generation) else await generation.aside.run(write)


def encode_event(body: dict[str, Any], *, pad: bool) -> bytes:
    """One server-sent event; padded, it has a random ``obfuscation`` field that fills it to a multiple of 256 bytes."""
    event = b"data: " + pydantic_core.to_json(body) + b"\n\n"
    if pad:
        field = len(b',"obfuscation":""')
        missing = -(len(event) + field) % _PADDED_BYTES
        filled = {**body, "obfuscation": secrets.token_hex((missing + 1) // 2)[:missing]}
        event = b"data: " + pydantic_core.to_json(filled) + b"\n\n"
    return event
