"""Detection of a file's format from its first bytes: JSON, CSV, a table, text, or an unsupported kind of file."""

from __future__ import annotations

import csv
import json
import re
from typing import Final

from cache_builder.inputs.record import BYTE_ORDER_MARK, COLUMNS, Format, InputError

_REFUSED: Final = (
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"PK\x05\x06", "a zip archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a", "a rar archive"),
    (0, b"\x1f\x9d", "a file that compress(1) made"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (0, b"Obj\x01", "an Avro file"),
    (0, b"FEA1", "a Feather file of version 1"),
    (0, b"%PDF-", "a PDF file"),
    (0, b"\x89HDF\r\n", "an HDF5 file"),
)
"""Unsupported kinds of files: the offset of the identifying bytes, these bytes, and the name of the kind."""
_UTF_16: Final = re.compile(rb"\xff\xfe|\xfe\xff|[^\x00]\x00[^\x00]\x00|\x00[^\x00]\x00[^\x00]")
_JSON: Final = re.compile(
    rb"""(?:[\s\x1e]|\xef\xbb\xbf)*(?:\#[^\n]*\n[\s\x1e]*)*(?:\{\s*(?:["'}]|\Z)|\[\s*(?:\{|\Z))"""
)
"""Matches the beginning of a JSON object or an array of objects, after optional comments.

It also matches the beginning of a Python literal such as ``{'a': 1}``, so that the JSON parser rejects the file with a
clear error message.
"""
_EVENTS: Final = re.compile(rb"\s*(?:(?:event|id|retry):[^\n]*\n)+data:")
"""Matches the beginning of server-sent events."""
_DELIMITERS: Final = ",\t;|"


def detect_format(format: Format, beginning: bytes, shown: str) -> Format:
    """Return the format of a file, which is detected from its first decompressed bytes if ``format`` is "auto".

    ``shown`` is the file's name in messages. Raises InputError for an unsupported kind of file.
    """
    for at, mark, what in _REFUSED:
        if beginning.startswith(mark, at):
            raise InputError(f"{shown} is {what}, which is not supported: unpack or convert it, and give the files")
    if _UTF_16.match(beginning):
        raise InputError(f"{shown}:1: the text is UTF-16, not UTF-8. Convert it first: iconv -f UTF-16 -t UTF-8")
    if format != "auto":
        return format
    if beginning.startswith(b"PAR1"):
        return "parquet"
    if beginning.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if _JSON.match(beginning):
        return "jsonl"
    if b"\x00" in beginning:
        raise InputError(
            f"{shown} contains binary data of an unknown format: give text, JSON, CSV, Parquet or Arrow files"
        )
    line = beginning.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0]
    if _EVENTS.match(beginning) or _has_prefixed_json(line):
        raise InputError(
            f"{shown}:1: the line has other text before its JSON, such as a time or `data:`. Give lines that "
            "contain only JSON, or read the file as text with --format text"
        )
    names = set(next(csv.reader([line.decode(errors="replace")], delimiter=detect_delimiter(line)), ()))
    return "csv" if len(names & {*COLUMNS}) > 1 else "text"


def _has_prefixed_json(line: bytes) -> bool:
    """Return whether a log line consists of a prefix, such as a time or a log level, and a JSON record."""
    at = line.find(b'{"')
    try:
        value = json.loads(line[at:]) if at > 0 else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not value.keys().isdisjoint(COLUMNS)


def detect_delimiter(heading: bytes) -> str:
    return max(_DELIMITERS, key=lambda each: heading.count(each.encode()))


def is_line_by_line(beginning: bytes) -> bool:
    """Return whether a JSON file has one object per line, rather than an array or objects that span several lines."""
    start = beginning.removeprefix(BYTE_ORDER_MARK).lstrip()
    line, _, rest = start.partition(b"\n")
    line, rest = line.rstrip(), rest.lstrip()
    if start[:1] == b"[" or not rest:
        return start[:1] != b"["
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(line.decode(errors="replace"))
        return not is_cut or (line[-1:] not in (b"{", b"[", b",", b":") and rest[:1] == b"{")
    except (ValueError, RecursionError):
        return True
    return True
