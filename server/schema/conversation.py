"""Messages of a conversation, put together from what other APIs have in its place."""

from __future__ import annotations

from typing import Any, Literal

AssistantField = Literal["reasoning_content", "content", "tool_calls"]
_ORDER: tuple[AssistantField, ...] = ("reasoning_content", "content", "tool_calls")
"""What one message of an assistant says, in this order; what comes again or too late begins another one."""


class Conversation:
    """Messages as /v1/chat/completions takes them. Reasoning, text and calls that follow each other are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._said = -1
        """Which of `_ORDER` the last message has come to; -1 where it is not an assistant's."""

    def add(self, role: str, content: str, **others: Any) -> None:
        """A message of its own."""
        self.messages.append({"role": role, "content": content, **others})
        self._said = -1

    def assistant(self, says: AssistantField) -> dict[str, Any]:
        """The assistant's message that goes on with this: the last one, or another."""
        rank = _ORDER.index(says)
        if self._said < 0 or rank < self._said or (rank == self._said and says != "tool_calls"):
            self.add("assistant", "")
        self._said = rank
        return self.messages[-1]

    def call(self, name: str, arguments: str, call_id: str) -> None:
        """A call the assistant made; ``arguments`` : JSON."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self.assistant("tool_calls").setdefault("tool_calls", []).append(call)
