"""What answers are on the wire: JSON piece by piece, and server-sent events, padded where they are obfuscated."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic_core

PADDED_BYTES = 1024
"""With obfuscation an event's length is a multiple of this: 16 tokens of text with what is around them fit one."""
_LONGEST_NUMBER = 24
"""Characters of a float64 in JSON: sign, 17 digits, point, exponent."""
_PIECE = 256
"""Elements of a list that are written at once: below a millisecond even where each is a token with its alternatives."""


def json_text(value: Any) -> bytes:
    """``value`` as `pydantic_core.to_json` writes it; a long one keeps nobody waiting for the interpreter's lock."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        before = b"{"
        for name, each in value.items():
            yield before + pydantic_core.to_json(name) + b":"
            yield from _pieces(each)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, (list, tuple)) and len(value) > _PIECE:
        for begin in range(0, len(value), _PIECE):
            yield (b"," if begin else b"[") + pydantic_core.to_json(value[begin : begin + _PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):  # choices, each of any length
        before = b"["
        for each in value:
            yield before
            yield from _pieces(each)
            before = b","
        yield b"]"
    else:
        yield pydantic_core.to_json(value)


def padded(content: bytes) -> bytes:
    """JSON with blanks behind it, to whole kilobytes."""
    return content + b" " * (-len(content) % PADDED_BYTES)


def encode_events(events: Sequence[tuple[str, dict[str, Any]]], *, pad: bool) -> bytes:
    """Server-sent events that go out together, names and bodies.

    Padded, the last has a random ``obfuscation`` field that fills all of them to whole kilobytes, whatever the digits
    of log-probabilities: those are rounded differently in passes of another width.
    """
    written = [_event(name, body) for name, body in events]
    if pad and events:
        length = sum(map(len, written)) + len(b',"obfuscation":""')
        spare = sum(_spare_digits(body) for _, body in events)
        missing = spare + -(length + spare) % PADDED_BYTES
        name, last = events[-1]
        written[-1] = _event(name, {**last, "obfuscation": secrets.token_hex((missing + 1) // 2)[:missing]})
    return b"".join(written)


def _event(name: str, body: dict[str, Any]) -> bytes:
    head = b"event: " + name.encode() + b"\ndata: " if name else b"data: "
    return head + pydantic_core.to_json(body) + b"\n\n"


def filler() -> bytes:
    """A comment as long as the shortest padded event."""
    return b": " + secrets.token_hex(PADDED_BYTES)[: PADDED_BYTES - 4].encode() + b"\n\n"


def _spare_digits(value: Any) -> int:
    """How many characters shorter JSON is than it would be with the longest of numbers. O(values)."""
    if isinstance(value, float):
        return _LONGEST_NUMBER - len(pydantic_core.to_json(value))
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_spare_digits, value))
