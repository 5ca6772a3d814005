"""An incremental text scanner, whose results do not depend on how the text is divided into chunks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]
"""The type of incremental parsers: a generator that returns a result. It pauses whenever it needs more text."""

Sink: TypeAlias = Callable[[str], object]

_ANY = re.compile(r"(?s:.+)")
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[\s:]+")
_WORD = re.compile(r"[\w.+-]+")
_INSIDE_STRING = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r'[^\s,:"{}\[\]]+')
_CLOSES = {"{": "}", "[": "]"}
_ESCAPED = '"\\/bfnrt'
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(32)}

PYTHONS = {"True": "true", "False": "false", "None": "null"}
"""Maps Python's constants, which some models write in JSON, to the constants of JSON."""


class Markers:
    """Strings, e.g. tags, that are searched for together. A marker is found even if it is split between two chunks."""

    def __init__(self, *markers: str) -> None:
        longest_first = sorted(markers, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.beginnings = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))
        self.longest = len(longest_first[0])


class Scanner:
    """Reads a text that arrives in chunks, for incremental parsers. O(characters).

    Text that was read goes to a function ``sink``. Without a sink it is added to a buffer, the trail, because it may be
    content or the beginning of a tool call. When the following text shows which it is, `pop_trail` returns the
    collected text, or `drop_trail` discards it.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = self._num_dropped = 0
        self._ended = False
        self._trail: list[str] = []

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._num_dropped += self._at
        self._at = 0

    def end(self) -> None:
        self._ended = True

    @property
    def num_read(self) -> int:
        return self._num_dropped + self._at

    def drop_trail(self) -> None:
        """Discard the trail, i.e. the text that was read without a sink, because it turned out to be markup."""
        self._trail = []

    def pop_trail(self) -> str:
        text = "".join(self._trail)
        self._trail = []
        return text

    def add_to_trail(self, text: str) -> None:
        self._trail.append(text)

    def _advance(self, end: int, sink: Sink | None = None) -> str:
        text = self._text[self._at : end]
        self._at = end
        if text:
            (sink or self._trail.append)(text)
        return text

    def run(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Steps[bool]:
        """Read all following characters that a pattern (a repeated character class) matches. Return whether any did."""
        found = False
        while True:
            if match := pattern.match(self._text, self._at):
                found |= match.end() > match.start()
                self._advance(match.end(), sink)
            if self._at < len(self._text) or self._ended:
                return found
            yield

    def read_word(self, pattern: re.Pattern[str], *, in_trail: bool = True) -> Steps[str]:
        """Read and return all following characters that a pattern (a repeated character class) matches.

        Without ``in_trail``, the characters are not added to the trail.
        """
        letters: list[str] = []
        yield from self.run(pattern, letters.append)
        word = "".join(letters)
        if in_trail:
            self.add_to_trail(word)
        return word

    def space(self) -> Steps[bool]:
        return (yield from self.run(_SPACE))

    def read_rest(self, sink: Sink) -> Steps[None]:
        yield from self.run(_ANY, sink)

    def peek(self) -> Steps[str]:
        return (yield from self.peek_ahead(1))

    def peek_ahead(self, count: int) -> Steps[str]:
        """Return the next ``count`` characters of the text without reading them; fewer at the end of the text."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        return self._text[self._at : self._at + count]

    def literal(self, *options: str, sink: Sink | None = None) -> Steps[str]:
        """Read the longest of the strings ``options`` that comes next, and return it; "" if no option comes next."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, options))]
            longer = [option for option in options if len(option) > len(rest) and option.startswith(rest)]
            if not longer or self._ended:
                break
            yield
        found = max((option for option in options if rest.startswith(option)), key=len, default="")
        if found or not longer:
            self._advance(self._at + len(found), sink)
        else:
            self._advance(len(self._text))
        return found

    def read_until(self, markers: Markers, sink: Sink, *, read_marker: bool = True, last: str = "") -> Steps[str]:
        """Pass the text before the first marker to ``sink``, consume the marker and return it; "" if no marker follows.

        Without ``read_marker``, the marker is not consumed, so the next call reads it again. ``last`` is an additional
        marker that counts only if nothing but white space follows it.
        """
        while True:
            match = markers.pattern.search(self._text, self._at)
            if last and self._ended and not match:
                match = re.compile(re.escape(last) + r"(?=\s*\Z)").search(self._text, self._at)
            unsure = len(self._text) if self._ended else self._unsure_from(markers)
            if match and match.start() < unsure:
                self._advance(match.start(), sink)
                if read_marker:
                    self._advance(match.end())
                return match[0]
            self._advance(unsure, sink)
            if self._ended:
                return ""
            yield

    def _unsure_from(self, markers: Markers) -> int:
        """Return the smallest index from which the text may be an incomplete marker; if there is none, its length."""
        end = len(self._text)
        for begin in range(max(self._at, end - markers.longest + 1), end):
            if self._text[begin:] in markers.beginnings:
                return begin
        return end

    def string(self) -> Steps[str | None]:
        """Read a JSON string and return its value; None if no string comes next, or if it is truncated or invalid."""
        if not (yield from self.literal('"')):
            return None
        pieces: list[str] = []
        ended = yield from self._rest_of_string(pieces.append)
        self.add_to_trail("".join(pieces))
        if not ended:
            return None
        try:
            decoded = json.loads('"' + "".join(pieces), strict=False)
            decoded.encode()
        except ValueError:  # an invalid escape or a lone surrogate
            return None
        return str(decoded)

    def _rest_of_string(self, sink: Sink) -> Steps[bool]:
        """Read a JSON string from after its opening quotation mark, and return whether the string is complete."""
        while True:
            yield from self.run(_INSIDE_STRING, sink)
            mark = yield from self.peek()
            if mark != "\\":
                return bool((yield from self.literal('"', sink=sink)))
            written = yield from self.peek_ahead(2)
            if written == "\\u" and _UNICODE.fullmatch(code := (yield from self.peek_ahead(6))):
                written = code
            self._advance(self._at + len(written), sink)

    def value(self, sink: Sink | None = None, *, in_trail: bool = False) -> Steps[bool]:
        """Read a JSON value into ``sink``; return whether the value is complete.

        Common mistakes of models are corrected: control characters in strings, Python's constants, numbers beyond the
        range of floats and trailing commas. With ``in_trail``, the original text is added to the trail too, because
        it may turn out to be content.
        """

        def emit(written: str, corrected: str) -> None:
            if in_trail or sink is None:
                self.add_to_trail(written)
            if sink is not None:
                sink(corrected)

        def outside(text: str) -> None:
            emit(text, text)

        def inside(text: str) -> None:
            is_literal = len(text) == 2 and text[0] == "\\" and text[1] not in _ESCAPED  # an unescaped backslash
            emit(text, "\\" * is_literal + text.translate(_ESCAPES))

        first = yield from self.peek()
        if first == '"':
            yield from self.literal('"', sink=outside)
            return (yield from self._rest_of_string(inside))
        if first not in _CLOSES:
            return (yield from self.run(_SCALAR, outside))
        to_close: list[str] = []
        while True:
            yield from self.run(_BETWEEN, outside)
            if word := (yield from self.read_word(_WORD, in_trail=False)):
                emit(word, _constant(word))
                continue
            mark = yield from self.peek()
            if mark == ",":
                yield from self.literal(mark, sink=discard)
                space = yield from self.read_word(_SPACE, in_trail=False)
                is_last = (yield from self.peek()) == to_close[-1]
                emit(mark, "" if is_last else mark)
                outside(space)
                continue
            if mark not in {'"', "{", "[", *to_close[-1:]}:
                return False
            yield from self.literal(mark, sink=outside)
            if mark == '"':
                if not (yield from self._rest_of_string(inside)):
                    return False
            elif mark in _CLOSES:
                to_close.append(_CLOSES[mark])
            else:
                to_close.pop()
                if not to_close:
                    return True


def discard(_text: str) -> None: ...


def _constant(word: str) -> str:
    """Convert a number or constant to valid JSON; a number beyond the range of floats becomes a string."""
    try:
        is_number = word.lstrip("-").isdigit() or math.isfinite(float(word))
    except ValueError:
        return PYTHONS.get(word, word)
    return word if is_number else json.dumps(word)
