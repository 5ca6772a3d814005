"""Whose the directories below a cache directory are: tenants' have names that only the secret of their server explains.

The secret is kept there itself, unless a server is given one. Without it, or with another, nobody finds these caches,
nor knows which of them are to be deleted with a tenant: so it has a checksum, and each manifest names its owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
from pathlib import Path
from typing import Final

from ssd.errors import CacheError
from ssd.retrieval.directory import is_of_a_cache
from ssd.retrieval.files import (
    LOCK_NAME,
    MANIFEST_NAME,
    PREVIOUS_NAME,
    Owner,
    as_checked_json,
    from_checked_json,
    read_manifest,
)

STATE_DIRECTORY: Final = ".ssd"
"""Below the cache directory; no namespace has a name that begins with a dot."""
SECRET_NAME: Final = "secret"
LEAST_SECRET_BYTES: Final = 16

_DIGITS: Final = 40
_TENANTS: Final = re.compile(rf"t[0-9a-f]{{{_DIGITS}}}")


def keyed_digest(secret: bytes, *parts: str | int) -> str:
    """An HMAC of ``parts``, as a name is made of it."""
    text = json.dumps(parts).encode()  # so that no two lists of parts are one text
    return hmac.new(secret, text, hashlib.sha256).hexdigest()[:_DIGITS]


def mark_of(secret: bytes) -> str:
    """What ``Owner.secret`` is of it: it tells nothing but whether two are the same."""
    return keyed_digest(secret, "secret")


def tenant_directories(root: Path) -> list[Path]:
    """Directories below a cache directory that are named as tenants' and hold something. Raises OSError."""
    found = [path for path in root.iterdir() if _TENANTS.fullmatch(path.name)] if root.is_dir() else []
    return sorted(path for path in found if path.is_dir() and not path.is_symlink() and _holds_something(path))


def _holds_something(path: Path) -> bool:
    return any(file.name != LOCK_NAME and is_of_a_cache(file) for file in path.iterdir())


def owner_of(path: Path) -> Owner | None:
    """Whose a directory's manifest, or the one before, says it is; None where neither does."""
    for name in (MANIFEST_NAME, PREVIOUS_NAME):
        with contextlib.suppress(CacheError, OSError):
            if (manifest := read_manifest(path, name=name)) is not None and manifest.owner is not None:
                return manifest.owner
    return None


def as_secret_file(secret: bytes) -> bytes:
    """What a file keeps of a secret."""
    return as_checked_json("secret", {"text": secret.decode("utf-8", "surrogateescape")})


def from_secret_file(content: bytes) -> tuple[bytes, bool]:
    """The secret that a file keeps, and whether it had a checksum: former versions wrote none.

    Raises ValueError for a damaged one.
    """
    if not content.startswith(b"{") and b'"xxh3"' not in content:
        if b"\0" in content or len(content.strip()) < LEAST_SECRET_BYTES:
            raise ValueError("it holds no secret")
        return content.strip(), False
    try:
        return from_checked_json("secret", content)["text"].encode("utf-8", "surrogateescape"), True
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(error) from None
