"""A message for Anthropic's clients as a stream of events, each with its name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from server.answers.anthropic_blocks import Event
from server.answers.anthropic_bodies import AnthropicBodies, usage_of
from server.answers.stream import EventWriter, encode_events, filler
from server.base.errors import anthropic_error_body
from server.running.generation import Generation, Usage
from server.schema.generate import StreamOptions
from ssd.errors import SSDError

if TYPE_CHECKING:
    from ssd.engine import RequestOutput

log = logging.getLogger(__name__)


class AnthropicEventWriter(EventWriter):
    """Writes the events of one message."""

    end = b""  # its last event says that it is the last
    keep_alive = encode_events([("ping", {"type": "ping"})], pad=False)

    def __init__(self, generation: Generation, bodies: AnthropicBodies, options: StreamOptions) -> None:
        super().__init__(generation, bodies, options)
        self._message = bodies
        self._blocks = bodies.blocks()

    async def beginning(self) -> bytes:
        """The message as it begins; what of its prompt is cached is not known yet."""

        def write() -> bytes:
            message = {**self._message.message([]), "usage": usage_of(self._generation)}
            return self._events([{"type": "message_start", "message": message}])

        return await self._written(write)

    async def opening(self, _index: int, _usage: Usage | None = None) -> bytes:
        """Nothing: a block begins with what it says."""
        return b""

    def piece(self, _index: int, output: RequestOutput, _usage: Usage | None = None) -> bytes:
        """What the message has said."""
        return self._events(self._blocks.push(output.text, ended=output.finish_reason is not None))

    async def closing(self) -> bytes:
        """The end of the last block, and how the message ended."""
        delta = self._message.stopped(self._generation.choices[0])
        ended = {"type": "message_delta", "delta": delta, "usage": usage_of(self._generation)}
        return self._events([*self._blocks.finish(), ended, {"type": "message_stop"}])

    def failure(self, error: Exception) -> bytes:
        """An error is an event, too, and the last."""
        if not isinstance(error, SSDError):
            log.error("a stream failed", exc_info=error)
        return encode_events([("error", anthropic_error_body(error))], pad=False)

    def _events(self, events: Sequence[Event]) -> bytes:
        """Events on the wire. Obfuscated, all of them together fill whole units, be there any or none."""
        if not events:
            return filler() if self.pad else b""
        return encode_events([(event["type"], event) for event in events], pad=self.pad)
