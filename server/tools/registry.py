"""The formats by name: what takes a message apart, which special tokens it must see.

vLLM's names, parsers of our own: transformers' ``parse_response`` and parsers of partial JSON read a whole text
anew for each piece, and openai-harmony reads tokens of a vocabulary that it loads from the network.
"""

from __future__ import annotations

from server.tools.formats import REASONING_FORMATS, TOOL_FORMATS, begins_of_calls, calls_reader
from server.tools.functions import Functions
from server.tools.harmony import harmony
from server.tools.message import MessageParser
from server.tools.pieces import Reader, StreamParser
from server.tools.reasoning import reasoning as reasoning_reader
from ssd.errors import ConfigError

TOOL_CALL_PARSERS = {name: known.about for name, known in TOOL_FORMATS.items()}
"""Formats of tool calls, by vLLM's names, and what each looks like."""

REASONING_PARSERS = {name: known.about for name, known in REASONING_FORMATS.items()}
"""Formats of reasoning, by vLLM's names, and what each looks like."""


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
    functions = functions or {}
    readers: list[Reader] = []
    if reasoning is not None:
        thinking = REASONING_FORMATS[reasoning].form
        begins = () if tool_call is None else begins_of_calls(TOOL_FORMATS[tool_call].form)
        readers.append(
            harmony(functions, calls=tool_call == "openai")
            if thinking is None
            else reasoning_reader(thinking, prompt, begins)
        )
    if tool_call is not None:
        form = TOOL_FORMATS[tool_call].form
        if form is not None:
            readers.append(calls_reader(form, functions))
        elif reasoning != "openai_gptoss":
            readers.append(harmony(functions, calls=True))
    return StreamParser(*readers)


def check_names(tool_call: str | None, reasoning: str | None) -> None:
    """Raise ConfigError where one is no format's name; None is none."""
    if tool_call is not None and tool_call not in TOOL_FORMATS:
        raise ConfigError(f"no tool-call parser {tool_call!r}: give auto, none or one of {', '.join(TOOL_FORMATS)}")
    if reasoning is not None and reasoning not in REASONING_FORMATS:
        raise ConfigError(
            f"no reasoning parser {reasoning!r}: give auto, none or one of {', '.join(REASONING_FORMATS)}"
        )


def special_tokens(tool_call: str | None, reasoning: str | None) -> frozenset[str]:
    """Markers that may be special tokens of the vocabulary and must stay in the text that a parser is given."""
    of_calls = TOOL_FORMATS[tool_call].special if tool_call is not None else frozenset()
    return of_calls | (REASONING_FORMATS[reasoning].special if reasoning is not None else frozenset())
