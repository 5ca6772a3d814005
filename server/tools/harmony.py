"""The harmony format of gpt-oss: messages of a channel each, some of them to a function.

OpenAI's own library for it reads tokens, not text, and loads their vocabulary from the network.
"""

from __future__ import annotations

import re

from server.tools.functions import Functions
from server.tools.pieces import Pieces, Reader
from server.tools.scanner import Markers, Scanner, Sink, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
SPECIAL_TOKENS = frozenset({START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN})

_BODY_ENDS = Markers(END, CALL, RETURN, START, CHANNEL)
_HEADER_TEXT = re.compile(r"[^<]+")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(functions: Functions, *, calls: bool) -> Reader:
    """Reads a message; ``calls`` : what is for a function is a call, content otherwise."""

    def read(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        seen: set[str] = set()
        while (yield from _at_header(scanner)):
            header = yield from _read_header(scanner)
            if header is None:
                break
            scanner.forget()
            name = _function(header, functions) if calls else None
            if name:
                yield from _read_call(scanner, pieces, name)
            else:
                channel = _CHANNEL.search(header)
                private = channel is not None and (channel[1] == "analysis" or "to=" in header)
                kind = "reasoning" if private and (calls or "to=" not in header) else "content"
                sink: Sink = pieces.reasoning if kind == "reasoning" else pieces.content
                if kind in seen:
                    sink("\n")
                seen.add(kind)
                yield from _read_body(scanner, sink)
                if kind == "reasoning":
                    pieces.end_reasoning(complete=False)
            yield from scanner.literal(END, CALL, RETURN)
            scanner.forget()

    return read


def _at_header(scanner: Scanner) -> Steps[bool]:
    yield from scanner.space()
    marker = yield from scanner.literal(START, CHANNEL, MESSAGE, "to=")
    return bool(marker)


def _read_header(scanner: Scanner) -> Steps[str | None]:
    """All of it up to the message; None where it is no header."""
    header = [scanner.trail()]
    if header[0].endswith(MESSAGE):
        return header[0]
    while True:
        yield from scanner.run(_HEADER_TEXT, header.append)
        marker = yield from scanner.literal(CHANNEL, CONSTRAIN, MESSAGE)
        header.append(scanner.trail())
        if marker == MESSAGE:
            return "".join(header)
        if not marker:
            scanner.keep("".join(header))
            return None


def _function(header: str, functions: Functions) -> str | None:
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        return None
    name = recipient[1].removeprefix("functions.")
    return name if name and (name != recipient[1] or name in functions) else None


def _read_call(scanner: Scanner, pieces: Pieces, name: str) -> Steps[None]:
    pieces.call(name)
    yield from scanner.space()
    scanner.forget()
    written = False

    def arguments(text: str) -> None:
        nonlocal written
        written = True
        pieces.arguments(text)

    if (yield from scanner.peek()) == "{":  # in its strings the markers are text
        yield from scanner.value(arguments)
    if (yield from _read_body(scanner, arguments)) and not written:
        pieces.arguments("{}")


def _read_body(scanner: Scanner, sink: Sink) -> Steps[bool]:
    """Up to the marker that ends it, which is not read; whether there is one."""
    return bool((yield from scanner.until(_BODY_ENDS, sink, read_marker=False)))
