"""What reading gives: records, and the error of what cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from ssd.errors import SSDError

Format: TypeAlias = Literal["auto", "text", "jsonl", "parquet", "arrow", "npy", "vllm"]
FORMATS: Final = ("auto", "text", "jsonl", "parquet", "arrow", "npy", "vllm")

Progress: TypeAlias = Callable[[int], None]
"""Is told how many bytes more were read of an input."""

STANDARD_INPUT: Final = "-"

LONGEST_RECORD: Final = 1 << 26
"""Bytes of a line or an element; more is not a record but another kind of file, or a bomb."""


class InputError(SSDError):
    """An input cannot be read or understood; the message begins with the file and, where there is one, the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One document, line, row or exchange. ``where`` is "file" or "file:line", for messages.

    ``line`` : the fields where they are known already, as of a table's row; then ``text`` is empty.
    """

    where: str
    text: str
    is_json: bool
    line: Mapping[str, Any] | None = None


def shown_name(name: str) -> str:
    """An input as messages call it."""
    return "standard input" if name == STANDARD_INPUT else name
