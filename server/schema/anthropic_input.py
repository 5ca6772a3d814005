"""The turns of an Anthropic conversation, as the messages of a chat completion."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from server.schema.conversation import Conversation
from ssd.errors import RequestError, shown

_ROLES = ("user", "assistant", "system")
_FIELDS: dict[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller", "toolset_name"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error", "toolset_name"}),
}
"""Blocks, and what each may hold beside its type and ``cache_control``, which is a hint to a cache that needs none."""
_BLOCKS_OF: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def messages_of(system: str | list[Any] | None, turns: list[Any]) -> list[dict[str, Any]]:
    """Messages as /v1/chat/completions takes them, ``system`` first. O(blocks and their text).

    The results of tools become messages of their own. Raises RequestError (``param`` "messages" or "system") for what
    cannot become a message, and names it.
    """
    conversation = _Turns()
    if system is not None:
        conversation.add("system", _joined(_blocks(system, "system", "system", "system"), "system"))
    for number, turn in enumerate(turns):
        conversation.take(turn, f"messages[{number}]")
    return conversation.messages


def goes_on(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last message: the assistant's own, in which it has called nothing."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


class _Turns(Conversation):
    """Messages as they are put together from turns."""

    def take(self, turn: Any, where: str) -> None:
        """Add what a turn says."""
        if not isinstance(turn, Mapping):
            raise _wrong(f"{where} must be an object, got {type(turn).__name__}")
        role = turn.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _wrong(f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
        _require_known(turn, {"role", "content"}, where)
        texts: list[str] = []  # of blocks that follow each other
        for block, at in _blocks(turn.get("content"), role, f"{where}.content", "messages"):
            if block["type"] == "text":
                texts.append(_string(block, "text", at))
                continue
            self._say(role, texts)
            _TAKES[block["type"]](self, block, at)
        self._say(role, texts)

    def thinking(self, block: Mapping[str, Any], at: str) -> None:
        """What the assistant thought."""
        self.assistant("reasoning_content")["reasoning_content"] = _string(block, "thinking", at)

    def redacted_thinking(self, _block: Mapping[str, Any], _at: str) -> None:
        """Nothing: only who wrote it can read it."""

    def tool_use(self, block: Mapping[str, Any], at: str) -> None:
        """A call the assistant made."""
        given = block.get("input")
        if not isinstance(given, Mapping):
            raise _wrong(f"{at}.input must be an object, got {shown(given)}")
        self.call(_string(block, "name", at), json.dumps(given, ensure_ascii=False), _string(block, "id", at))

    def tool_result(self, block: Mapping[str, Any], at: str) -> None:
        """What came of a call; that it went wrong is told in words, where they do not say so."""
        content, is_error = block.get("content"), block.get("is_error")
        if not (is_error is None or isinstance(is_error, bool)):
            raise _wrong(f"{at}.is_error must be true or false, got {shown(is_error)}")
        where = f"{at}.content"
        text = "" if content is None else _joined(_blocks(content, "system", where, "messages"), "messages")
        if is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        self.add("tool", text, tool_call_id=_string(block, "tool_use_id", at))

    def _say(self, role: str, texts: list[str]) -> None:
        """Add texts, which are taken."""
        if not texts:
            return
        text = "\n".join(texts)
        texts.clear()
        if role == "assistant":
            self.assistant("content")["content"] = text
        else:
            self.add(role, text)


_TAKES: dict[str, Callable[[_Turns, Mapping[str, Any], str], None]] = {
    "thinking": _Turns.thinking,
    "redacted_thinking": _Turns.redacted_thinking,
    "tool_use": _Turns.tool_use,
    "tool_result": _Turns.tool_result,
}


def _blocks(content: Any, role: str, where: str, param: str) -> list[tuple[Mapping[str, Any], str]]:
    """The blocks of a content, each with where it is; a string is one of text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise _wrong(f"{where} must be a string or a list of blocks, got {shown(content)}", param)
    found: list[tuple[Mapping[str, Any], str]] = []
    for number, block in enumerate(content):
        at = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str) or kind not in _BLOCKS_OF[role]:
            taken = ", ".join(_BLOCKS_OF[role])
            raise _wrong(f"{at} is of type {shown(kind)}, which this model is not given: {taken} are taken here", param)
        _require_known(block, _FIELDS[kind] | {"type", "cache_control"}, at, param)
        found.append((block, at))
    return found


def _joined(blocks: list[tuple[Mapping[str, Any], str]], param: str) -> str:
    """The text of text blocks, which follow each other in lines."""
    return "\n".join(_string(block, "text", at, param) for block, at in blocks)


def _require_known(
    given: Mapping[str, Any], known: set[str] | frozenset[str], where: str, param: str = "messages"
) -> None:
    name = next((name for name, value in given.items() if value is not None and name not in known), None)
    if name is not None:
        raise _wrong(f"unknown field {shown(f'{where}.{name}')}: remove it, or check its spelling", param)


def _string(given: Mapping[str, Any], name: str, where: str, param: str = "messages") -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name} must be a string, got {shown(value)}", param)
    return value


def _wrong(message: str, param: str = "messages") -> RequestError:
    return RequestError(message, param=param)
