"""The tools of a response, as a chat completion has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd.errors import RequestError, shown

_OF_A_FUNCTION = ("name", "description", "parameters", "strict")


def chat_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Functions; raises RequestError for any other tool, since this server runs none itself."""
    return [{"type": "function", "function": _function(tool, f"tools[{number}]")} for number, tool in enumerate(tools)]


def chat_tool_choice(choice: Any) -> Any:
    """A word as it is; a function or allowed functions as chat completions name them. Raises RequestError."""
    if isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return _named(choice)
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        if not isinstance(allowed, list) or not all(isinstance(tool, Mapping) for tool in allowed):
            raise _wrong("tool_choice.tools must be a list of tools")
        tools = [_named(tool) for tool in allowed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise _wrong(f"tool_choice is of type {shown(kind)}: say none, auto, required, or name a function or allowed_tools")


def _function(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise RequestError(
            f"{where} is of type {shown(kind)}: this server runs no tools itself, give functions", param="tools"
        )
    return {name: tool[name] for name in _OF_A_FUNCTION if tool.get(name) is not None}


def _named(choice: Mapping[str, Any]) -> dict[str, Any]:
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise _wrong("tool_choice must name functions, as type and name")
    return {"type": "function", "function": {"name": choice["name"]}}


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="tool_choice")
