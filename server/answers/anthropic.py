"""A message for Anthropic's clients: its blocks, its body, and the stream of events that tells of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic_core

from server.answers.chat import Event, NamedEvents, Part, Runs, is_cut
from server.answers.wire import encode_events
from server.base.errors import anthropic_error_body
from server.base.settings import ServerSettings
from server.running.generation import Choice, Usage
from server.schema.body import Body
from server.tools.messages import Messages, ToolCall

if TYPE_CHECKING:
    from ssd.engine import RequestOutput


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


class AnthropicAnswer(NamedEvents):
    """/v1/messages. It has one choice."""

    id_prefix, object_name = "msg_", "message"

    keep_alive = encode_events([("ping", {"type": "ping"})], pad=False)

    def __init__(self, settings: ServerSettings, asked: Body, **options: Any) -> None:
        super().__init__(settings, asked, **options)
        self._blocks = AnthropicBlocks(self._messages)

    def whole(self) -> dict[str, Any]:
        """What the events of a stream come to, but for a cut call."""
        choice = self.generation.choices[0]
        self._blocks.push("".join(choice.text), ended=True)
        if is_cut(choice):
            self._blocks.leave_out_cut_call()
        self._blocks.finish()
        return {**self._message(self._blocks.done), **self._stopped(choice)}

    async def beginning(self) -> bytes:
        """The message as it begins; what of its prompt is cached is not known yet."""
        return await self.written(lambda: self.named([{"type": "message_start", "message": self._message([])}]))

    def piece(self, _index: int, output: RequestOutput, _usage: Usage | None = None) -> bytes:
        """What the message has said."""
        return self.named(self._blocks.push(output.text, ended=output.finish_reason is not None))

    async def closing(self) -> bytes:
        """The end of the last block, and how the message ended."""
        delta = self._stopped(self.generation.choices[0])
        ended = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        return self.named([*self._blocks.finish(), ended, {"type": "message_stop"}])

    def failed(self, error: Exception) -> bytes:
        """As above, in their form."""
        return encode_events([("error", anthropic_error_body(error))], pad=False)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "type": self.object_name, "role": "assistant", "model": self._common["model"],
            "content": content, "stop_reason": None, "stop_sequence": None, "usage": self._usage(),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        """Token counts as Anthropic has them: those that came from a cache are no input tokens."""
        usage = self.generation.usage
        counts: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if usage.reasoning_tokens is not None:
            counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return counts

    def _stopped(self, choice: Choice) -> dict[str, Any]:
        """How a message ended; the text was taken apart before."""
        reason = choice.finish_reason
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        calls = self._messages is not None and self._messages.of(0).finish_reason(reason) == "tool_calls"
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
