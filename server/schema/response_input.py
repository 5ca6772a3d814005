"""The input of a response, as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.schema.conversation import Conversation
from ssd.errors import RequestError, shown


def messages_of(instructions: str | None, items: str | list[Any]) -> list[dict[str, Any]]:
    """Messages as /v1/chat/completions takes them, ``instructions`` first. O(items and their text).

    Reasoning, text and calls that an assistant gave one after the other are one message. Raises RequestError
    (``param="input"``) for an item that cannot become a message, and names it.
    """
    conversation = _Items()
    if instructions is not None:
        conversation.add("system", instructions)
    if isinstance(items, str):
        conversation.add("user", items)
    else:
        for number, item in enumerate(items):
            conversation.take(item, f"input[{number}]")
    if not conversation.messages:
        raise _wrong("input is empty: give a text or at least one item")
    return conversation.messages


class _Items(Conversation):
    """Messages as they are put together from items."""

    def take(self, item: Any, where: str) -> None:
        """Add what an item says."""
        if not isinstance(item, Mapping):
            raise _wrong(f"{where} must be an object, got {type(item).__name__}")
        kind = item.get("type", "message")
        takes = _TAKES.get(kind) if isinstance(kind, str) else None
        if takes is None:
            raise _wrong(f"{where} is of type {shown(kind)}, which is {_why_not(kind)}: {', '.join(_TAKES)} are taken")
        takes(self, item, where)

    def message(self, item: Mapping[str, Any], where: str) -> None:
        """What anybody says."""
        role, text = item.get("role"), _text_of(item, "content", where)
        if role == "assistant":
            self.assistant("content")["content"] = text
        else:
            self.add(_string(item, "role", where), text)

    def function_call(self, item: Mapping[str, Any], where: str) -> None:
        """A call the assistant made."""
        name, arguments = _string(item, "name", where), _string(item, "arguments", where)
        self.call(name, arguments, _string(item, "call_id", where))

    def function_call_output(self, item: Mapping[str, Any], where: str) -> None:
        """What came of a call."""
        call = {} if item.get("call_id") is None else {"tool_call_id": _string(item, "call_id", where)}
        self.add("tool", _text_of(item, "output", where), **call)

    def reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """What the assistant thought; nothing where the item holds no plain text."""
        if item.get("content"):
            self.assistant("reasoning_content")["reasoning_content"] = _text_of(item, "content", where)


_TAKES: dict[str, Callable[[_Items, Mapping[str, Any], str], None]] = {
    "message": _Items.message,
    "function_call": _Items.function_call,
    "function_call_output": _Items.function_call_output,
    "reasoning": _Items.reasoning,
}
_TEXT_OF = {
    "input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text",
}  # fmt: skip
"""Parts of a text, and where each has it."""


def _why_not(kind: Any) -> str:
    if kind == "item_reference":
        return "kept nowhere: this server stores no items"
    return "no part of a conversation here"


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name} must be a string, got {shown(value)}")
    return value


def _text_of(item: Mapping[str, Any], name: str, where: str) -> str:
    """A string, or the strings of a list of parts, which follow each other in lines."""
    content = item.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{where}.{name} must be a string or a list of parts, got {shown(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _TEXT_OF:
            raise _wrong(f"{where}.{name}[{number}] is of type {shown(kind)}: this model takes text parts only")
        texts.append(_string(part, _TEXT_OF[kind], f"{where}.{name}[{number}]"))
    return "\n".join(texts)


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="input")
