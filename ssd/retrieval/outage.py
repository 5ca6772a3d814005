"""When a directory stops taking what is written to it, and when it takes it again: one line of log each."""

from __future__ import annotations

import logging
import time
from typing import Final

log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""What could not be written is tried again this often, beside what is sealed meanwhile."""


class Outage:
    """Whether the directory of one namespace takes what is written. Only maintenance uses it: one thread at a time.

    An outage begins with the first failure. It ends when everything is in files again, not with the first write that
    works: a disk that is nearly full takes small files all the time.
    """

    def __init__(self, name: str) -> None:
        self.is_on = False
        self._name = name
        self._retry_at = 0.0

    def failed(self, what: str, error: Exception) -> None:
        """Something could not be written."""
        if not self.is_on:
            self.is_on = True
            log.error(
                "cache namespace=%s: %s: %s. Requests are served as before; what is learned from now on is kept in "
                "memory and written once the directory can be written again, which is tried every %.0f s. Until then a "
                "restart loses it. Make room, or mount it writable",
                self._name, what, error, RETRY_S,
            )  # fmt: skip

    def over(self) -> None:
        """Everything is in files."""
        if self.is_on:
            self.is_on = False
            log.warning("cache namespace=%s: its directory can be written again, nothing is missing", self._name)

    def is_retry_due(self) -> bool:
        """Whether it is time to try again with what could not be written."""
        return time.monotonic() >= self._retry_at

    def put_off(self) -> None:
        """The retry failed: wait."""
        self._retry_at = time.monotonic() + RETRY_S
