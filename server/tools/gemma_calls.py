"""Calls as Gemma 4 writes them: ``call:name{key:value,...}``, strings as they are between marks of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.tools.functions import is_json, json_characters, json_string
from server.tools.json_calls import Accepts
from server.tools.pieces import Pieces, Reader, after_markers
from server.tools.scanner import Markers, Scanner, Sink, Steps

_NAME = re.compile(r"[^\s{}<>:,]+")
_KEY = re.compile(r"[^:{}\[\]<>,]+")
_SCALAR = re.compile(r"[^,{}\[\]<>]+")


@dataclass(frozen=True)
class GemmaFormat:
    """``begin``, ``call``, ``end`` : before and behind a call. ``quote`` : at both ends of a string."""

    begin: str = "<|tool_call>"
    call: str = "call:"
    end: str = "<tool_call|>"
    quote: str = '<|"|>'


def gemma_calls(form: GemmaFormat, accepts: Accepts) -> Reader:
    """Reads a message with such calls."""
    quote = Markers(form.quote)

    def read_calls(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        if not (yield from scanner.literal(form.call)):
            return
        name = yield from scanner.word(_NAME)
        if not accepts(name) or (yield from scanner.peek()) != "{":
            return
        pieces.call(name)
        scanner.forget()
        complete = yield from value(scanner, pieces.arguments)
        scanner.forget()
        if complete and (yield from scanner.literal(form.end)):
            scanner.forget()

    def value(scanner: Scanner, sink: Sink) -> Steps[bool]:
        """As JSON; whether it is complete."""
        if (yield from scanner.literal(form.quote)):
            sink('"')
            ended = yield from scanner.until(quote, lambda text: sink(json_characters(text)))
            sink('"' if ended else "")
            return bool(ended)
        opened = yield from scanner.literal("{", "[")
        if not opened:
            scalar = (yield from scanner.word(_SCALAR)).strip()
            sink(scalar if is_json(scalar) else json_string(scalar))
            return bool(scalar)
        sink(opened)
        close = "}" if opened == "{" else "]"
        yield from scanner.space()
        while not (yield from scanner.literal(close)):
            if opened == "{" and not (yield from key(scanner, sink)):
                return False
            if not (yield from value(scanner, sink)):
                return False
            yield from scanner.space()
            if (yield from scanner.literal(",")):
                sink(", ")
                yield from scanner.space()
            elif (yield from scanner.peek()) != close:
                return False
        sink(close)
        return True

    def key(scanner: Scanner, sink: Sink) -> Steps[bool]:
        written = list[str]()
        if (yield from scanner.literal(form.quote)):
            yield from scanner.until(quote, written.append)
        else:
            written.append((yield from scanner.word(_KEY)).strip())
        if not (yield from scanner.literal(":")):
            return False
        sink(f"{json_string(''.join(written))}: ")
        yield from scanner.space()
        return True

    return after_markers((form.begin,), (), read_calls)
