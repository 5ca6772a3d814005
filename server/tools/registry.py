"""The formats by name: what takes a message apart, which special tokens it must see, what constrains its calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from server.tools.message import MessageDelta, MessageParser
from ssd.errors import ConfigError

TOOL_CALL_PARSERS: dict[str, str] = {}
"""Formats of tool calls, by vLLM's names, and what each looks like."""

REASONING_PARSERS: dict[str, str] = {}
"""Formats of reasoning, by vLLM's names, and what each looks like."""

Functions = Mapping[str, Mapping[str, Any]]
"""Names of the functions that may be called, each with the JSON schema of its parameters."""


def make_parser(
    tool_call: str | None, reasoning: str | None, *, functions: Functions | None = None, prompt: str = ""
) -> MessageParser:
    """What takes one message apart; None where the message has no such parts. ``reasoning`` comes first, then calls.

    ``functions`` : of the request; formats without types read values by their schemas, those without markers take for
    calls only what calls one of them. ``prompt`` : the end of what the model continues, 64 characters are enough:
    templates that open or close the reasoning themselves are known by it. Raises ConfigError for a name not in
    `TOOL_CALL_PARSERS` or `REASONING_PARSERS`. O(1).
    """
    check_names(tool_call, reasoning)
    return _Content()


def check_names(tool_call: str | None, reasoning: str | None) -> None:
    """Raise ConfigError where one is no format's name; None is none."""
    if tool_call is not None and tool_call not in TOOL_CALL_PARSERS:
        raise ConfigError(
            f"no tool-call parser {tool_call!r}: give one of {', '.join(TOOL_CALL_PARSERS)}, auto or none"
        )
    if reasoning is not None and reasoning not in REASONING_PARSERS:
        raise ConfigError(
            f"no reasoning parser {reasoning!r}: give one of {', '.join(REASONING_PARSERS)}, auto or none"
        )


def special_tokens(tool_call: str | None, reasoning: str | None) -> frozenset[str]:
    """Markers that may be special tokens of the vocabulary and must stay in the text that a parser is given."""
    return frozenset()


def detect(chat_template: str) -> tuple[str | None, str | None]:
    """Names of the tool-call and the reasoning format that a chat template speaks of; None where it speaks of none."""
    return None, None


def call_grammar(
    tool_call: str, functions: Functions, *, parallel: bool = True, special: Collection[str] = ()
) -> str | None:
    """A grammar of one call, or of several where ``parallel``, as the format writes them; None where it has none.

    In llguidance's dialect of Lark; the rule ``start`` is what follows the reasoning. ``special`` : special tokens of
    the vocabulary, which stand for themselves where they are markers of the format. ``json`` is a format of its own,
    ``[{"name": ..., "parameters": ...}]``, that any model can be made to write.
    """
    return None


class _Content:
    """All text is content."""

    def push(self, text: str) -> MessageDelta:
        """What the next text certainly adds."""
        return MessageDelta(content=text)

    def finish(self) -> MessageDelta:
        """Nothing: no text was held back."""
        return MessageDelta()
