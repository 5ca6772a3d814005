"""Calls whose parameters stand between tags, one after the other: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from server.tools.functions import Functions, json_characters, json_of, json_string, types_of
from server.tools.json_calls import Accepts
from server.tools.pieces import Pieces, Reader, in_sections
from server.tools.scanner import Markers, Scanner, Steps

_NAME = re.compile(r"""[^\s<>"'{}\[\]]+""")
_KEY = re.compile(r"[^<>\n]+")
_ATTRIBUTES = re.compile(r"""\s*["']?(?P<name>[^"'\s]+)["']?(?:\s+string="(?P<string>true|false)")?\s*""")


@dataclass(frozen=True)
class XmlFormat:
    """``section``, ``end`` : around several calls, empty where there is no such thing.

    ``call``, ``after_name``, ``call_end`` : around the name and its parameters. ``key``, ``after_key``, ``value_end`` :
    around the name and the value of a parameter; ``after_key`` one after the other, white space between them.
    ``on_lines`` : values stand on lines of their own, whose ends are not part of them.
    """

    call: str
    call_end: str
    key: str
    after_key: tuple[str, ...]
    value_end: str
    after_name: str = ""
    section: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    on_lines: bool = False


@cache
def _value_ends(form: XmlFormat, *, on_lines: bool) -> Markers:
    """What ends a value. One on lines of its own ends where its tag begins a line, for it may speak of the tag; or at
    the next tag, where a model forgot that.
    """
    if not form.on_lines:
        return Markers(form.value_end)
    if not on_lines:
        return Markers(f"\n{form.value_end}", form.value_end)
    following = [between + tag for between in ("", "\n") for tag in (form.key, form.call_end)]
    return Markers(
        f"\n{form.value_end}", *(form.value_end + tag for tag in following), f"\n{form.key}", f"\n{form.call_end}"
    )


def xml_calls(form: XmlFormat, functions: Functions, accepts: Accepts) -> Reader:
    """Reads a message with such calls; values are read by the types in the schemas of ``functions``."""

    def read_calls(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        return _read_calls(scanner, pieces, form, functions, accepts)

    return in_sections(form.section, form.call, read_calls)


def _read_calls(
    scanner: Scanner, pieces: Pieces, form: XmlFormat, functions: Functions, accepts: Accepts
) -> Steps[None]:
    while True:
        if not (yield from _Call(scanner, pieces, form, functions).read(accepts)):
            return
        yield from scanner.space()
        if form.end and (yield from scanner.literal(*form.end)):
            scanner.forget()
            return
        if not (yield from scanner.literal(form.call)):
            return


class _Call:
    """One call that is being read. It begins when its name is complete; until then all is in the trail."""

    def __init__(self, scanner: Scanner, pieces: Pieces, form: XmlFormat, functions: Functions) -> None:
        self._scanner = scanner
        self._pieces = pieces
        self._form = form
        self._functions = functions
        self._name = ""

    def read(self, accepts: Accepts) -> Steps[bool]:
        """Whether it is complete."""
        scanner, form = self._scanner, self._form
        yield from scanner.space()
        yield from scanner.literal('"', "'")
        self._name = yield from scanner.word(_NAME)
        yield from scanner.literal('"', "'")
        yield from scanner.space()
        if form.after_name:
            named = bool((yield from scanner.literal(form.after_name)))
        else:
            named = (yield from scanner.peek()) == "<"
        if not named or not self._name or not accepts(self._name):
            return False
        self._pieces.call(self._name)
        scanner.forget()
        before = "{"
        while True:
            yield from scanner.space()
            tag = yield from scanner.literal(form.key, form.call_end)
            if tag != form.key:
                break
            if not (yield from self._parameter(before)):
                return False
            before = ", "
        if not tag:
            return False
        self._pieces.arguments("{}" if before == "{" else "}")
        scanner.forget()
        return True

    def _parameter(self, before: str) -> Steps[bool]:
        scanner, pieces = self._scanner, self._pieces
        written = yield from scanner.word(_KEY)
        match = _ATTRIBUTES.fullmatch(written)
        if match is None:
            return False
        for literal in self._form.after_key:
            yield from scanner.space()
            if not (yield from scanner.literal(literal)):
                return False
        on_lines = self._form.on_lines and bool((yield from scanner.literal("\n")))
        scanner.forget()
        types = types_of(self._functions, self._name, match["name"])
        if match["string"]:
            types = frozenset({"string"}) if match["string"] == "true" else types - {"string"}
        pieces.arguments(f"{before}{json_string(match['name'])}: ")
        value = value_of(pieces, types)
        ends = _value_ends(self._form, on_lines=on_lines)
        complete = bool((yield from scanner.until(ends, value.add, read_marker=False)))
        value.end(complete=complete)
        yield from scanner.literal(f"\n{self._form.value_end}", self._form.value_end)
        scanner.forget()
        return complete


class _String:
    """A string, passed on while it arrives."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        pieces.arguments('"')

    def add(self, text: str) -> None:
        """The next characters."""
        self._pieces.arguments(json_characters(text))

    def end(self, *, complete: bool) -> None:
        """All has come; where the value is cut off it stays open."""
        if complete:
            self._pieces.arguments('"')


class _Typed:
    """A value of another type, or of one that is not known, passed on when it is complete."""

    def __init__(self, pieces: Pieces, types: frozenset[str]) -> None:
        self._pieces = pieces
        self._types = types
        self._text: list[str] = []

    def add(self, text: str) -> None:
        """The next characters."""
        self._text.append(text)

    def end(self, *, complete: bool) -> None:
        """All has come; where the value is cut off it is passed on as it is."""
        text = "".join(self._text)
        self._pieces.arguments(json_of(text, self._types) if complete else text)


def value_of(pieces: Pieces, types: frozenset[str]) -> _String | _Typed:
    """Writes a value of one of ``types``, none of which is known where there are none."""
    return _String(pieces) if types == {"string"} else _Typed(pieces, types)
