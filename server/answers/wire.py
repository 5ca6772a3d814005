"""Serialize responses as JSON and as server-sent events, with padding if they are obfuscated."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic_core

PADDED_BYTES = 1024
"""Obfuscated events and bodies are padded to a multiple of this number of bytes. A chunk of 16 tokens fits into it."""
_LONGEST_NUMBER = 24
"""The maximum number of characters of a float64 in JSON: sign, 17 digits, point, exponent."""
_PIECE = 256
"""The number of list elements serialized in one step, which blocks other threads for less than a millisecond."""


def json_text(value: Any) -> bytes:
    """Serialize a value as JSON in several steps, between which other threads may run."""
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
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):  # choices, which may be long
        before = b"["
        for each in value:
            yield before
            yield from _pieces(each)
            before = b","
        yield b"]"
    else:
        yield pydantic_core.to_json(value)


def padded(content: bytes) -> bytes:
    return content + b" " * (-len(content) % PADDED_BYTES)


def encode_events(events: Sequence[tuple[str, dict[str, Any]]], *, pad: bool) -> bytes:
    """Serialize named server-sent events that are sent together.

    If ``pad`` is set, the last event gets a field ``obfuscation`` with random text. The total size of the events is
    then a multiple of ``PADDED_BYTES``, which tells a network observer little. Every log-probability is counted with
    its maximum length, because the number of its digits varies with the batch size and must not change the total size.
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
    """Return a server-sent comment as long as the shortest padded event, for a tick without output."""
    return b": " + secrets.token_hex(PADDED_BYTES)[: PADDED_BYTES - 4].encode() + b"\n\n"


def _spare_digits(value: Any) -> int:
    """Return how many characters the JSON text would gain if all numbers had the maximum length. O(values)."""
    if isinstance(value, float):
        return _LONGEST_NUMBER - len(pydantic_core.to_json(value))
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_spare_digits, value))
