"""The secret from which shared sampling noise is derived: configured, or generated once and stored with the cache.

The secret, a prompt and a model determine the answers of a namespace's noise streams. It is therefore written only to
files that their owner alone can read, and never to logs, metrics, errors or a ``repr``.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
from pathlib import Path
from typing import Any, Final, Literal

from ssd.errors import ConfigError, StoreUnavailable
from ssd.replication.background import BackgroundLoop
from ssd.replication.connection import connect
from ssd.retrieval.files import NotAFileError, create_file, make_directory, open_file, write_file

log = logging.getLogger(__name__)

SECRET_BYTES: Final = 32

SecretSource = Literal["secret", "seed", "directory", "memory", "replicas"]
"""The origin of the secret: a configured secret, a seed, a file in the cache directory, this process, or replicas."""

_FILE_CONTENT: Final = re.compile(rb"[0-9a-f]{64}")


class NoiseSecret:
    """The current noise secret, callable as an engine's ``noise_root``. Safe from any thread; calls never block."""

    def __init__(self, secret: bytes, source: SecretSource, path: Path | None = None) -> None:
        """Create a secret.

        Args:
            secret: `SECRET_BYTES` bytes.
            source: The origin of ``secret``.
            path: The file in which the replicas' secret is stored when it is known.
        """
        assert len(secret) == SECRET_BYTES
        self.source: SecretSource = source
        self._secret = secret
        self._path = path

    def __call__(self) -> bytes:
        return self._secret

    @classmethod
    def from_secret(cls, secret: bytes) -> NoiseSecret:
        """Derive the noise secret from a configured secret, about which it reveals nothing."""
        return cls(hmac.digest(secret, b"root of coupled noise", hashlib.sha256), "secret")

    @classmethod
    def from_seed(cls, seed: int) -> NoiseSecret:
        """Derive the noise secret from a seed; it is not secret and is the same in every process."""
        return cls(hashlib.sha256(b"root of coupled noise of seed %d" % seed).digest(), "seed")

    @classmethod
    def load_or_create(cls, path: Path | None) -> NoiseSecret:
        """Load the secret from a file, created if missing. Without a usable file, generate one for this process.

        Raises ConfigError if the path is not a regular file.
        """
        if path is not None:
            try:
                make_directory(path.parent)
                if not path.exists():
                    create_file(path, [secrets.token_hex(SECRET_BYTES).encode()])
                return cls(_read(path), "directory", path)
            except NotAFileError as error:
                raise ConfigError(f"{path} is not a regular file: remove it") from error
            except OSError as error:
                log.warning(
                    "%s cannot be stored (%s): after a restart, requests with shared noise get other noise, and drafts "
                    "from earlier answers are accepted less often",
                    path,
                    error.strerror,
                )
        return cls(secrets.token_bytes(SECRET_BYTES), "memory")

    def adopt(self, secret: bytes) -> None:
        """Use and store ``secret``, the replicas' one, from the next request on. Waits for the disk."""
        if secret != self._secret:
            log.info("requests with shared noise use the noise secret of all replicas from now on")
            self._secret = secret
            if self._path is not None:
                try:
                    write_file(self._path, [secret.hex().encode()], durable=True)
                except OSError as error:
                    log.warning("%s still has the former noise secret: %s", self._path, error.strerror)
        self.source = "replicas"


def _read(path: Path) -> bytes:
    """Read a secret's file. Raises OSError, and ConfigError."""
    with open_file(path) as file:
        content = file.read(2 * SECRET_BYTES + 1)
        mode = os.fstat(file.fileno()).st_mode
    if not _FILE_CONTENT.fullmatch(content):
        raise ConfigError(f"{path} is damaged: remove it; sampled answers will differ from earlier ones")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s is readable by other users: run chmod 600 on it", path)
    return bytes.fromhex(content.decode())


KEY: Final = "ssd:1:noise"

_INTERVAL_S: Final = 2.0
_CLOSE_TIMEOUT_S: Final = 3.0


class ReplicatedSecret:
    """Synchronizes a noise secret with the one in Redis every two seconds, on its own thread and connection."""

    def __init__(self, url: str, secret: NoiseSecret) -> None:
        """Start the thread; Redis need not be up. ``secret`` is written if Redis has none. Raises ConfigError."""
        self._client = connect(url)
        self._secret = secret
        self._is_agreed = False
        self._has_synced = threading.Event()
        self.loop = BackgroundLoop("ssd-share-noise", url, self._exchange)
        self.loop.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the first synchronization has succeeded or failed."""
        self._has_synced.wait(timeout_s)

    def close(self) -> None:
        """Stop within a few seconds. May be called twice."""
        self.loop.stop()
        self.loop.join(_CLOSE_TIMEOUT_S)
        self._client.close()

    def _exchange(self) -> None:
        if self._is_agreed and self.loop.wait(_INTERVAL_S):
            return
        self._is_agreed = False
        try:
            self._secret.adopt(self._find())
        finally:
            self._has_synced.set()
        self._is_agreed = True

    def _find(self) -> bytes:
        """Return the replicas' secret. Raises StoreUnavailable if it is unusable, and Redis errors."""
        found = self._get()
        if not found:
            self._client.set(KEY, self._secret(), nx=True)
            found = self._get()
        if not isinstance(found, bytes) or len(found) != SECRET_BYTES:
            raise StoreUnavailable(
                f"{KEY} has no valid noise secret, so that each server uses its own: delete that key"
            )
        if found != self._secret() and self._get() != found:
            raise StoreUnavailable(f"{KEY} returned two different noise secrets: a reply was damaged")
        return found

    def _get(self) -> Any:
        """Return at most ROOT_BYTES + 1 bytes of the key, because anyone may have written it."""
        return self._client.getrange(KEY, 0, SECRET_BYTES)
