"""Calls that are JSON objects of a name and arguments: the formats of most models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from server.tools.pieces import Pieces, Reader, after_markers
from server.tools.scanner import Scanner, Steps

Accepts = Callable[[str], bool]
"""Whether a name is a function's."""

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class JsonFormat:
    """What stands around the objects.

    ``begin`` : markers, after each of which there is one object, several, or a list. ``bare`` : the message may begin
    with them, without a marker. ``end`` : what may follow; a model often leaves it out. ``between`` : what may stand
    between two objects that are no list.
    """

    begin: tuple[str, ...] = ()
    bare: bool = False
    end: tuple[str, ...] = ()
    between: tuple[str, ...] = (";", ",")


def json_calls(form: JsonFormat, accepts: Accepts) -> Reader:
    """Reads a message with such calls."""

    def read_calls(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        return read_objects(scanner, pieces, form, accepts)

    return after_markers(form.begin, ("{", "[") if form.bare else (), read_calls)


def read_objects(scanner: Scanner, pieces: Pieces, form: JsonFormat, accepts: Accepts) -> Steps[None]:
    """A list of calls, or one after the other, and what ends them; what is none of it stays in the trail or unread."""
    in_list = bool((yield from scanner.literal("[")))
    while True:
        yield from scanner.space()
        if not (yield from _Object(scanner, pieces, accepts).read()):
            return
        yield from scanner.space()
        if in_list:
            if not (yield from scanner.literal(",")):
                break
        elif not (yield from scanner.literal(*form.between)) and (yield from scanner.peek()) != "{":
            break
    if in_list:
        if not (yield from scanner.literal("]")):
            return
        scanner.forget()
        yield from scanner.space()
    if form.end and (yield from scanner.literal(*form.end)):
        scanner.forget()


class _Object:
    """One call that is being read. It begins when name and arguments are known; until then all is in the trail."""

    def __init__(self, scanner: Scanner, pieces: Pieces, accepts: Accepts) -> None:
        self._scanner = scanner
        self._pieces = pieces
        self._accepts = accepts
        self._name: str | None = None
        self._held: str | None = None
        """Arguments that came before the name."""
        self._begun = False

    def read(self) -> Steps[bool]:
        """Whether it is complete."""
        scanner = self._scanner
        if not (yield from scanner.literal("{")):
            return False
        while True:
            if not (yield from self._member()):
                return False
            yield from scanner.space()
            if not (yield from scanner.literal(",")):
                break
        if self._name is None or not (yield from scanner.literal("}")):
            return False
        if not self._begun:
            self._begin("{}")
        scanner.forget()
        return True

    def _begin(self, arguments: str = "") -> None:
        assert self._name is not None
        self._scanner.forget()
        self._pieces.call(self._name)
        self._pieces.arguments(arguments)
        self._begun = True

    def _member(self) -> Steps[bool]:
        scanner = self._scanner
        yield from scanner.space()
        key = yield from scanner.string()
        yield from scanner.space()
        if key is None or not (yield from scanner.literal(":")):
            return False
        yield from scanner.space()
        if key == "name" and self._name is None:
            return (yield from self._read_name())
        if key in _ARGUMENTS and not self._begun and self._held is None:
            return (yield from self._read_arguments())
        return (yield from scanner.value())

    def _read_name(self) -> Steps[bool]:
        self._name = yield from self._scanner.string()
        if not self._name or not self._accepts(self._name):
            return False
        if self._held is not None:
            self._begin(self._held)
        return True

    def _read_arguments(self) -> Steps[bool]:
        """An object, an object that is written as a string, or null."""
        scanner = self._scanner
        first = yield from scanner.peek()
        if first == "{" and self._name is not None:
            self._begin()
            return (yield from scanner.value(self._pieces.arguments))
        if first == "{":
            held: list[str] = []
            complete = yield from scanner.value(held.append)
            arguments = "".join(held)
            scanner.keep(arguments)
        elif first == '"':
            arguments = (yield from scanner.string()) or ""
            complete = _is_object(arguments)
        else:
            complete = bool((yield from scanner.literal("null")))
            arguments = "{}"
        if complete and self._name is not None:
            self._begin(arguments)
        else:
            self._held = arguments
        return complete


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
