"""The elements of a JSON array, one after the other, however long it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO

from cache_builder.inputs.record import LONGEST_RECORD

_CHUNK_CHARS = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")


def array_elements(file: IO[str], begun: str = "") -> Iterator[str]:
    """The text of each element; raises ValueError where the file is no JSON array. ``begun`` : what was read of it.

    Memory for the longest element and a chunk; one longer than a chunk is begun again for every doubling.
    """
    rest = _Rest(file, begun)
    if rest.next_mark() != "[":
        raise ValueError("an array was expected")
    rest.skip_mark()
    mark = rest.next_mark()
    while mark != "]":
        yield rest.element()
        mark = rest.next_mark()
        if mark == ",":
            rest.skip_mark()
            if rest.next_mark() == "]":
                raise ValueError("an element was expected after ','")
        elif mark != "]":
            raise ValueError(f"',' or ']' was expected after an element, got {mark!r}")
    rest.skip_mark()
    if rest.has_more():
        raise ValueError("there is more after its end")


class _Rest:
    """What is not read yet."""

    def __init__(self, file: IO[str], text: str) -> None:
        self._file = file
        self._text = text
        self._at = 0
        self._decoder = json.JSONDecoder()

    def _more(self, characters: int) -> bool:
        read = self._file.read(characters)
        self._text, self._at = self._text[self._at :] + read, 0
        return bool(read)

    def next_mark(self) -> str:
        """The next character after white space; raises ValueError at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(_CHUNK_CHARS):
                raise ValueError("the array does not end")

    def has_more(self) -> bool:
        """Whether anything but white space comes."""
        try:
            self.next_mark()
        except ValueError:
            return False
        return True

    def skip_mark(self) -> None:
        """Go on behind it."""
        self._at += 1

    def element(self) -> str:
        """The value that is next."""
        chunk = _CHUNK_CHARS
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
                complaint = ValueError("the array does not end")
            except ValueError as error:
                end, complaint = len(self._text), error
            if end < len(self._text):
                text, self._at = self._text[self._at : end], end
                return text
            if len(self._text) - self._at > LONGEST_RECORD:
                raise ValueError(f"an element has no end within {LONGEST_RECORD >> 20} MiB")
            if not self._more(chunk):
                raise complaint
            chunk *= 2
