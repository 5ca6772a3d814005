"""Conversion of tool call arguments from the notations of models to JSON, with the types of the functions' schemas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from server.tools.scanner import PYTHONS, Markers, Scanner, Sink, Steps, discard

Functions = Mapping[str, Mapping[str, Any]]
"""The functions that a model may call: their names with the JSON schemas of their parameters."""

_TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_CONSTANTS = {**PYTHONS, **{word: word for word in PYTHONS.values()}}

_TEXT = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPES |= {mark: mark for mark in "\\'\""}
_ESCAPE_LENGTHS = {"x": 4, "u": 6, "U": 10}
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}))")


def types_of(functions: Functions, name: str, parameter: str) -> frozenset[str]:
    """Return the JSON types that a function's schema allows for a parameter; empty if the schema names no type."""
    properties = _mapping(functions.get(name)).get("properties")
    return frozenset(_types(_mapping(_mapping(properties).get(parameter)), 1))


def _types(schema: Mapping[str, Any], levels: int) -> set[str]:
    given = schema.get("type")
    given = given if isinstance(given, list) else [given]
    found = {kind for kind in _TYPES.values() if kind in given}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not found and isinstance(values, list):
        found |= {"number" if isinstance(value, float) else _TYPES.get(type(value), "object") for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if levels and isinstance(parts, list):
            for part in parts:
                found |= _types(_mapping(part), levels - 1)
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_finite(number: str) -> float:
    if not math.isfinite(found := float(number)):
        raise ValueError(f"{number} is beyond the range of numbers")
    return found


def json_of(text: str, types: frozenset[str]) -> str:
    """Convert an unquoted argument value to JSON of an allowed type; without ``types``, to a list, object or string."""
    written = text.strip()
    written = _CONSTANTS.get(written, written)
    if not is_json(written):
        return json_string(text)
    kind = _TYPES[type(json.loads(written))]
    allowed = types or {"object", "array"}
    fits = kind in allowed or (kind == "integer" and "number" in allowed)
    return written if fits or (types and "string" not in types) else json_string(text)


def json_string(text: str) -> str:
    return '"' + json_characters(text) + '"'


def json_characters(text: str) -> str:
    """Escape a text for a JSON string, without adding quotation marks. Lone surrogates are escaped too."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Plain:
    """Converts a tool call argument, which the model writes without quotes, to JSON while it is generated.

    If the schema declares a string, each chunk is passed on as it arrives. Other values are passed on when complete.
    """

    def __init__(self, sink: Sink, types: frozenset[str]) -> None:
        self._sink = sink
        self._types = types
        self._text: list[str] | None = [] if types != {"string"} else None
        if self._text is None:
            sink('"')

    def add(self, text: str) -> None:
        if self._text is None:
            self._sink(json_characters(text))
        else:
            self._text.append(text)

    def end(self, *, complete: bool) -> None:
        """End the value. If it is truncated (not ``complete``), it is passed on unchanged."""
        if self._text is not None:
            text = "".join(self._text)
            self._sink(json_of(text, self._types) if complete else text)
        elif complete:
            self._sink('"')


class Dialect(NamedTuple):
    """How a language such as Python writes lists, mappings, strings, numbers and constants, to convert them to JSON.

    Attributes:
        brackets: Maps each opening bracket to JSON's opening bracket and to the language's closing bracket.
        read_string: Reads a string, and returns whether it is complete; None if the next text is not a string.
        word: Matches a number or a constant.
        key: Matches the key of a mapping that is not a string.
        json_of_word: Converts a number or a constant to JSON.
    """

    brackets: Mapping[str, tuple[str, str]]
    read_string: Callable[[Scanner, Sink], Steps[bool | None]]
    word: re.Pattern[str]
    key: re.Pattern[str]
    json_of_word: Callable[[str], str]


def read_literal(scanner: Scanner, sink: Sink, dialect: Dialect) -> Steps[bool]:
    """Read a value in a notation such as Python's and pass it to ``sink`` as JSON; return whether it is complete."""
    closes: list[str] = []  # the closing brackets of open lists and mappings, the innermost last
    comma = after_item = is_key = False
    while True:
        yield from scanner.space()
        mark = yield from scanner.peek()
        if after_item and mark == (":" if is_key else ","):
            yield from scanner.literal(mark, sink=discard)
            comma, after_item, is_key = mark == ",", False, mark == "," and closes[-1] == "}"
            if mark == ":":
                sink(": ")
            continue
        if closes and mark == closes[-1] and not (is_key and after_item):
            yield from scanner.literal(mark, sink=discard)
            sink("}" if closes.pop() == "}" else "]")
            comma = is_key = False
        elif after_item:
            return False
        else:
            if comma:
                sink(", ")
                comma = False
            if mark in dialect.brackets:
                yield from scanner.literal(mark, sink=discard)
                opened, close = dialect.brackets[mark]
                closes.append(close)
                sink(opened)
                is_key = close == "}"
                continue
            ended = yield from dialect.read_string(scanner, sink)
            if ended is None:
                word = yield from scanner.read_word(dialect.key if is_key else dialect.word, in_trail=False)
                if not word.strip():
                    return False
                sink(json_string(word.strip()) if is_key else dialect.json_of_word(word.strip()))
            elif not ended:
                return False
        after_item = True
        if not closes:
            return True


def _json_of_python(word: str) -> str:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if is_json(word):
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


def _read_python_string(scanner: Scanner, sink: Sink) -> Steps[bool | None]:
    """Read a Python string literal and pass it to ``sink`` as JSON. Line ends are accepted in any literal."""
    quote = yield from scanner.literal('"', "'", '"""', "'''", sink=discard)
    if not quote:
        return None
    empty = len(quote) == 1 and (yield from scanner.literal(quote, sink=discard))
    sink('"')
    while not empty:
        yield from scanner.run(_TEXT[quote[0]], lambda text: sink(json_characters(text)))
        if (yield from scanner.literal(quote, sink=discard)):
            break
        mark = yield from scanner.peek()
        if not mark:
            return False
        if mark == "\\":
            yield from _read_escape(scanner, sink)
        else:  # a single quotation mark within a triple-quoted string
            yield from scanner.literal(mark, sink=lambda text: sink(json_characters(text)))
    sink('"')
    return True


def _read_escape(scanner: Scanner, sink: Sink) -> Steps[None]:
    letter = (yield from scanner.peek_ahead(2))[1:]
    written = yield from scanner.peek_ahead(_ESCAPE_LENGTHS.get(letter, 2))
    if match := _CODE.fullmatch(written):
        text = chr(int(match[1] or match[2] or match[3], 16))
    else:
        written = written[:2]
        text = _ESCAPES.get(letter, written)
    yield from scanner.literal(written, sink=discard)
    sink(json_characters(text))


def _read_gemma_string(scanner: Scanner, sink: Sink) -> Steps[bool | None]:
    if not (yield from scanner.literal(GEMMA_QUOTE, sink=discard)):
        return None
    sink('"')
    ended = yield from scanner.read_until(
        _GEMMA_STRING_END, lambda text: sink(json_characters(text)), read_marker=False
    )
    yield from scanner.literal(GEMMA_QUOTE, sink=discard)
    sink('"' if ended else "")
    return bool(ended)


GEMMA_QUOTE = '<|"|>'
_GEMMA_STRING_END = Markers(GEMMA_QUOTE)

_PYTHON_WORD = re.compile(r"""[^\s,:()\[\]{}"'=]+""")
PYTHON = Dialect(
    {"[": ("[", "]"), "(": ("[", ")"), "{": ("{", "}")},
    _read_python_string,
    word=_PYTHON_WORD,
    key=_PYTHON_WORD,
    json_of_word=_json_of_python,
)
GEMMA = Dialect(
    {"[": ("[", "]"), "{": ("{", "}")},
    _read_gemma_string,
    word=re.compile(r"[^,{}\[\]<>]+"),
    key=re.compile(r"[^:{}\[\]<>,]+"),
    json_of_word=lambda word: word if is_json(word) else json_string(word),
)


def read_gemma_key(scanner: Scanner) -> Steps[str | None]:
    written: list[str] = []
    if (yield from scanner.literal(GEMMA_QUOTE)):
        yield from scanner.read_until(_GEMMA_STRING_END, written.append)
        scanner.add_to_trail("".join(written))
    else:
        written.append((yield from scanner.read_word(GEMMA.key)).strip())
    if not (yield from scanner.literal(":")):
        return None
    yield from scanner.space()
    return "".join(written)


_PYTHON_KEY = re.compile(r"[\w.]+")


def read_python_key(scanner: Scanner) -> Steps[str | None]:
    key = yield from scanner.read_word(_PYTHON_KEY)
    yield from scanner.space()
    return key if key and (yield from scanner.literal("=")) else None
