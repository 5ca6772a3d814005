"""A message as it is taken apart while its text arrives: content, reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call of a message.

    ``index`` : which call of the message, from 0. ``name`` : of the function, with the call's first piece and with no
    other. ``arguments`` : the next characters of its JSON text; all pieces together are one JSON object.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What some text added to a message; empty while it may yet become something else."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class MessageParser(Protocol):
    """Takes one message apart; one object a choice, not thread-safe.

    However the text is cut, all deltas together are the same. Text that is no well-formed call is content: nothing a
    model says is lost and nothing raises. O(characters) over the whole message.
    """

    def push(self, text: str) -> MessageDelta:
        """What the next text certainly adds."""

    def finish(self) -> MessageDelta:
        """What was held back, at the end of the text; call it once."""
