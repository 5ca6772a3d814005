"""Text as records: JSON lines and arrays, plain text, a batch's responses with their requests, and vLLM's logs."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final, Literal, TypeAlias

from cache_builder.inputs.record import LONGEST_RECORD, InputError, Record, shown_name
from cache_builder.inputs.streams import open_stream, readable

_SPACE = re.compile(r"[ \t\r\n]*")


def array_elements(text: str) -> Iterator[str]:
    """The text of each element; raises ValueError where ``text`` is no JSON array."""
    decoder = json.JSONDecoder()

    def mark_at(place: int) -> tuple[str, int]:
        """The next character after white space, and where it is."""
        space = _SPACE.match(text, place)
        assert space is not None
        return text[space.end() : space.end() + 1], space.end()

    mark, at = mark_at(0)
    if mark != "[":
        raise ValueError("an array was expected")
    mark, at = mark_at(at + 1)
    while mark != "]":
        _, end = decoder.raw_decode(text, at)
        yield text[at:end]
        mark, at = mark_at(end)
        if mark not in ("]", ","):
            raise ValueError(f"',' or ']' was expected after an element, got {mark!r}")
        if mark == ",":
            mark, at = mark_at(at + 1)
            if mark == "]":
                raise ValueError("an element was expected after ','")
    if mark_at(at + 1)[0]:
        raise ValueError("there is more after its end")


_MARK = b"\xef\xbb\xbf"
_DOCUMENT_BYTES = 1 << 22
_MOST_ARRAY_BYTES = 1 << 30


def lines_of(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[tuple[str, bytes]]:
    """(where, line) of the lines that begin within bytes ``start`` .. ``stop``; blank ones are left out.

    Raises InputError for a line without end, and what reading raises.
    """
    at, number = _go_to_line(file, start), 0
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


def json_lines(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """A record for every line; for every element where the file is one JSON array. Raises as ``lines_of``."""
    if start == 0 and stop is None and _begins_array(file):
        yield from _elements(shown, file)
        return
    for where, line in lines_of(shown, file, start, stop):
        yield Record(where, line.decode(), is_json=True)


def _begins_array(file: IO[bytes]) -> bool:
    beginning = file.peek(1) if isinstance(file, io.BufferedReader) else b""
    return beginning.removeprefix(_MARK).lstrip()[:1] == b"["


def _elements(shown: str, file: IO[bytes]) -> Iterator[Record]:
    data = file.read(_MOST_ARRAY_BYTES + 1)
    if len(data) > _MOST_ARRAY_BYTES:
        raise InputError(f"{shown}: a JSON array of more than {_MOST_ARRAY_BYTES >> 30} GiB: give one object a line")
    text = data.decode("utf-8-sig")
    del data
    try:
        for number, element in enumerate(array_elements(text), start=1):
            yield Record(f"{shown}: element {number}", element, is_json=True)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{shown}: not a JSON array ({error}). Correct it, or give one object a line") from None


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


Side: TypeAlias = Literal["requests", "responses"]

_MOST_BYTES = 1 << 30
"""Of the requests of one file; OpenAI takes 200 MB."""


def side_of(line: Any) -> tuple[Side, str] | None:
    """Which of the two files of a batch, OpenAI's or Anthropic's, a line is of, and its ``custom_id``; None for any
    other."""
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        return None
    if (isinstance(line.get("body"), dict) and "url" in line) or isinstance(line.get("params"), dict):
        return "requests", line["custom_id"]
    return ("responses", line["custom_id"]) if "response" in line or "result" in line else None


class Requests:
    """The requests of some files by their ``custom_id``, of the first file that has it, as the text they came in."""

    def __init__(self, names: Sequence[str]) -> None:
        """Reads them. Raises InputError."""
        self._by_id: dict[str, str] = {}
        num_bytes = 0
        for name in names:
            with readable(name), open_stream(name) as file:
                for record in json_lines(shown_name(name), file):
                    num_bytes += len(record.text)
                    if num_bytes > _MOST_BYTES:
                        raise InputError(f"{name}: more than {_MOST_BYTES >> 30} GiB of requests: split the batch")
                    line = _loaded(record.text)
                    if (side := side_of(line)) and side[0] == "requests":
                        self._by_id.setdefault(side[1], record.text)

    def join(self, responses: Iterator[Record]) -> Iterator[Record]:
        """Every response with its request; one without a request as it came."""
        for record in responses:
            line = _loaded(record.text)
            if (side := side_of(line)) and (request := self._by_id.get(side[1])) is not None:
                joined = {"request": _loaded(request), "response": line.get("response", line.get("result"))}
                yield Record(record.where, "", is_json=True, line=joined)
            else:
                yield record


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


MARKS: Final = (b"Generated response ", b"Received request ", b" details: prompt: ")
"""Of vLLM's log with ``--enable-log-requests --enable-log-outputs``: newer versions log prompts at the level DEBUG. All
texts are Python literals, so that each is one line; ``--max-log-len`` cuts them."""

_PROMPT = re.compile(r"(?:Received request|Request) (\S+?)(?:: | details: )prompt: (?=['\"])")
_OUTPUT = re.compile(r"Generated response (\S+?)(?: \((streaming \w+)\))?: output: (?=['\"])")
_IDS = re.compile(r"[,\]')] ?prompt_token_ids: (\[[\d, ]*\])")
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_MOST_WAITING_CHARS = 1 << 28


def vllm_exchanges(shown: str, file: IO[bytes]) -> Iterator[Record]:
    """A record for every response with text, with its prompt where one was logged.

    Prompts wait for their responses in 256 million characters at most; the oldest go. Raises InputError.
    """
    waiting: dict[str, dict[str, Any]] = {}
    num_chars = 0
    has_found = False
    for where, line in lines_of(shown, file):
        if not any(mark in line for mark in MARKS):
            continue
        text = line.decode()
        if asked := _PROMPT.search(text):
            prompt, end = _literal(text, asked.end())
            if prompt is None:
                continue
            entry: dict[str, Any] = {"prompt": prompt, "is_rendered": asked[1].startswith("chatcmpl")}
            if ids := _IDS.search(text, end - 1):
                entry["prompt_token_ids"] = [int(number) for number in re.findall(r"\d+", ids[1])]
            num_chars += len(text) - int(waiting.pop(asked[1], {}).get("chars", 0))
            waiting[asked[1]] = {**entry, "chars": len(text)}
            while num_chars > _MOST_WAITING_CHARS and waiting:
                num_chars -= int(waiting.pop(next(iter(waiting)))["chars"])
        elif (said := _OUTPUT.search(text)) and said[2] != "streaming delta":
            has_found = True
            output, _ = _literal(text, said.end())
            known = waiting.pop(said[1], None) or waiting.pop(f"{said[1]}-0", None)
            if known is not None:
                num_chars -= int(known.pop("chars"))
            if output:
                yield Record(where, "", is_json=True, line={**(known or {}), "completion": output, "log": "vllm"})
    if not has_found:
        raise InputError(f'{shown}: holds no line "Generated response": run vLLM with --enable-log-outputs')


def _literal(text: str, start: int) -> tuple[str | None, int]:
    """The string that begins at ``start`` and where it ends; None where it is cut."""
    found = _LITERAL.match(text, start)
    if found is None:
        return None, start
    try:
        value = ast.literal_eval(found[0])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None, found.end()
    return str(value), found.end()
