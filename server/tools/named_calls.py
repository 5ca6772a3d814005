"""Calls that are a name, then JSON of arguments, with markers around both: DeepSeek, Kimi, later Mistral."""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.tools.json_calls import Accepts, JsonFormat, read_objects
from server.tools.pieces import Pieces, Reader, in_sections
from server.tools.scanner import Scanner, Steps

_NAME = re.compile(r"[\w.:/-]+")
CALL_ID = "[CALL_ID]"
"""A word follows that names the call; ours have other names."""
_NUMBER = re.compile(r":\d+$")

Sequence = tuple[tuple[str, ...], ...]
"""Literals one after the other, white space between them; of each the alternatives, an empty one where it may lack."""


@dataclass(frozen=True)
class NamedFormat:
    """``section`` : begins several calls, empty where there is no such thing; ``call`` : begins one.

    ``before_name``, ``after_name``, ``after`` : what stands between that, the name, the arguments and the next call.
    ``end`` : of the section. ``or_json`` : a call may be a JSON object of both instead, or a list of them.
    """

    call: str
    section: str = ""
    before_name: Sequence = ()
    after_name: Sequence = ()
    after: Sequence = ()
    end: str = ""
    or_json: bool = False


def named_calls(form: NamedFormat, accepts: Accepts) -> Reader:
    """Reads a message with such calls."""

    def read_calls(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        return _read_calls(scanner, pieces, form, accepts)

    return in_sections((form.section,) if form.section else (), form.call, read_calls)


def _read_calls(scanner: Scanner, pieces: Pieces, form: NamedFormat, accepts: Accepts) -> Steps[None]:
    while True:
        yield from scanner.space()
        if form.or_json and (yield from scanner.peek()) in ("{", "["):
            yield from read_objects(scanner, pieces, JsonFormat(), accepts)
        elif not (yield from _read_call(scanner, pieces, form, accepts)):
            return
        yield from scanner.space()
        if not (yield from scanner.literal(form.call)):
            break
    if form.end and (yield from scanner.literal(form.end)):
        scanner.forget()


def _read_call(scanner: Scanner, pieces: Pieces, form: NamedFormat, accepts: Accepts) -> Steps[bool]:
    if not (yield from _literals(scanner, form.before_name)):
        return False
    name = _NUMBER.sub("", (yield from scanner.word(_NAME)))
    if not name or not accepts(name) or not (yield from _literals(scanner, form.after_name)):
        return False
    yield from scanner.space()
    if (yield from scanner.peek()) != "{":
        return False
    scanner.forget()
    pieces.call(name)
    if not (yield from scanner.value(pieces.arguments)) or not (yield from _literals(scanner, form.after)):
        return False
    scanner.forget()
    return True


def _literals(scanner: Scanner, sequence: Sequence) -> Steps[bool]:
    for options in sequence:
        yield from scanner.space()
        literal = yield from scanner.literal(*options)
        if not literal and "" not in options:
            return False
        if literal == CALL_ID:
            yield from scanner.space()
            yield from scanner.word(_NAME)
    return True
