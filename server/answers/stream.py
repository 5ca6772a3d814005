"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic_core
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.answers.bodies import Bodies
from server.base.errors import error_body
from server.base.record import current_record
from server.running.generation import Generation, Usage
from server.schema.generate import StreamOptions
from ssd.errors import SSDError

if TYPE_CHECKING:
    from ssd.engine import RequestOutput
    from ssd.text.stream import TextStream


class DraftWriter:
    """Describes the drafts of one request's choices; one that begins anew with each stream."""

    def __init__(self, make_stream: Callable[[], TextStream]) -> None:
        """``make_stream`` : a fresh stream with the stop strings of the request, to spell a choice once more."""
        self._make_stream = make_stream
        self._streams: dict[int, TextStream] = {}

    def describe(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        """The field ``draft`` of a chunk; None where no pass made it. O(tokens).

        "texts" is what each token added to the text of the chunk, which they make up together; the first
        "num_accepted" of them were drafted. "pass" is the number among the passes of the choice, from 1. Of a pass
        for which nothing was drafted the source is None.
        """
        draft = output.draft
        if draft is None:
            return None
        return {
            "pass": draft.number,
            "source": draft.source if draft.num_drafted else None,
            "num_drafted": draft.num_drafted,
            "num_accepted": draft.num_accepted,
            "texts": self._texts(index, output),
        }

    def _texts(self, index: int, output: RequestOutput) -> list[str]:
        if index not in self._streams:
            self._streams[index] = self._make_stream()
        stream, texts, rest = self._streams[index], [], output.text
        for token_id in output.token_ids:
            length = len(stream.push_token(token_id))
            texts.append(rest[:length])
            rest = rest[length:]
        if texts:  # at the end of the output, what was held back
            texts[-1] += rest
        return texts


log = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
PADDED_BYTES = 1024
"""With obfuscation an event's length is a multiple of this: 16 tokens of text with what is around them fit one."""
_LONGEST_NUMBER = 24
"""Characters of a float64 in JSON: sign, 17 digits, point, exponent."""


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
        current_record().is_gone = True
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


class EventWriter:
    """Writes the events of one stream. ``pad`` : the client wants them obfuscated.

    ``end`` : what goes last of all. ``keep_alive`` : what goes while there is nothing to say.
    """

    end = DONE
    keep_alive = KEEP_ALIVE

    def __init__(
        self, generation: Generation, bodies: Bodies, options: StreamOptions, drafts: DraftWriter | None = None
    ) -> None:
        """``drafts`` : says of each pass what was drafted, where the client wants to know it."""
        self.pad = bool(options.include_obfuscation)
        self._generation = generation
        self._bodies = bodies
        self._with_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats and options.include_usage)
        self._drafts = drafts

    async def beginning(self) -> bytes:
        """What goes before everything, at once."""
        return b""

    async def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """What goes before the first text of a choice; ``usage`` : so far, where it is not the generation's.

        Where it holds a prompt's tokens it is written aside.
        """
        bodies, generation = self._bodies, self._generation

        def write() -> bytes:
            contents = bodies.first_chunks(generation, index)
            return b"".join(self._event(bodies.chunk_choice(index, content), usage) for content in contents)

        return await self._written(write)

    async def _written(self, write: Callable[[], bytes]) -> bytes:
        """What ``write`` returns; run aside where it may take long."""
        is_short = self._bodies.is_short(self._generation)
        return write() if is_short else await self._generation.aside.run(write)

    def piece(self, index: int, output: RequestOutput, usage: Usage | None = None) -> bytes:
        """What a choice has said; ``usage`` as for `opening`. One event where they are padded."""
        bodies = self._bodies
        ended = self._generation.choices[index] if output.finish_reason is not None else None
        if self.pad or self._generation.messages is None:
            contents = [bodies.text_chunk(index, output)]
        else:
            contents = bodies.text_chunks(index, output)
        if not contents:
            if self._drafts is None:
                return b""
            contents = [bodies.text_chunk(index, replace(output, text=""))]
        *first, last = contents
        choices = [bodies.chunk_choice(index, content) for content in first]
        choices.append(bodies.chunk_choice(index, last, output.token_ids, ended))
        if self._drafts is not None:
            choices[-1]["draft"] = self._drafts.describe(index, output)
        return b"".join([self._event(choice, usage) for choice in choices])

    def is_shown(self, output: RequestOutput) -> bool:
        """Whether an output has anything that the client asked to see."""
        return self._bodies.is_shown(output) or (self._drafts is not None and output.draft is not None)

    async def closing(self) -> bytes:
        """The last event but the end mark: usage, where it was asked for."""
        if not self._with_usage:
            return b""
        last = {**self._bodies.chunk([]), "usage": self._generation.usage.body()}
        return encode_event({**last, **self._bodies.draft_metrics(self._generation)}, pad=self.pad)

    def failure(self, error: Exception) -> bytes:
        """An error is an event, too."""
        if not isinstance(error, SSDError):
            log.error("a stream failed", exc_info=error)
        return encode_event(error_body(error), pad=False)

    def _event(self, choice: dict[str, Any], usage: Usage | None) -> bytes:
        chunk = self._bodies.chunk([choice])
        if self._with_usage:
            chunk["usage"] = (usage or self._generation.usage).body() if self._continuous else None
        return encode_event(chunk, pad=self.pad)


async def events(
    generation: Generation, bodies: Bodies, writer: EventWriter, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """The events of a generation: chunks, usage if asked for, and the end mark."""
    begun: set[int] = set()
    ready = bytearray()
    try:
        if beginning := await writer.beginning():
            yield beginning
        async for arrived in generation.outputs(wait_s=keep_alive_s):
            if arrived is None:
                yield writer.keep_alive
                continue
            index, output = arrived
            if index not in begun:
                begun.add(index)
                ready += await writer.opening(index)
            if writer.is_shown(output):
                ready += writer.piece(index, output)
            # What arrived together goes out together: a write costs more than all the rest of an event.
            if ready and not generation.has_more_now:
                yield bytes(ready)
                ready.clear()
        ready += await writer.closing()
    except Exception as error:
        ready += writer.failure(error)
    yield bytes(ready + writer.end)


def encode_event(body: dict[str, Any], *, pad: bool) -> bytes:
    """One server-sent event without a name, see `encode_events`."""
    return encode_events([("", body)], pad=pad)


def encode_events(events: Sequence[tuple[str, dict[str, Any]]], *, pad: bool) -> bytes:
    """Server-sent events that go out together, names and bodies; at least one.

    Padded, the last has a random ``obfuscation`` field that fills all of them to whole kilobytes. How many depends on
    the bodies without the digits of their numbers that are no integers: log-probabilities are rounded differently in
    passes of another width.
    """
    written = [_event(name, body) for name, body in events]
    if pad:
        length = sum(map(len, written)) + len(b',"obfuscation":""')
        spare = sum(_spare_digits(body) for _, body in events)
        missing = spare + -(length + spare) % PADDED_BYTES
        name, last = events[-1]
        written[-1] = _event(name, {**last, "obfuscation": secrets.token_hex((missing + 1) // 2)[:missing]})
    return b"".join(written)


def _event(name: str, body: dict[str, Any]) -> bytes:
    head = b"event: " + name.encode() + b"\ndata: " if name else b"data: "
    return head + pydantic_core.to_json(body) + b"\n\n"


def filler() -> bytes:
    """A comment as long as the shortest padded event."""
    return b": " + secrets.token_hex(PADDED_BYTES)[: PADDED_BYTES - 4].encode() + b"\n\n"


def _spare_digits(value: Any) -> int:
    """How many characters shorter JSON is than it would be with the longest of numbers. O(values)."""
    if isinstance(value, float):
        return _LONGEST_NUMBER - len(pydantic_core.to_json(value))
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_spare_digits, value))
