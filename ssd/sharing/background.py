"""How a background thread lives with a server that comes and goes."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from ssd.sharing.connection import address_of, hide_password

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 3.0
_LOG_INTERVAL_S = 60.0


class Backoff:
    """Growing delays between attempts, from 0.1 to 3 seconds, spread so that replicas do not return all at once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The last attempt worked."""
        self._delay_s = _FIRST_DELAY_S
        self._until = 0.0

    def next_delay_s(self) -> float:
        """Seconds to wait before the next attempt."""
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s * random.uniform(0.75, 1.0)

    def rest(self) -> None:
        """Attempt nothing for the next delay."""
        self._until = time.monotonic() + self.next_delay_s()

    @property
    def is_resting(self) -> bool:
        """Whether nothing is to be attempted now."""
        return time.monotonic() < self._until


class BackgroundLoop:
    """Runs one exchange with the server after another on a daemon thread until it is stopped; failures only delay it.

    ``is_connected``, ``num_failures`` and ``num_reconnects`` are written by that thread alone.
    """

    def __init__(self, name: str, url: str, exchange: Callable[[], None]) -> None:
        """``exchange`` : one round; whatever it raises counts as a failure and is tried again after a delay."""
        self.is_connected = False
        self.num_failures = 0
        self.num_reconnects = 0
        """How often an exchange worked again after it had failed."""
        self._url = url
        self._exchange = exchange
        self._stopping = threading.Event()
        self._next_log = 0.0
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start
        self.stop = self._stopping.set  # the current round is the last one

    @property
    def is_stopping(self) -> bool:
        """True once ``stop`` was called."""
        return self._stopping.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait so long; True as soon as ``stop`` was called."""
        return self._stopping.wait(seconds)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, at most so long."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def report(self, error: Exception) -> None:
        """Count a failure, and say so at most once a minute. Only the loop's own thread calls it."""
        self.num_failures += 1
        if time.monotonic() < self._next_log:
            return
        self._next_log = time.monotonic() + _LOG_INTERVAL_S
        self._has_complained = True
        reason = hide_password(f"{type(error).__name__}: {error}", self._url)
        log.warning(
            "%s interrupted (%s), retrying; requests are served without it. %d failures so far: %s",
            self._thread.name, address_of(self._url), self.num_failures, reason,
        )  # fmt: skip

    def _run(self) -> None:
        backoff = Backoff()
        while not self.is_stopping:
            try:
                self._exchange()
            except Exception as error:  # the thread must outlive every kind of trouble with the server
                self.is_connected = False
                self.report(error)
                self.wait(backoff.next_delay_s())
                continue
            if not self.is_connected and self.num_failures:
                self.num_reconnects += 1
                if self._has_complained and not self.is_stopping:
                    log.info("%s goes on (%s)", self._thread.name, address_of(self._url))
                    self._has_complained = False
            self.is_connected = True
            backoff.reset()
