"""One root of noise for all replicas: whoever comes first writes it, all read it.

Redis away, or whatever else is under the key, costs the agreement alone: each replica goes on with the root it has. One
that was lost with the rest of Redis is written again by those who know it.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from ssd.errors import StoreUnavailable
from ssd.sharing.connection import connect
from ssd.sharing.link import Link
from ssd.sharing.noise_root import ROOT_BYTES, NoiseRoot

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
        self._is_stopping = threading.Event()
        self._link = Link("ssd-share-noise", url, self._exchange)
        self._link.start()

    @property
    def num_failures(self) -> int:
        """Looks that failed, or found what is no root."""
        return self._link.num_failures

    @property
    def num_reconnects(self) -> int:
        """How often one worked again after it had failed."""
        return self._link.num_reconnects

    def wait(self, timeout_s: float) -> None:
        """Wait for the first look to end, well or not."""
        self._has_looked.wait(timeout_s)

    def close(self) -> None:
        """Look no more. At most some seconds; may be called twice."""
        self._link.stop()
        self._is_stopping.set()
        self._link.join(_CLOSE_TIMEOUT_S)
        self._client.close()

    def _exchange(self) -> None:
        if self._is_agreed and self._is_stopping.wait(_LOOK_S):
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
        return found

    def _get(self) -> Any:
        """At most one byte more than it may have, whatever somebody put there."""
        return self._client.getrange(KEY, 0, ROOT_BYTES)
