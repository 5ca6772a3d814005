"""The tools of an Anthropic conversation, as a chat completion has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from server.schema.parts import Part
from ssd.errors import RequestError, shown

_WITHOUT: Mapping[str, tuple[Any, ...]] = {"defer_loading": (False,), "allowed_callers": (["direct"],)}
"""Fields of a tool that change what the model is told, and values that mean "without it"."""
_HINTS = frozenset({"cache_control", "eager_input_streaming", "strict"})
"""What may be left unread: forced calls follow their schema, ``strict`` or not, and arguments come as they are made."""
_NAMES = {"name": "name", "description": "description", "input_schema": "parameters"}


class ToolChoice(Part):
    """Which of the tools are called. "any" and "tool" are held to by a grammar."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=128)
    disable_parallel_tool_use: bool | None = None

    def chat_fields(self) -> dict[str, Any]:
        """``tool_choice`` and ``parallel_tool_calls``; raises RequestError for a tool without a name."""
        parallel = not self.disable_parallel_tool_use
        if self.type != "tool":
            choice = "required" if self.type == "any" else self.type
            return {"tool_choice": choice, "parallel_tool_calls": parallel}
        if self.name is None:
            raise RequestError('tool_choice of type "tool" needs the name of one', param="tool_choice")
        choice_of_one = {"type": "function", "function": {"name": self.name}}
        return {"tool_choice": choice_of_one, "parallel_tool_calls": parallel}


def chat_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Functions; raises RequestError for any other tool, since this server runs none itself."""
    return [{"type": "function", "function": _function(tool, f"tools[{number}]")} for number, tool in enumerate(tools)]


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _wrong(f"{where} must be an object, got {type(tool).__name__}")
    if tool.get("type") not in (None, "custom"):
        raise _wrong(
            f'{where} is of type {shown(tool["type"])}: only tools of type "custom" are known, with a name, a '
            "description and an input_schema, and clients run them"
        )
    for name, value in tool.items():
        if value is None or name == "type" or name in _NAMES or name in _HINTS or value in _WITHOUT.get(name, ()):
            continue
        raise _wrong(f"{where} has the field {shown(name)}, which is not supported: leave it out")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise _wrong(f"{where}.input_schema must be an object, got {shown(tool.get('input_schema'))}")
    return {there: tool[here] for here, there in _NAMES.items() if tool.get(here) is not None}


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="tools")
