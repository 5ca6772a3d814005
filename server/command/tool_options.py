"""Options of messages: how the model writes tool calls, and what it thinks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass

from server.intake.message_formats import AUTO, OFF
from server.tools.registry import REASONING_PARSERS, TOOL_CALL_PARSERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """Checked."""

    tool_call_parser: str
    reasoning_parser: str
    exclude_tools_when_tool_choice_none: bool


def add_tool_options(parser: argparse.ArgumentParser) -> None:
    """The group "tools"."""
    add = parser.add_argument_group("tools").add_argument
    add(
        "--tool-call-parser", type=_name_of(TOOL_CALL_PARSERS), default=AUTO, metavar="NAME",
        help="how the model writes tool calls: auto (as its chat template says), none, or one of "
        f"{', '.join(TOOL_CALL_PARSERS)} (default: %(default)s)",
    )  # fmt: skip
    add(
        "--reasoning-parser", type=_name_of(REASONING_PARSERS), default=AUTO, metavar="NAME",
        help="how it writes what it thinks before it answers: auto, none, or one of "
        f"{', '.join(REASONING_PARSERS)} (default: %(default)s)",
    )  # fmt: skip
    add("--enable-auto-tool-choice", action="store_true", help=argparse.SUPPRESS)  # vLLM's; here it always is
    add(
        "--exclude-tools-when-tool-choice-none", action="store_true",
        help="do not tell the model of tools where a request's tool_choice is none",
    )  # fmt: skip


def tool_options_of(found: argparse.Namespace) -> ToolOptions:
    """What was asked for."""
    return ToolOptions(
        tool_call_parser=found.tool_call_parser,
        reasoning_parser=found.reasoning_parser,
        exclude_tools_when_tool_choice_none=found.exclude_tools_when_tool_choice_none,
    )


def _name_of(known: Collection[str]) -> Callable[[str], str]:
    def name(text: str) -> str:
        if text not in (AUTO, OFF, *known):
            raise argparse.ArgumentTypeError(f"no parser {text!r}: give {AUTO}, {OFF} or one of {', '.join(known)}")
        return text

    return name
