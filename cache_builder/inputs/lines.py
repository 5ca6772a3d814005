"""Reading of records from JSON lines, JSON arrays, CSV and text, and joining of batch responses with their requests."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import IO, Any, Literal, TypeAlias, cast

from cache_builder.inputs.detect import detect_delimiter, is_line_by_line
from cache_builder.inputs.input_streams import input_errors, open_stream
from cache_builder.inputs.record import BYTE_ORDER_MARK, LONGEST_RECORD, InputError, InputRecord, display_name

_SPACE = re.compile(r"[ \t\r\n]*")
_KEPT = "surrogateescape"
"""The ``errors`` argument of ``bytes.decode`` that keeps invalid UTF-8, so that only records with such bytes are
rejected.
"""
_DOCUMENT_BYTES = 1 << 22
_MAX_ARRAY_BYTES = 1 << 30


def _lines(shown: str, file: IO[bytes], start: int, stop: int | None) -> Iterator[tuple[str, bytes]]:
    """Yield the position (for messages) and the bytes of each line that begins in a byte range of the file."""
    at = start
    if start:  # skip to the first line that begins at or after ``start``
        file.seek(start - 1)
        at += len(file.readline(LONGEST_RECORD + 1)) - 1
    number = 0
    while stop is None or at < stop:
        line = file.readline(LONGEST_RECORD + 1)
        if not line:
            return
        number += 1
        where = f"{shown}:{number}" if start == 0 else f"{shown}: byte {at}"
        if len(line) > LONGEST_RECORD:
            raise InputError(f"{where}: the line has more than {LONGEST_RECORD >> 20} MiB. Try another --format")
        yield where, line.removeprefix(BYTE_ORDER_MARK) if at == 0 else line
        at += len(line)


def json_lines(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[InputRecord]:
    """Yield the records of a JSON file: one per line, or the elements of an array, or objects that span several lines.

    If the file has one record per line, only lines that begin in the byte range ``start`` .. ``stop`` are read. Blank
    lines are skipped. Raises InputError for an invalid or very large array, a line that is too long, and the errors of
    reading.
    """
    beginning = file.peek(1) if isinstance(file, io.BufferedReader) and start == 0 and stop is None else b""
    if not is_line_by_line(beginning):
        data = file.read(_MAX_ARRAY_BYTES + 1)
        if len(data) > _MAX_ARRAY_BYTES:
            raise InputError(
                f"{shown} has more than {_MAX_ARRAY_BYTES >> 30} GiB of JSON in an array or in objects over several "
                "lines: write one object per line"
            )
        text = data.decode("utf-8-sig", _KEPT)
        is_array = text.lstrip()[:1] == "["
        what, one = ("a JSON array", "element") if is_array else ("JSON over several lines", "object")
        try:
            for number, element in enumerate((_elements if is_array else _objects)(text), start=1):
                yield InputRecord(f"{shown}: {one} {number}", element, is_json=True)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"{shown} is not {what} ({error}): correct it, or write one object per line") from None
        return
    for where, line in _lines(shown, file, start, stop):
        if line.strip():
            yield InputRecord(where, line.decode(errors=_KEPT), is_json=True)


def _elements(text: str) -> Iterator[str]:
    decoder, at = json.JSONDecoder(), _skip(text, text.index("[") + 1)
    is_open = text[at : at + 1] != "]"
    while is_open:
        _, end = decoder.raw_decode(text, at)
        yield text[at:end]
        at = _skip(text, end)
        if text[at : at + 1] not in ("]", ","):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        is_open = text[at] == ","
        at = _skip(text, at + 1) if is_open else at
    if text[at + 1 :].strip():
        raise json.JSONDecodeError("Extra data", text, at + 1)


def _objects(text: str) -> Iterator[str]:
    decoder, at = json.JSONDecoder(), _skip(text, 0)
    while at < len(text):
        _, end = decoder.raw_decode(text, at)
        yield text[at:end]
        at = _skip(text, end)


def _skip(text: str, at: int) -> int:
    return cast(re.Match[str], _SPACE.match(text, at)).end()


def csv_rows(shown: str, file: IO[bytes]) -> Iterator[InputRecord]:
    """Yield a record for each row of a CSV file. The first line contains the field names; empty cells are left out.

    Raises InputError for a row that is not valid CSV or has more cells than the first line.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    heading = text.readline(_DOCUMENT_BYTES)
    csv.field_size_limit(LONGEST_RECORD)
    rows = csv.DictReader(chain((heading,), text), delimiter=detect_delimiter(heading.encode()), strict=True)
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            if None in row:
                raise InputError(f"{shown}: row {number} has more cells than the heading: correct the row")
            line = {name: value for name, value in row.items() if value}
            yield InputRecord(f"{shown}: row {number}", "", is_json=True, line=line)
    except csv.Error as error:
        raise InputError(f"{shown}: row {number + 1} is not CSV ({error}): correct the row") from None


def documents(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[InputRecord]:
    """Yield the content of a text file as one record; a file above 4 MB is split at line ends into several records."""
    held = bytearray()
    for _, line in _lines(shown, file, start, stop):
        held += line
        if len(held) >= _DOCUMENT_BYTES:
            yield InputRecord(shown, held.decode(), is_json=False)
            held.clear()
    if held.strip():
        yield InputRecord(shown, held.decode(), is_json=False)


Side: TypeAlias = Literal["requests", "responses"]

_MAX_BYTES = 1 << 30
"""The maximum size of batch requests held in memory for one file of responses. OpenAI accepts files of 200 MB."""


def batch_side(line: Any) -> tuple[Side, str] | None:
    """Return whether a line is a request or a response of a batch job, and its ``custom_id``; None if it is neither."""
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        return None
    if (isinstance(line.get("body"), dict) and "url" in line) or isinstance(line.get("params"), dict):
        return "requests", line["custom_id"]
    return ("responses", line["custom_id"]) if "response" in line or "result" in line else None


def join_requests(responses: Iterator[InputRecord], names: Sequence[str]) -> Iterator[InputRecord]:
    """Add to each batch response the request with the same ``custom_id``.

    The requests are in the files ``names``; the first matching request is used. A file is only read when the files
    before it lack a request. A response without a request is yielded unchanged. Raises InputError if a response's
    request is not in the first 1 GiB of requests.
    """
    by_id: dict[str, str] = {}
    unread, num_bytes = list(names), 0
    for record in responses:
        line = _parse_or_none(record.text)
        side = batch_side(line) if _is_text(record.text) else None  # invalid lines are reported when the record is read
        while side and side[1] not in by_id and unread:
            for custom_id, request in _requests_in(unread.pop(0)):
                by_id.setdefault(custom_id, request)
                num_bytes += len(request)
                if num_bytes > _MAX_BYTES:
                    raise InputError(
                        f"{record.where}: the request of this response is not in the first {_MAX_BYTES >> 30} GiB of "
                        "requests: build from fewer batches at once, and merge the caches"
                    )
        if side and (request := by_id.get(side[1], "")):
            joined = {"request": _parse_or_none(request), "response": line.get("response", line.get("result"))}
            yield InputRecord(record.where, "", is_json=True, line=joined)
        else:
            yield record


def _requests_in(name: str) -> Iterator[tuple[str, str]]:
    with input_errors(name), open_stream(name) as file:
        for record in json_lines(display_name(name), file):
            side = batch_side(_parse_or_none(record.text))
            if side and side[0] == "requests" and _is_text(record.text):
                yield side[1], record.text


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
