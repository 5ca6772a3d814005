"""The owners of the directories below a cache directory. Tenants' directories have names derived from a secret.

The secret is stored in the cache directory, unless the server is configured with one. Without the right secret, the
server cannot find the tenants' caches and does not know which directories to delete with a tenant. The secret therefore
has a checksum, and each manifest names its owner.
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
from ssd.retrieval.directory import is_cache_file
from ssd.retrieval.files import (
    LOCK_NAME,
    MANIFEST_NAME,
    PREVIOUS_NAME,
    Owner,
    dump_checked_json,
    parse_checked_json,
    read_manifest,
)

STATE_DIRECTORY: Final = ".ssd"
"""The name of the directory below the cache directory that stores the server's state. No namespace can have this name.
"""
SECRET_NAME: Final = "secret"
MIN_SECRET_BYTES: Final = 16

_DIGITS: Final = 40
_TENANTS: Final = re.compile(rf"t[0-9a-f]{{{_DIGITS}}}")


def keyed_digest(secret: bytes, *parts: str | int) -> str:
    """Return a keyed hash (HMAC) of ``parts`` as text that is valid in a file name."""
    text = json.dumps(parts).encode()  # JSON, so that different lists of parts give different texts
    return hmac.new(secret, text, hashlib.sha256).hexdigest()[:_DIGITS]


def secret_id(secret: bytes) -> str:
    """Return an identifier of a server's secret that does not reveal the secret, for ``Owner.secret``."""
    return keyed_digest(secret, "secret")


def tenant_directories(root: Path) -> list[Path]:
    """Return the directories of tenants below a cache directory, except empty ones. Raises OSError."""
    found = [path for path in root.iterdir() if _TENANTS.fullmatch(path.name)] if root.is_dir() else []
    return sorted(path for path in found if path.is_dir() and not path.is_symlink() and _has_cache_files(path))


def _has_cache_files(path: Path) -> bool:
    return any(file.name != LOCK_NAME and is_cache_file(file) for file in path.iterdir())


def read_owner(path: Path) -> Owner | None:
    """Return the owner in a cache directory's manifest, or in its previous manifest; None if neither names an owner."""
    for name in (MANIFEST_NAME, PREVIOUS_NAME):
        with contextlib.suppress(CacheError, OSError):
            if (manifest := read_manifest(path, name=name)) is not None and manifest.owner is not None:
                return manifest.owner
    return None


def dump_secret(secret: bytes) -> bytes:
    return dump_checked_json("secret", {"text": secret.decode("utf-8", "surrogateescape")})


def parse_secret(content: bytes) -> tuple[bytes, bool]:
    """Parse a secret's file; return the secret and whether it had a checksum, which former versions did not write.

    Raises ValueError if the file is damaged.
    """
    if not content.startswith(b"{") and b'"xxh3"' not in content:
        if b"\0" in content or len(content.strip()) < MIN_SECRET_BYTES:
            raise ValueError("it contains no secret")
        return content.strip(), False
    try:
        return parse_checked_json("secret", content)["text"].encode("utf-8", "surrogateescape"), True
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(error) from None
