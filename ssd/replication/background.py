"""A background thread that survives interruptions of its Redis server."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from ssd.replication.connection import redact_password, redacted_address

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 3.0
_LOG_INTERVAL_S = 60.0


class Backoff:
    """Growing delays between attempts, from 0.1 to 3 seconds, randomized so that replicas reconnect one by one."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from the first delay again, after a successful attempt."""
        self._delay_s = _FIRST_DELAY_S
        self._until = 0.0

    def next_delay_s(self) -> float:
        """Return the seconds to wait before the next attempt."""
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s * random.uniform(0.75, 1.0)

    def pause(self) -> None:
        """Start the next delay, during which nothing is attempted."""
        self._until = time.monotonic() + self.next_delay_s()

    @property
    def is_paused(self) -> bool:
        """Whether a delay is in progress."""
        return time.monotonic() < self._until


class BackgroundLoop:
    """A daemon thread that repeats an exchange with the server until it is stopped. Failures only delay it.

    Only this thread writes ``is_connected``, ``num_failures`` and ``num_reconnects``.
    """

    def __init__(self, name: str, url: str, exchange: Callable[[], None]) -> None:
        """Create the thread; ``exchange`` runs one round, and is retried after a delay if it raises."""
        self.is_connected = False
        self.num_failures = 0
        self.num_reconnects = 0
        """The number of times that an exchange succeeded again after failures."""
        self._url = url
        self._exchange = exchange
        self._stopping = threading.Event()
        self._next_log = 0.0
        self._has_logged = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start
        self.stop = self._stopping.set  # the current round becomes the last one

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait, at most until ``stop`` is called; return whether it was."""
        return self._stopping.wait(seconds)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, up to the timeout."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def report(self, error: Exception) -> None:
        """Count a failure, and log one at most once a minute. Only the loop's own thread may call this."""
        self.num_failures += 1
        if time.monotonic() < self._next_log:
            return
        self._next_log = time.monotonic() + _LOG_INTERVAL_S
        self._has_logged = True
        reason = redact_password(f"{type(error).__name__}: {error}", self._url)
        log.warning(
            "%s interrupted (%s), retrying; requests are served without it. %d failures so far: %s",
            self._thread.name, redacted_address(self._url), self.num_failures, reason,
        )  # fmt: skip

    def _run(self) -> None:
        backoff = Backoff()
        while not self.is_stopping:
            try:
                self._exchange()
            except Exception as error:  # the thread must survive every failure of the server
                self.is_connected = False
                self.report(error)
                self.wait(backoff.next_delay_s())
                continue
            if not self.is_connected and self.num_failures:
                self.num_reconnects += 1
                if self._has_logged and not self.is_stopping:
                    log.info("%s resumed (%s)", self._thread.name, redacted_address(self._url))
                    self._has_logged = False
            self.is_connected = True
            backoff.reset()
