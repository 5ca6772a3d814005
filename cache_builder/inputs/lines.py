"""Text as records: JSON lines and arrays, plain text, a batch's responses with their requests, and vLLM's logs."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Literal, TypeAlias

from cache_builder.inputs.record import LONGEST_RECORD, InputError, Record, shown_name
from cache_builder.inputs.streams import open_stream, readable

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
    """The requests of some files by their ``custom_id``, as the text they came in."""

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
                        self._by_id[side[1]] = record.text

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
