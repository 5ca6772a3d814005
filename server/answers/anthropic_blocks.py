"""The content of a message for Anthropic's clients: blocks, and the events that tell of them."""

from __future__ import annotations

from typing import Any

import pydantic_core

from server.answers.runs import Part, Runs
from server.tools.messages import Messages, ToolCall

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
