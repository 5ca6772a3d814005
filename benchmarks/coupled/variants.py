"""Near-variants of a prompt: what somebody else would ask nearly alike."""

from __future__ import annotations

import keyword
import re

import numpy as np

_WORD = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{3,}\b")
_NUMBER = re.compile(r"\b[0-9]+\b")
_OTHER_WORDS = ("value", "item", "name", "result", "index", "count", "first", "other")
_SENTENCES = (
    "# This part is called by the tests too.",
    "# Keep this in step with the documentation.",
    "# The order of the arguments matters here.",
    "# Nothing else in the module depends on it.",
)


def near_variant(text: str, random: np.random.Generator) -> str:
    """``text`` with one word or one number changed, or with a sentence added as a line of its own, at a random place.

    Which of these, each is as likely; a text without a number has a word changed, one without words gets a sentence.
    """
    kind = int(random.integers(3))
    if kind == 0 and (found := _NUMBER.findall(text)):
        return _changed(text, _NUMBER, str(int(found[0]) + int(random.integers(1, 9))), random)
    if kind < 2 and any(not keyword.iskeyword(word) for word in _WORD.findall(text)):
        return _changed(text, _WORD, str(random.choice(_OTHER_WORDS)), random)
    lines = text.split("\n")
    at = int(random.integers(len(lines) - 1))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return "\n".join([*lines[:at], indent + str(random.choice(_SENTENCES)), *lines[at:]])


def _changed(text: str, pattern: re.Pattern[str], new: str, random: np.random.Generator) -> str:
    """With one occurrence of the pattern, no keyword and not ``new`` itself, replaced by it."""
    places = [found for found in pattern.finditer(text) if not keyword.iskeyword(found[0]) and found[0] != new]
    if not places:
        return f"{new}\n{text}"
    chosen = places[int(random.integers(len(places)))]
    return text[: chosen.start()] + new + text[chosen.end() :]
