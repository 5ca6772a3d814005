"""The secret from which coupled sampling derives the Gumbel noise that requests share.

It is configured, or generated once and stored with the cache. With the secret, anyone can compute a namespace's sampled
answers to a prompt. It is therefore written only to files that their owner alone can read, and never to logs, metrics,
errors or a ``repr``.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ssd.errors import ConfigError
from ssd.retrieval.files import NotAFileError, create_file, make_directory, open_file

log = logging.getLogger(__name__)

_SECRET_BYTES: Final = 32
_FILE_CONTENT: Final = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class NoiseSecret:
    """The secret from which the noise of coupled sampling is derived. Replicas with the same secret use the same noise.

    Attributes:
        secret: The 32 bytes of the secret.
        source: The origin of the secret. "secret": derived from a configured secret. "seed": derived from a seed.
            "directory": a file in the cache directory. "memory": generated for this process.
    """

    secret: bytes = field(repr=False)
    source: Literal["secret", "seed", "directory", "memory"]

    def __call__(self) -> bytes:
        return self.secret

    @classmethod
    def from_secret(cls, secret: bytes) -> NoiseSecret:
        """Derive the noise secret from a configured secret; the result does not reveal the configured secret."""
        return cls(hmac.digest(secret, b"root of coupled noise", hashlib.sha256), "secret")

    @classmethod
    def from_seed(cls, seed: int) -> NoiseSecret:
        """Derive the noise secret from a seed. Whoever knows the seed can derive it too, so it is not really secret."""
        return cls(hashlib.sha256(b"root of coupled noise of seed %d" % seed).digest(), "seed")

    @classmethod
    def load_or_create(cls, path: Path | None) -> NoiseSecret:
        """Load the noise secret from a file, or generate one and write the file.

        If the file cannot be written, the secret is lost with this process. Raises ConfigError if the path is not a
        regular file, or the file is damaged.
        """
        if path is not None:
            try:
                make_directory(path.parent)
                if not path.exists():
                    create_file(path, [secrets.token_hex(_SECRET_BYTES).encode()])
                return cls(_read(path), "directory")
            except NotAFileError as error:
                raise ConfigError(
                    f"{path} (the secret of coupled sampling) is not a regular file: remove it"
                ) from error
            except OSError as error:
                log.warning(
                    "%s cannot be stored (%s). After a restart, coupled sampling uses other noise, so drafts from "
                    "earlier answers are accepted less often. Make the directory writable",
                    path,
                    error.strerror,
                )
        return cls(secrets.token_bytes(_SECRET_BYTES), "memory")


def _read(path: Path) -> bytes:
    with open_file(path) as file:
        content = file.read(2 * _SECRET_BYTES + 1)
        mode = os.fstat(file.fileno()).st_mode
    if not _FILE_CONTENT.fullmatch(content):
        raise ConfigError(
            f"{path} (the secret of coupled sampling) is damaged: remove it. Sampled answers will then differ "
            "from earlier ones"
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s is readable by other users: run chmod 600 on it", path)
    return bytes.fromhex(content.decode())
