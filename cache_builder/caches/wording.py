"""Tokens and chances in words for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str] | None
"""From ids to text; None where there is no tokenizer, and ids are shown."""


def shown(ids: Sequence[int], decode: Decode) -> str:
    """The text in quotes, on one line; or the ids."""
    if decode is None:
        return f"[{' '.join(map(str, ids))}]"
    return plain(json.dumps(decode(ids), ensure_ascii=False))


def plain(text: str) -> str:
    """``text`` with what a terminal would obey, or cannot show, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def percent(chance: float) -> str:
    """Two or three digits."""
    return f"{100 * chance:.0f} %" if chance >= 0.1 else f"{100 * chance:.1f} %"
