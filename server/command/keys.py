"""Where API keys come from, and how they stay out of the process list."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from server.observe.logs import tell
from ssd.errors import ConfigError

KEY_OPTION, FILE_OPTION = "--api-key", "--api-key-file"
API_KEY_VARIABLE = "SSD_API_KEY"
"""Keys, one a line."""
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""What a header can carry as it is."""


def checked_keys(keys: Iterable[str], source: str) -> tuple[str, ...]:
    """The keys; raises ConfigError, which never shows a key, where one of them could not be sent in a header."""
    found = tuple(keys)
    for number, key in enumerate(found, 1):
        if not _KEY.fullmatch(key):
            what = "must not be empty" if not key.strip() else "must be printable ASCII without spaces around it"
            raise ConfigError(f"{source}: key {number} {what}")
    return found


def read_key_file(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line, comments left out; warns where others may read it. Raises ConfigError."""
    from server.admission.rules import read_private  # with more than hiding keys can wait for

    content = read_private(path, FILE_OPTION)
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{FILE_OPTION} {path} cannot be read: it is not text") from error
    keys = checked_keys([line for line in lines if line and not line.startswith("#")], f"{FILE_OPTION} {path}")
    if not keys:
        raise ConfigError(f"{FILE_OPTION} {path} holds no key: write one a line, or leave the option out")
    return keys


def hide_keys() -> None:
    """Start this process again, its keys in $SSD_API_KEY: any user of the machine can read a command line."""
    arguments, whole = sys.argv[1:], sys.orig_argv
    rest, keys = divide(arguments)
    if not keys:
        return
    interpreter = whole[: len(whole) - len(arguments)]
    if not sys.executable or whole != [*interpreter, *arguments]:
        tell("warning", f"{KEY_OPTION} shows in the process list: use {FILE_OPTION}")
        return
    given = os.environ.get(API_KEY_VARIABLE)
    sys.stdout.flush()
    variables = {**os.environ, API_KEY_VARIABLE: "\n".join([*keys, *([given] if given else [])])}
    os.execve(sys.executable, [*interpreter, *rest], variables)


def divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without its keys, and the keys; none where one is missing or of no use, as the parser will say."""
    rest: list[str] = []
    keys: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == KEY_OPTION:
            value = next(words, "")
            keys.append("" if value.startswith("-") else value)  # what the parser takes for an option is no key
        elif word.startswith(f"{KEY_OPTION}="):
            keys.append(word.partition("=")[2])
        else:
            rest.append(word)
    return (rest, keys) if all(_KEY.fullmatch(key) for key in keys) else ([*arguments], [])
