"""Where API keys come from, and how they stay out of the process list."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from server.observe.logs import tell
from ssd.errors import ConfigError

log = logging.getLogger(__name__)

KEY_OPTION, FILE_OPTION, PIPE_OPTION = "--api-key", "--api-key-file", "--api-key-fd"
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""What a header can carry as it is."""
_MOST_PIPED_BYTES = 16 << 10
"""Any pipe takes that much before it is read."""


class Divided(NamedTuple):
    """A command line without its keys, and the keys."""

    rest: list[str]
    keys: list[str]


def checked_keys(keys: Iterable[str], source: str) -> tuple[str, ...]:
    """The keys; raises ConfigError, which never shows a key, where one of them could not be sent in a header."""
    found = tuple(keys)
    for number, key in enumerate(found, 1):
        if not _KEY.fullmatch(key):
            what = "must not be empty" if not key.strip() else "must be printable ASCII without spaces around it"
            raise ConfigError(f"{source}: key {number} {what}")
    return found


def read_key_file(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and those that begin with # are left out.

    Raises ConfigError where it cannot be read or holds none. Warns where others than its owner may read it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{FILE_OPTION} {path} cannot be read: {reason}") from error
    lines = [line.strip() for line in text.splitlines()]
    keys = checked_keys([line for line in lines if line and not line.startswith("#")], f"{FILE_OPTION} {path}")
    if not keys:
        raise ConfigError(f"{FILE_OPTION} {path} holds no key: write one a line, or leave the option out")
    if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        log.warning("%s %s may be read by other users: chmod 600 it", FILE_OPTION, path)
    return keys


def read_pipe(descriptor: int) -> list[str]:
    """The keys that `hide_keys` handed over; the pipe is closed, so that no child inherits it. Raises ConfigError."""
    try:
        with os.fdopen(descriptor, encoding="ascii") as pipe:
            return pipe.read().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{PIPE_OPTION} {descriptor} cannot be read: give keys by {FILE_OPTION}") from error


def hide_keys() -> None:
    """Start this process again without the keys of its command line, which any user of the machine can read.

    They come back through a pipe. Returns where there is nothing to hide or the command line is not understood, and
    warns where keys stay visible.
    """
    arguments, whole = sys.argv[1:], sys.orig_argv
    rest, keys = divide(arguments)
    if not keys:
        return
    understood = bool(sys.executable) and whole[len(whole) - len(arguments) :] == arguments
    if not understood or sum(len(key) + 1 for key in keys) > _MOST_PIPED_BYTES:
        tell("warning", f"{KEY_OPTION} shows in the process list: use {FILE_OPTION}")
        return
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="ascii") as pipe:
        pipe.writelines(f"{key}\n" for key in keys)
    os.set_inheritable(reader, True)
    interpreter = whole[: len(whole) - len(arguments)]
    sys.stdout.flush()
    os.execv(sys.executable, [*interpreter, PIPE_OPTION, str(reader), *rest])


def divide(arguments: Sequence[str]) -> Divided:
    """Split a command line; no keys where one of them is missing or of no use, which the parser will say."""
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
    if all(_KEY.fullmatch(key) for key in keys):
        return Divided(rest, keys)
    return Divided([*arguments], [])
