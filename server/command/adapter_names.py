"""``--lora-modules``: adapters and their names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from ssd.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,30}")
"""It becomes part of a namespace's name and of module names, where a dot would be a level."""


def read_adapters(words: Sequence[str], *, model_names: Collection[str]) -> dict[str, str]:
    """Paths by name, of words ``NAME=PATH`` or ``{"name": NAME, "path": PATH}``; a list of such objects is one word.

    model_names : what adapters must not be called. Raises ConfigError.
    """
    found: dict[str, str] = {}
    for word in words:
        for name, path in _pairs(word):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"--lora-modules: {name[:80]!r} cannot be a name: take 1 to 31 characters of A-Z a-z 0-9 _ -"
                )
            if name in found or name in model_names:
                raise ConfigError(f"--lora-modules: the name {name} is given twice")
            found[name] = path
    return found


def _pairs(word: str) -> list[tuple[str, str]]:
    if not word.lstrip().startswith(("{", "[")):
        name, separator, path = word.partition("=")
        if not separator or not path:
            raise ConfigError(f"--lora-modules: expected NAME=PATH, got {word[:80]!r}")
        return [(name, path)]
    try:
        content = json.loads(word)
        objects = content if isinstance(content, list) else [content]
        return [(str(each["name"]), str(each["path"])) for each in objects]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--lora-modules: expected JSON such as {{"name": "sql", "path": "adapters/sql"}}, got {word[:80]!r}'
        ) from error
