"""How the model that is served writes tool calls and reasoning: found once for each chat template."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from server.tools.formats import detect
from ssd.text.messages import knows_tools

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec

AUTO, OFF = "auto", "none"
"""Values of an option beside the names of parsers."""

IN_WORDS = "hermes"
"""The format of calls where the template knows of no tools, see `ssd.text.messages`."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Names of parsers, None for none. ``in_words`` : the template is not told of tools, the model is all the same."""

    tool_call: str | None = None
    reasoning: str | None = None
    in_words: bool = False

    @property
    def has_short_call_ids(self) -> bool:
        """Whether the template takes calls of short names alone."""
        return self.tool_call == "mistral"


class MessageFormats:
    """The formats of the templates that are in use."""

    def __init__(self, tool_call: str, reasoning: str) -> None:
        """``tool_call``, ``reasoning`` : a parser's name, or "auto" for what the template speaks of, or "none"."""
        self._tool_call, self._reasoning = tool_call, reasoning
        self._of_template = lru_cache(maxsize=8)(self._find)

    def of(self, codec: TextCodec, chat_template: str | None, *, with_tools: bool) -> MessageFormat:
        """The format of a conversation; ``chat_template`` : the request's own. O(characters) for a new one."""
        if self._tool_call == self._reasoning == OFF:
            return MessageFormat()
        template = codec.chat_template(chat_template, with_tools=with_tools)
        return MessageFormat() if template is None else self._of_template(template)

    def _find(self, template: str) -> MessageFormat:
        tool_call, reasoning = detect(template)
        if self._tool_call != AUTO:
            tool_call = None if self._tool_call == OFF else self._tool_call
        if self._reasoning != AUTO:
            reasoning = None if self._reasoning == OFF else self._reasoning
        # Who names another format has told the model of it, and of the tools, himself.
        in_words = not knows_tools(template) and (self._tool_call == AUTO or tool_call == IN_WORDS)
        return MessageFormat(IN_WORDS if in_words else tool_call, reasoning, in_words)
