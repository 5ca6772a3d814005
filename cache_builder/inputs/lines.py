"""Lines and documents of a stream of bytes, or of a range of it that begins and ends anywhere."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from cache_builder.inputs.json_values import array_elements
from cache_builder.inputs.record import LONGEST_RECORD, InputError, Record

_MARK = b"\xef\xbb\xbf"
_DOCUMENT_BYTES = 1 << 22
_SPACES = b" \t\r\n"


def lines_of(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[tuple[str, bytes]]:
    """(where, line) of the lines that begin within bytes ``start`` .. ``stop``; blank ones are left out.

    Raises InputError for a line without end, and what reading raises.
    """
    return _lines(shown, file, start, _go_to_line(file, start), 0, stop)


def json_lines(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """A record for every line; for every element where the file is one JSON array. Raises as ``lines_of``."""
    if start == 0:
        begun = _skip_spaces(file)
        rest = io.BufferedReader(_Unread(begun.text, file))
        if begun.mark == b"[" and stop is None:
            yield from _elements(shown, io.TextIOWrapper(rest, encoding="utf-8-sig"))
            return
        lines = _lines(shown, rest, 0, begun.num_bytes, begun.num_lines, stop)
    else:
        lines = lines_of(shown, file, start, stop)
    for where, line in lines:
        yield Record(where, line.decode(), is_json=True)


def _lines(
    shown: str, file: IO[bytes], start: int, at: int, number: int, stop: int | None
) -> Iterator[tuple[str, bytes]]:
    """``at``, ``number`` : bytes and lines before the first one; numbers are known of a range from the beginning on."""
    while stop is None or at < stop:
        line = file.readline(LONGEST_RECORD + 1)
        if not line:
            return
        number += 1
        where = f"{shown}:{number}" if start == 0 else f"{shown}: byte {at}"
        if len(line) > LONGEST_RECORD:
            raise InputError(f"{where}: a line of more than {LONGEST_RECORD >> 20} MiB. Is it another --format?")
        at += len(line)
        if line.strip():
            yield where, line.removeprefix(_MARK) if number == 1 else line


def documents(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """The text; beyond some 4 MB several documents, cut at ends of lines. Empty ones are left out."""
    at = _go_to_line(file, start)
    if stop is not None and at >= stop:
        return
    held = b""
    has_ended = False
    while not has_ended:
        # The last line of a range ends behind it.
        wanted = _DOCUMENT_BYTES if stop is None else min(_DOCUMENT_BYTES, stop - at)
        chunk = file.read(wanted) if wanted > 0 else b""
        if stop is not None and at + len(chunk) >= stop and not chunk.endswith(b"\n"):
            chunk += file.readline(LONGEST_RECORD)
        has_ended = not chunk or (stop is not None and at + len(chunk) >= stop)
        if at == 0:
            held = chunk.removeprefix(_MARK)
        else:
            held += chunk
        at += len(chunk)
        if len(held) > LONGEST_RECORD:
            raise InputError(f"{shown}: more than {LONGEST_RECORD >> 20} MiB without an end of line. Is it text?")
        cut = held.rfind(b"\n") + 1 if len(held) >= _DOCUMENT_BYTES else 0
        if cut:
            yield Record(shown, held[:cut].decode(), is_json=False)
            held = held[cut:]
    if held.strip():
        yield Record(shown, held.decode(), is_json=False)


def _go_to_line(file: IO[bytes], start: int) -> int:
    """Go to the first line that begins at ``start`` or later; where that is."""
    if start == 0:
        return 0
    file.seek(start - 1)
    skipped = file.readline(LONGEST_RECORD + 1)
    return start - 1 + len(skipped)


@dataclass(slots=True)
class _Begun:
    """What was read of a file: bytes and lines of white space, then the beginning of a line and its first mark."""

    num_bytes: int = 0
    num_lines: int = 0
    text: bytes = b""
    mark: bytes = b""


def _skip_spaces(file: IO[bytes]) -> _Begun:
    begun = _Begun()
    while piece := file.readline(1 << 16):
        if stripped := piece.removeprefix(_MARK).lstrip(_SPACES):
            begun.text, begun.mark = piece, stripped[:1]
            break
        begun.num_bytes += len(piece)
        begun.num_lines += piece.endswith(b"\n")
    return begun


class _Unread(io.RawIOBase):
    """``begun`` and then the rest of ``file``."""

    def __init__(self, begun: bytes, file: IO[bytes]) -> None:
        self._begun = memoryview(begun)
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._begun[: len(buffer)] or self._file.read(len(buffer))
        self._begun = self._begun[len(data) :]
        buffer[: len(data)] = data
        return len(data)


def _elements(shown: str, file: IO[str]) -> Iterator[Record]:
    try:
        for number, element in enumerate(array_elements(file), start=1):
            yield Record(f"{shown}: element {number}", element, is_json=True)
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise InputError(f"{shown}: not a JSON array ({error}). Correct it, or give one object a line") from None
