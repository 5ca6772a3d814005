"""Calls as Python writes them, ``[f(a=1, b="x"), g()]``: Llama 3.2 and 4, Olmo 3, LFM2. Their values become JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from server.tools.functions import json_characters, json_string
from server.tools.json_calls import Accepts
from server.tools.pieces import Pieces, Reader, after_markers
from server.tools.scanner import Scanner, Sink, Steps

_NAME = re.compile(r"[\w.]+")
_WORD = re.compile(r"""[^\s,:()\[\]{}"'=]+""")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS = {"[": ("[", "]"), "(": ("[", ")"), "{": ("{", "}")}
_QUOTES = ('"', "'", '"""', "'''")
_TEXT = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPES |= {mark: mark for mark in "\\'\""}
_ESCAPE_LENGTHS = {"x": 4, "u": 6, "U": 10}
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}))")


@dataclass(frozen=True)
class PythonicFormat:
    """``begin`` : markers before the calls. ``bare`` : the message may begin with a list. ``end`` : after them."""

    begin: tuple[str, ...] = ()
    bare: bool = False
    end: tuple[str, ...] = ()


def pythonic_calls(form: PythonicFormat, accepts: Accepts) -> Reader:
    """Reads a message with such calls; where there is no marker only a function that is ``accepts``-ed makes one."""

    def read_calls(scanner: Scanner, pieces: Pieces) -> Steps[None]:
        return _read_calls(scanner, pieces, form, accepts)

    return after_markers(form.begin, ("[",) if form.bare else (), read_calls)


def _read_calls(scanner: Scanner, pieces: Pieces, form: PythonicFormat, accepts: Accepts) -> Steps[None]:
    in_list = bool((yield from scanner.literal("[")))
    while True:
        yield from scanner.space()
        if not (yield from _read_call(scanner, pieces, accepts)):
            return
        yield from scanner.space()
        if not (yield from scanner.literal(",")) and (in_list or (yield from scanner.peek()) in ("", "<")):
            break
    if in_list:
        if not (yield from scanner.literal("]")):
            return
        scanner.forget()
        yield from scanner.space()
    if form.end and (yield from scanner.literal(*form.end)):
        scanner.forget()


def _read_call(scanner: Scanner, pieces: Pieces, accepts: Accepts) -> Steps[bool]:
    """Whether it is complete. It begins with its first parameter's name, or at once where it has no parameters."""
    name = yield from scanner.word(_NAME)
    if not name or not accepts(name):
        return False
    yield from scanner.space()
    if not (yield from scanner.literal("(")):
        return False
    before = "{"
    while True:
        yield from scanner.space()
        if (yield from scanner.literal(")")):
            break
        key = yield from scanner.word(_NAME)
        yield from scanner.space()
        if not key or not (yield from scanner.literal("=")):
            return False
        if before == "{":
            pieces.call(name)
        scanner.forget()
        pieces.arguments(f"{before}{json_string(key)}: ")
        before = ", "
        if not (yield from _Value(scanner, pieces.arguments).read()):
            return False
        yield from scanner.space()
        if not (yield from scanner.literal(",")) and (yield from scanner.peek()) != ")":
            return False
    if before == "{":
        pieces.call(name)
    pieces.arguments("{}" if before == "{" else "}")
    scanner.forget()
    return True


class _Value:
    """A literal, passed on as JSON while it arrives."""

    def __init__(self, scanner: Scanner, sink: Sink) -> None:
        self._scanner = scanner
        self._sink = sink
        self._closes: list[str] = []
        """What ends the lists and mappings that are open, the innermost last."""

    def read(self) -> Steps[bool]:
        """Whether it is complete; what it cannot be is not read."""
        scanner, sink = self._scanner, self._sink
        comma = after_item = is_key = False
        while True:
            yield from scanner.space()
            mark = yield from scanner.peek()
            if after_item and mark in (",", ":") and (mark == "," or is_key):
                yield from scanner.literal(mark, sink=_nowhere)
                comma, after_item, is_key = mark == ",", False, mark == "," and self._closes[-1] == "}"
                if mark == ":":
                    sink(": ")
                continue
            if self._closes and mark == self._closes[-1] and not (is_key and after_item):
                yield from scanner.literal(mark, sink=_nowhere)
                sink("}" if self._closes.pop() == "}" else "]")
                comma = is_key = False
            elif after_item:
                return False
            else:
                if comma:
                    sink(", ")
                    comma = False
                if mark in _BRACKETS:
                    yield from scanner.literal(mark, sink=_nowhere)
                    opens, closes = _BRACKETS[mark]
                    self._closes.append(closes)
                    sink(opens)
                    is_key = closes == "}"
                    continue
                if not (yield from self._read_item(mark, is_key)):
                    return False
            after_item = True
            if not self._closes:
                return True

    def _read_item(self, mark: str, is_key: bool) -> Steps[bool]:
        if mark in ("'", '"'):
            return (yield from _read_string(self._scanner, self._sink))
        letters: list[str] = []
        yield from self._scanner.run(_WORD, letters.append)
        word = "".join(letters)
        if not word:
            return False
        self._sink(json_string(word) if is_key else _json_of_word(word))
        return True


def _nowhere(_text: str) -> None:
    """Brackets and commas of Python: those of JSON stand for them."""


def _json_of_word(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    readings: tuple[Callable[[str], int | float], ...] = (lambda text: int(text, 0), float)
    for read in readings:
        try:
            number = read(word)
        except ValueError:
            continue
        if math.isfinite(number):
            return repr(number)
    return json_string(word)


def _read_string(scanner: Scanner, sink: Sink) -> Steps[bool]:
    """A string; whether it ended. Line ends in it are taken as they are, unlike by Python."""
    quote = yield from scanner.literal(*_QUOTES, sink=_nowhere)
    plain = _TEXT[quote[0]]
    empty = len(quote) == 1 and (yield from scanner.literal(quote, sink=_nowhere))
    sink('"')
    while not empty:
        yield from scanner.run(plain, lambda text: sink(json_characters(text)))
        if (yield from scanner.literal(quote, sink=_nowhere)):
            break
        mark = yield from scanner.peek()
        if not mark:
            return False
        if mark == "\\":
            yield from _read_escape(scanner, sink)
        else:  # one quotation mark where three end it
            yield from scanner.literal(mark, sink=lambda text: sink(json_characters(text)))
    sink('"')
    return True


def _read_escape(scanner: Scanner, sink: Sink) -> Steps[None]:
    letter = (yield from scanner.ahead(2))[1:]
    written = yield from scanner.ahead(_ESCAPE_LENGTHS.get(letter, 2))
    if match := _CODE.fullmatch(written):
        text = chr(int(match[1] or match[2] or match[3], 16))
    else:
        written = written[:2]
        text = _ESCAPES.get(letter, written)
    yield from scanner.literal(written, sink=_nowhere)
    sink(json_characters(text))
