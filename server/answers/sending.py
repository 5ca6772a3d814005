"""Send generated text as a stream or as one body, and stop the generation when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.admission.fair_executor import FairExecutors
from server.admission.quotas import Reservation, SharedBudget
from server.answers.answer import Answer, events
from server.answers.obfuscation import EqualChunks, TickClock, finish_at_tick, obfuscated_events
from server.answers.tokens import TokenAttribution
from server.answers.wire import json_text, padded
from server.base.request_record import current_record
from server.base.settings import ServerSettings
from server.running.engine_thread import Worker
from server.running.generation import Generation
from server.running.tokenization import codec_of
from server.schema.generate import StreamOptions
from ssd.text.detokenizer import TextStream

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHUNK_BYTES = 1 << 18
"""The number of bytes of a complete response that are sent in one step.

A response with more bytes counts against a memory budget that all clients share, until its client has read it.
"""


class ClientDisconnected(Exception):
    """The client closed its connection before it had received the response."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; if the client disconnects meanwhile, cancel it and raise ClientDisconnected.

    The request's body must have been read before the call, because this function discards everything that the client
    still sends.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        current_record().is_gone = True
        raise ClientDisconnected
    finally:
        for running in (task, watch):
            running.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A streaming HTTP response that sends events as they are generated.

    At the end, or if the client disconnects, the generation is closed, which cancels choices that still run.
    """

    def __init__(self, generation: Generation, events: AsyncGenerator[bytes, None]) -> None:
        # Proxies must neither store nor collect events.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation, self._events = generation, events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self.stream_response(send))
        except ClientDisconnected:
            log.debug("a client disconnected during a stream")
        finally:
            self._generation.close()
            await self._events.aclose()


class _ReservedAnswer(Response):
    """A long HTTP response that keeps its reservation in the memory budget until the client has read it."""

    def __init__(self, content: bytes, memory: Reservation) -> None:
        super().__init__(media_type="application/json", headers={"content-length": str(len(content))})
        self._content, self._memory = content, memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._memory:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, len(self._content), _CHUNK_BYTES):
                piece = self._content[at : at + _CHUNK_BYTES]
                more = at + _CHUNK_BYTES < len(self._content)
                await send({"type": "http.response.body", "body": piece, "more_body": more})


class Answers:
    """Creates the HTTP responses with generated text.

    If the operator or the client demands it, the sizes and times of a stream's events are obfuscated.
    """

    def __init__(self, worker: Worker, settings: ServerSettings, lanes: FairExecutors) -> None:
        self._worker, self._settings, self._lanes = worker, settings, lanes
        self._unsent = SharedBudget(settings.limits.max_answers_bytes, "long answers")

    def stream(self, answer: Answer, options: StreamOptions) -> Response:
        settings, generation = self._settings, answer.generation
        is_declined = options.include_obfuscation is False or options.include_drafts  # drafts defeat obfuscation
        if settings.obfuscation == "always" or (settings.obfuscation == "default" and not is_declined):
            options = options.model_copy(update={"include_obfuscation": True})

        answer.stream(options)
        answer.spelling = TokenAttribution(partial(self._make_text_stream, answer))
        if not answer.pad:
            return EventStream(generation, events(answer, settings.keep_alive_s))
        streams = [self._make_text_stream(answer, index) for index in range(len(generation.choices))]
        pieces = EqualChunks(streams, settings.obfuscation_tokens)
        return EventStream(generation, obfuscated_events(answer, pieces, self._pace(), settings.keep_alive_s))

    async def whole(self, answer: Answer, receive: Receive) -> Response:
        """Return the complete response after all choices have ended.

        Raises ClientDisconnected if the client disconnects before.
        """
        is_even, generation = self._settings.obfuscation == "always", answer.generation
        size = self._settings.obfuscation_tokens
        finish = finish_at_tick(generation, self._pace(), size) if is_even else generation.finish()
        await until_disconnect(receive, finish)
        answer.spelling = TokenAttribution(partial(self._make_text_stream, answer))

        def write() -> bytes:
            content = json_text(answer.whole())
            return padded(content) if is_even else content

        return self.response(write() if answer.is_short else await self._lanes.answers.run(write))

    def _make_text_stream(self, answer: Answer, index: int, *, stops: bool = True) -> TextStream:
        engine, generation = self._worker.loaded_engine, answer.generation
        assert engine is not None and generation.sampling is not None  # every generation was submitted
        prompt = generation.prompts[answer.prompt_index(index)]
        return TextStream.following(codec_of(engine), generation.sampling, prompt, stops=stops)

    def response(self, content: bytes) -> Response:
        """Return a JSON response. Raises QueueFull if too many bytes of long responses wait for slow clients."""
        if len(content) <= _CHUNK_BYTES:
            return Response(content, media_type="application/json")
        return _ReservedAnswer(content, self._unsent.reserve(len(content)))

    def _pace(self) -> TickClock:
        return TickClock(self._settings.obfuscation_interval_s, lambda: self._worker.hurries)
