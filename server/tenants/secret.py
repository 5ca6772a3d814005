"""The server's secret, which names of tenants' caches and shared noise are derived from: without it none is known."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from ssd.errors import ConfigError
from ssd.retrieval.files import make_directory, make_file, open_file

log = logging.getLogger(__name__)

OPTION: Final = "--secret-file"
VARIABLE: Final = "SSD_SECRET"
STATE_DIRECTORY: Final = ".ssd"
"""Below the cache directory; no namespace has a name that begins with a dot."""

_LEAST_BYTES: Final = 16
_MOST_BYTES: Final = 4096


def given_secret(path: Path | None, environment: Mapping[str, str]) -> bytes | None:
    """The secret of a file, or of ``$SSD_SECRET``; None where neither is given. Raises ConfigError."""
    if path is not None:
        return _checked(_read(path), f"{OPTION} {path}")
    if environment.get(VARIABLE):
        return _checked(environment[VARIABLE].encode("utf-8", "surrogateescape"), f"${VARIABLE}")
    return None


def own_secret(cache_directory: Path | None) -> bytes:
    """The secret that was made for a cache directory, made now where there is none; without one, of this process.

    Raises ConfigError where there is another thing in its place.
    """
    if cache_directory is None:
        return secrets.token_bytes(32)
    path = cache_directory / STATE_DIRECTORY / "secret"
    try:
        make_directory(path.parent)
        if not path.exists():
            make_file(path, [secrets.token_hex(32).encode()])
        return _checked(_read(path, open_file), str(path))
    except OSError as error:
        log.warning(
            "%s cannot be made (%s): tenants' caches are found again after a restart only with %s or $%s",
            path, error.strerror, OPTION, VARIABLE,
        )  # fmt: skip
        return secrets.token_bytes(32)


def _read(path: Path, opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb")) -> bytes:
    """``opened`` : how; what an operator names may be a pipe, and is waited for."""
    try:
        with opened(path) as file:
            content = file.read(_MOST_BYTES + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{OPTION} {path} cannot be read: {error.strerror}") from error
    if stat.S_ISREG(mode) and mode & (stat.S_IWGRP | stat.S_IRWXO):
        log.warning("%s may be read by other users: chmod 600 it", path)
    return content.strip()


def _checked(secret: bytes, source: str) -> bytes:
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise ConfigError(
            f"{source} must hold {_LEAST_BYTES} to {_MOST_BYTES} bytes: `openssl rand -hex 32` makes a good one"
        )
    return secret
