"""What a body has more of than a server takes, found by counting: nothing has been made of it yet."""

from __future__ import annotations

import json
import sys
from typing import Any

from server.base.limits import Limits
from ssd.errors import RequestError


def require_counts(body: dict[str, Any], limits: Limits) -> None:
    """Raise RequestError for the first field with too much in it. What is of a wrong type is left to the schema."""
    _require_choices(body, limits)
    for name, count, most, unit in (
        ("logit_bias", _length, limits.max_logit_bias, "entries"),
        ("allowed_token_ids", _length, limits.max_allowed_token_ids, "token ids"),
        ("messages", _length, limits.max_messages, "messages"),
        ("input", _length, limits.max_messages, "items"),
        ("bad_words", _length, limits.max_bad_words, "words"),
        ("bad_words", _characters, limits.max_bad_words_characters, "characters"),
        ("stop", _characters, limits.max_stop_characters, "characters"),
        ("tools", _length, limits.max_tools, "functions"),
        ("tools", _written, limits.max_tools_characters, "characters"),
        ("functions", _length, limits.max_tools, "functions"),
        ("functions", _written, limits.max_tools_characters, "characters"),
    ):
        _require(name, count(body.get(name)), most, unit)


def _require_choices(body: dict[str, Any], limits: Limits) -> None:
    prompt: Any = body.get("prompt")
    n: Any = body.get("n")
    is_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)  # token ids are one prompt
    prompts = len(prompt) if is_several else 1
    choices = prompts * (n if type(n) is int and n > 0 else 1)
    if choices > limits.max_choices:
        param = "prompt" if prompts > limits.max_choices else "n"
        raise RequestError(
            f"prompt and n ask for {choices} choices, at most {limits.max_choices} are made: send several requests",
            param=param,
        )


def _require(name: str, count: int, most: int, unit: str) -> None:
    if count > most:
        raise RequestError(f"{name} has {count} {unit}, at most {most} are taken: leave some out", param=name)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


def _written(value: Any) -> int:
    """Characters of JSON; what is nested too deeply to be written has more than any limit."""
    if value is None:
        return 0
    try:
        return len(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return sys.maxsize


def _characters(value: Any) -> int:
    texts = value if isinstance(value, list) else [value]
    return sum(len(text) for text in texts if isinstance(text, str))
