"""Reading what people have: text files and JSON lines, compressed or not, files or standard input."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Literal

from cache_builder.inputs.json_values import array_elements
from ssd.errors import SSDError

Format = Literal["auto", "text", "jsonl"]

STANDARD_INPUT = "-"

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_DOCUMENT_CHARS = 1 << 22
_GZIP_MAGIC = b"\x1f\x8b"


class InputError(SSDError):
    """An input cannot be read or understood; the message begins with the file and, where there is one, the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One document or one line. ``where`` is "file" or "file:line", for messages."""

    where: str
    text: str
    is_json: bool


def check_inputs(names: list[str]) -> int:
    """Bytes of all inputs together, as far as they have a size; raises InputError for one that is not there."""
    total = 0
    for name in names:
        if name != STANDARD_INPUT:
            path = Path(name)
            if not path.exists():
                raise InputError(f"{name}: no such file. Check the path, or give - for standard input")
            if path.is_dir():
                raise InputError(f"{name}: is a directory. Name its files, for instance {name.rstrip('/')}/*.jsonl")
            total += path.stat().st_size
    return total


def read_records(name: str, format: Format, progress: Callable[[int], None]) -> Iterator[Record]:
    """The records of one input; raises InputError. ``progress`` is told how many bytes were read from the file.

    A text file is one document; beyond some 4 million characters it becomes several, cut at ends of lines. Empty ones
    and blank lines are left out.
    """
    shown = "standard input" if name == STANDARD_INPUT else name
    try:
        with _open(name, progress) as file:
            first = ""
            if format == "auto":
                format, first = _format_of(name, file)
            if format == "text":
                yield from _documents(shown, file, first)
            else:
                first = first or file.readline()
                num_blank = 0
                while first and not first.strip():
                    first, num_blank = file.readline(), num_blank + 1
                if first.lstrip().startswith("["):
                    yield from _elements(shown, file, first)
                    return
                for number, line in enumerate(chain([first], file), start=1 + num_blank):
                    if line.strip():
                        yield Record(f"{shown}:{number}", line, is_json=True)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown}: not UTF-8 text ({error.reason}). Convert it first, for instance with iconv"
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{shown}: damaged gzip data ({error}). Compress it again, or copy it again") from None
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {error.strerror or error}") from None


def _elements(shown: str, file: IO[str], begun: str) -> Iterator[Record]:
    try:
        for number, element in enumerate(array_elements(file, begun), start=1):
            yield Record(f"{shown}: element {number}", element, is_json=True)
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise InputError(f"{shown}: not a JSON array ({error}). Correct it, or give one object a line") from None


def _documents(shown: str, file: IO[str], text: str) -> Iterator[Record]:
    while chunk := file.read(_DOCUMENT_CHARS):
        text += chunk
        cut = text.rfind("\n") + 1 if len(text) >= _DOCUMENT_CHARS else 0
        if cut:
            yield Record(shown, text[:cut], is_json=False)
            text = text[cut:]
    if text.strip():
        yield Record(shown, text, is_json=False)


def _format_of(name: str, file: IO[str]) -> tuple[Format, str]:
    """The format by the file's name, for standard input by its first line, which is returned as well."""
    if name != STANDARD_INPUT:
        return ("jsonl" if name.removesuffix(".gz").endswith(_JSON_SUFFIXES) else "text"), ""
    first = file.readline()
    return ("jsonl" if first.lstrip().startswith(("{", "[{")) or first.strip() == "[" else "text"), first


@contextmanager
def _open(name: str, progress: Callable[[int], None]) -> Iterator[IO[str]]:
    with nullcontext(sys.stdin.buffer) if name == STANDARD_INPUT else Path(name).open("rb") as raw:
        counted = io.BufferedReader(_Counted(raw, progress), 1 << 18)
        is_compressed = counted.peek(2)[:2] == _GZIP_MAGIC or name.endswith(".gz")
        binary = gzip.GzipFile(fileobj=counted) if is_compressed else counted
        yield io.TextIOWrapper(binary, encoding="utf-8-sig")


class _Counted(io.RawIOBase):
    """Tells ``progress`` what is read through it."""

    def __init__(self, raw: IO[bytes], progress: Callable[[int], None]) -> None:
        self._raw = raw
        self._progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._progress(len(data))
        return len(data)
