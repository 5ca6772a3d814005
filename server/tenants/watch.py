"""Rules that change while the server runs: files are looked at every second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from server.tenants.registry import Tenants
from ssd.errors import ConfigError

log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0


class Watch:
    """Reloads tenants when one of their files has changed, and sweeps up after deletions, on a thread of its own.

    A file that cannot be used is said once, and leaves all as it was.
    """

    def __init__(self, tenants: Tenants, paths: Iterable[Path], *, interval_s: float = INTERVAL_S) -> None:
        self._tenants = tenants
        self._paths = tuple(paths)
        self._interval_s = interval_s
        self._seen = self._look()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssd-tenants", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it, at the latest after what it is at."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                if (now := self._look()) != self._seen:
                    self._seen = now
                    log.info("keys and quotas were read again: %d tenants", self._tenants.reload())
            except ConfigError as error:
                log.error("keys and quotas stay as they were: %s", error)
            except Exception:  # the thread must outlive it
                log.exception("keys and quotas stay as they were")
            try:
                self._tenants.sweep()
            except Exception:
                log.exception("what is left of deleted caches is looked for again")

    def _look(self) -> list[tuple[int, int, int] | None]:
        """What of each file tells that it was changed or replaced."""
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                found.append(None)
        return found
