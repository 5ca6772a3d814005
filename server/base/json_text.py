"""Writing JSON piece by piece, so that a long answer keeps nobody waiting for the interpreter's lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic_core

_PIECE = 256
"""Elements of a list that are written at once: below a millisecond even where each is a token with its alternatives."""


def json_text(value: Any) -> bytes:
    """``value`` as JSON, which the compact form of `pydantic_core.to_json` equals."""
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
