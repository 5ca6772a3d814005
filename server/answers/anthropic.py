"""A message for Anthropic's clients: its blocks, its body, and the stream of events that tells of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pydantic_core

from server.answers.chat import ChatBodies, Part, Runs, is_cut
from server.answers.stream import EventWriter, encode_events, filler
from server.base.errors import anthropic_error_body
from server.running.generation import Choice, Generation, Usage
from server.schema.generate import StreamOptions
from server.tools.messages import Messages, ToolCall
from ssd.errors import SSDError

if TYPE_CHECKING:
    from ssd.engine import RequestOutput


Event = dict[str, Any]

_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
           "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip
"""By the kind of a block: the type of its deltas, and where they have what was said."""


class _Block:
    """One block while it grows. Pieces are joined once, at its end."""

    def __init__(self, index: int, part: Part) -> None:
        self.index = index
        self.part = part
        self.kind = "tool_use" if isinstance(part, ToolCall) else "thinking" if part == "reasoning" else "text"
        self._pieces: list[str] = []

    def begun(self) -> Event:
        """The event that it begins."""
        return {"type": "content_block_start", "index": self.index, "content_block": self.body("")}

    def delta(self, said: str) -> Event:
        """The event of more of it."""
        self._pieces.append(said)
        kind, name = _DELTAS[self.kind]
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, name: said}}

    def ended(self) -> Event:
        """The event that it has ended."""
        return {"type": "content_block_stop", "index": self.index}

    def whole(self) -> dict[str, Any]:
        """The block with all that was said."""
        return self.body("".join(self._pieces))

    def body(self, said: str) -> dict[str, Any]:
        """The block around what was said."""
        if isinstance(self.part, ToolCall):
            return {"type": "tool_use", "id": self.part.id, "name": self.part.name, "input": _object(said)}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": said, "signature": ""}  # nobody has to prove who thought it
        return {"type": "text", "text": said}


class AnthropicBlocks:
    """Puts a message together as blocks, one after the other, from its text."""

    def __init__(self, messages: Messages | None) -> None:
        """``messages`` : takes the text apart; None where all of it is content."""
        self.done: list[dict[str, Any]] = []
        """The blocks that have ended."""
        self._runs = Runs(messages)
        self._open: _Block | None = None

    def push(self, text: str, *, ended: bool) -> list[Event]:
        """The events of the next text; ``ended`` : it is the last."""
        events: list[Event] = []
        for part, said in self._runs.push(text, ended=ended):
            block = self._open
            if block is None or block.part is not part:
                events += self._end()
                block = self._open = _Block(len(self.done), part)
                events.append(block.begun())
            if said:
                events.append(block.delta(said))
        return events

    def leave_out_cut_call(self) -> None:
        """The last block is left out where it is a call whose arguments are no JSON."""
        if self._open is not None and isinstance(self._open.part, ToolCall) and not self._open.part.is_json:
            self._open = None

    def finish(self) -> list[Event]:
        """The events that end the last block, which is an empty text where nothing was said."""
        events: list[Event] = []
        if self._open is None and not self.done:
            self._open = _Block(0, "content")
            events.append(self._open.begun())
        return events + self._end()

    def _end(self) -> list[Event]:
        if self._open is None:
            return []
        ended, self._open = self._open, None
        self.done.append(ended.whole())
        return [ended.ended()]


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, as far as they go where they were cut."""
    try:
        found = pydantic_core.from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class AnthropicBodies(ChatBodies):
    """/v1/messages. It has one choice."""

    id_prefix, object_name = "msg_", "message"

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of a message that is not streamed: what the events of a stream come to, but for a cut call."""
        choice = generation.choices[0]
        blocks = self.blocks()
        blocks.push("".join(choice.text), ended=True)
        if is_cut(choice):
            blocks.leave_out_cut_call()
        blocks.finish()
        message = self.message(blocks.done)
        return {**message, **self.stopped(choice), "usage": usage_of(generation)}

    def blocks(self) -> AnthropicBlocks:
        """What puts the content together; for the whole or for a stream."""
        return AnthropicBlocks(self._messages)

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        """All of a message but how it ended and what it took."""
        return {
            "id": self.id, "type": self.object_name, "role": "assistant", "model": self._common["model"],
            "content": content, "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    def stopped(self, choice: Choice) -> dict[str, Any]:
        """How a message ended; the text was taken apart before."""
        reason = choice.finish_reason
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        calls = self._messages is not None and self._messages.of(0).finish_reason(reason) == "tool_calls"
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


def usage_of(generation: Generation) -> dict[str, Any]:
    """Token counts as Anthropic has them: those that came from a cache are no input tokens."""
    usage = generation.usage
    counts: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


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
