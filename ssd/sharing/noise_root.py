"""What the secrets of coupled noise are made of: given, or drawn once and kept beside the cache.

Whoever knows it can say, of a prompt and a model, which answers the streams of a namespace give. So it is written to
files of its owner alone, and to nothing else: no log, no metric, no error and no ``repr`` has it.
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
from ssd.retrieval.files import NotAFileError, make_directory, make_file, open_file, write_file
from ssd.sharing.background import BackgroundLoop
from ssd.sharing.connection import connect

log = logging.getLogger(__name__)

ROOT_BYTES: Final = 32

RootSource = Literal["secret", "seed", "directory", "memory", "replicas"]
"""Whence a root is: a secret that was given, a seed, a file beside the cache, this process alone, or the replicas'."""

_KEPT: Final = re.compile(rb"[0-9a-f]{64}")


class NoiseRoot:
    """The root as it is now; made to be an engine's ``noise_root``. Safe from any thread, a call never waits."""

    def __init__(self, root: bytes, source: RootSource, path: Path | None = None) -> None:
        """``root`` : `ROOT_BYTES` bytes. ``path`` : where replicas' root is to be kept once it is known."""
        assert len(root) == ROOT_BYTES
        self.source: RootSource = source
        self._root = root
        self._path = path

    def __call__(self) -> bytes:
        return self._root

    @classmethod
    def of_secret(cls, secret: bytes) -> NoiseRoot:
        """That of a secret, which it tells nothing about."""
        return cls(hmac.digest(secret, b"root of coupled noise", hashlib.sha256), "secret")

    @classmethod
    def of_seed(cls, seed: int) -> NoiseRoot:
        """That of a seed: no secret, the same in every process."""
        return cls(hashlib.sha256(b"root of coupled noise of seed %d" % seed).digest(), "seed")

    @classmethod
    def kept_at(cls, path: Path | None) -> NoiseRoot:
        """That of a file, made now where there is none; without a file, or where it cannot be, of this process alone.

        Raises ConfigError where something else is in its place.
        """
        if path is not None:
            try:
                make_directory(path.parent)
                if not path.exists():
                    make_file(path, [secrets.token_hex(ROOT_BYTES).encode()])
                return cls(_read(path), "directory", path)
            except NotAFileError as error:
                raise ConfigError(f"{path} is no regular file: remove it") from error
            except OSError as error:
                log.warning(
                    "%s cannot be kept (%s): coupled requests are answered with other noise after a restart, and what "
                    "was answered before is drafted less often",
                    path, error.strerror,
                )  # fmt: skip
        return cls(secrets.token_bytes(ROOT_BYTES), "memory")

    def adopt(self, root: bytes) -> None:
        """From the next request on use ``root``, which is the replicas', and keep it. Waits for the disk."""
        if root != self._root:
            log.info("coupled requests draw with the noise of all replicas from now on")
            self._root = root
            if self._path is not None:
                try:
                    write_file(self._path, [root.hex().encode()], durable=True)
                except OSError as error:
                    log.warning("%s keeps the former noise: %s", self._path, error.strerror)
        self.source = "replicas"


def _read(path: Path) -> bytes:
    """What a file keeps. Raises OSError, and ConfigError."""
    with open_file(path) as file:
        content = file.read(2 * ROOT_BYTES + 1)
        mode = os.fstat(file.fileno()).st_mode
    if not _KEPT.fullmatch(content):
        raise ConfigError(f"{path} does not hold what was written there: remove it, and sampled answers are drawn anew")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s may be read by other users: chmod 600 it", path)
    return bytes.fromhex(content.decode())


KEY: Final = "ssd:1:noise"

_LOOK_S: Final = 2.0
_CLOSE_TIMEOUT_S: Final = 3.0


class SharedRoot:
    """Keeps a root the one that the key has: one connection, looked at by a thread of its own every two seconds."""

    def __init__(self, url: str, root: NoiseRoot) -> None:
        """Starts the thread; Redis need not be there. ``root`` : written where there is none. Raises ConfigError."""
        self._client = connect(url)
        self._root = root
        self._is_agreed = False
        self._has_looked = threading.Event()
        self.loop = BackgroundLoop("ssd-share-noise", url, self._exchange)
        self.loop.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the first look to end, well or not."""
        self._has_looked.wait(timeout_s)

    def close(self) -> None:
        """Look no more. At most some seconds; may be called twice."""
        self.loop.stop()
        self.loop.join(_CLOSE_TIMEOUT_S)
        self._client.close()

    def _exchange(self) -> None:
        if self._is_agreed and self.loop.wait(_LOOK_S):
            return
        self._is_agreed = False
        try:
            self._root.adopt(self._find())
        finally:
            self._has_looked.set()
        self._is_agreed = True

    def _find(self) -> bytes:
        """What replicas have agreed on. Raises StoreUnavailable where it cannot be used, and what Redis says."""
        found = self._get()
        if not found:
            self._client.set(KEY, self._root(), nx=True)
            found = self._get()
        if not isinstance(found, bytes) or len(found) != ROOT_BYTES:
            raise StoreUnavailable(f"{KEY} holds no root of noise, each server uses its own: delete that key")
        if found != self._root() and self._get() != found:
            raise StoreUnavailable(f"{KEY} was said to hold two roots of noise: an answer was damaged")
        return found

    def _get(self) -> Any:
        """At most one byte more than it may have, whatever somebody put there."""
        return self._client.getrange(KEY, 0, ROOT_BYTES)
