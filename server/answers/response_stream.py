"""A response as a stream of events, each with its name and its number."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from server.answers.response_bodies import ResponseBodies, status_of
from server.answers.response_items import Event
from server.answers.stream import EventWriter, encode_events, filler
from server.running.generation import Generation, Usage
from server.schema.generate import StreamOptions
from ssd.errors import SSDError

if TYPE_CHECKING:
    from ssd.engine import RequestOutput

log = logging.getLogger(__name__)


class ResponseEventWriter(EventWriter):
    """Writes the events of one response."""

    end = b""  # its last event says that it is the last

    def __init__(self, generation: Generation, bodies: ResponseBodies, options: StreamOptions) -> None:
        super().__init__(generation, bodies, options)
        self._response = bodies
        self._items = bodies.items()
        self._number = 0

    async def beginning(self) -> bytes:
        """The response as it begins, twice: it never waits to be begun."""

        def write() -> bytes:
            response = self._response.in_progress(self._generation)
            kinds = ("response.created", "response.in_progress")
            return self._events([{"type": kind, "response": response} for kind in kinds])

        return await self._written(write)

    async def opening(self, _index: int, _usage: Usage | None = None) -> bytes:
        """Nothing: an item begins with what it says."""
        return b""

    def piece(self, _index: int, output: RequestOutput, _usage: Usage | None = None) -> bytes:
        """What the response has said."""
        logprobs = self._response.logprobs_of(output.logprobs)
        return self._events(self._items.push(output.text, logprobs, ended=output.finish_reason is not None))

    async def closing(self) -> bytes:
        """The end of the last item, and the whole response."""

        def write() -> bytes:
            status = status_of(self._generation.choices[0])
            events = self._items.finish(status)
            whole = self._response.ended(self._generation, self._items)
            return self._events([*events, {"type": f"response.{status}", "response": whole}])

        return await self._written(write)

    def failure(self, error: Exception) -> bytes:
        """A response that failed, with what it has said."""
        if not isinstance(error, SSDError):
            log.error("a stream failed", exc_info=error)
        events = self._items.finish("incomplete")
        failed = self._response.failed(self._generation, self._items, error)
        return self._events([*events, {"type": "response.failed", "response": failed}])

    def _events(self, events: Sequence[Event]) -> bytes:
        """Events on the wire. Obfuscated, all of them together fill whole units, be there any or none."""
        if not events:
            return filler() if self.pad else b""
        numbered = []
        for event in events:
            numbered.append((event["type"], {"type": event["type"], "sequence_number": self._number, **event}))
            self._number += 1
        return encode_events(numbered, pad=self.pad)
