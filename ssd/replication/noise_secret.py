"""The secret from which the sampling noise that requests share is derived.

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
"""The origin of the noise secret.

"secret": derived from a configured secret. "seed": derived from a seed. "directory": a file in the cache directory.
"memory": generated for this process. "replicas": the secret in Redis.
"""

_FILE_CONTENT: Final = re.compile(rb"[0-9a-f]{64}")


class NoiseSecret:
    """The current secret of the sampling noise. An engine calls this object as its ``noise_root``, from any thread."""

    def __init__(self, secret: bytes, source: SecretSource, path: Path | None = None) -> None:
        """Create a secret of `SECRET_BYTES` bytes; a secret that later replaces it (`adopt`) is stored at ``path``."""
        assert len(secret) == SECRET_BYTES
        self.source: SecretSource = source
        self._secret = secret
        self._path = path

    def __call__(self) -> bytes:
        return self._secret

    @classmethod
    def from_secret(cls, secret: bytes) -> NoiseSecret:
        """Derive the noise secret from a configured secret; the result does not reveal the configured secret."""
        return cls(hmac.digest(secret, b"root of coupled noise", hashlib.sha256), "secret")

    @classmethod
    def from_seed(cls, seed: int) -> NoiseSecret:
        """Derive the noise secret from a seed. The result is the same in every process, so it is not secret."""
        return cls(hashlib.sha256(b"root of coupled noise of seed %d" % seed).digest(), "seed")

    @classmethod
    def load_or_create(cls, path: Path | None) -> NoiseSecret:
        """Load the noise secret from a file, or generate one and write the file.

        If the file cannot be written, the secret is lost with this process. Raises ConfigError if the path is not a
        regular file.
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
                    "%s cannot be stored (%s): after a restart, coupled sampling uses other noise, and drafts "
                    "from earlier answers are accepted less often",
                    path,
                    error.strerror,
                )
        return cls(secrets.token_bytes(SECRET_BYTES), "memory")

    def adopt(self, secret: bytes) -> None:
        """Replace the noise secret by the secret that all replicas share, and store it. Waits for the disk."""
        if secret != self._secret:
            log.info("coupled sampling uses the noise secret of all replicas from now on")
            self._secret = secret
            if self._path is not None:
                try:
                    write_file(self._path, [secret.hex().encode()], durable=True)
                except OSError as error:
                    log.warning("the new noise secret could not be written to %s: %s", self._path, error.strerror)
        self.source = "replicas"


def _read(path: Path) -> bytes:
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
    """A thread that replaces the noise secret by the one in Redis, so that all replicas share sampling noise."""

    def __init__(self, url: str, secret: NoiseSecret) -> None:
        """Start the thread; ``secret`` is written to Redis if Redis has no secret. Redis need not be reachable.

        Raises ConfigError if the URL is invalid.
        """
        self._client = connect(url)
        self._secret = secret
        self._is_agreed = False
        self._has_synced = threading.Event()
        self.loop = BackgroundLoop("ssd-share-noise", url, self._exchange)
        self.loop.start()

    def wait(self, timeout_s: float) -> None:
        self._has_synced.wait(timeout_s)

    def close(self) -> None:
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
        """Return the noise secret in Redis; write ours if there is none; raise StoreUnavailable if it is invalid."""
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
        """Read the noise secret in Redis, up to one byte too much, because any client may have written the key."""
        return self._client.getrange(KEY, 0, SECRET_BYTES)
