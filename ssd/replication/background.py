"""A background thread that reads from or writes to a Redis server and continues after the server was unavailable."""

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
    """Growing delays between attempts to reach Redis, 0.1 to 3 s, random so that replicas retry at different times."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the delay between connection attempts to the shortest one, after a successful attempt."""
        self._delay_s = _FIRST_DELAY_S
        self._until = 0.0

    def next_delay_s(self) -> float:
        """Return the seconds to wait before the next attempt, and double the delay for the attempt after that."""
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s * random.uniform(0.75, 1.0)

    def pause(self) -> None:
        """Start the delay before the next attempt; until it ends, ``is_paused`` is True."""
        self._until = time.monotonic() + self.next_delay_s()

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._until


class BackgroundLoop:
    """A daemon thread that calls a function repeatedly until it is stopped, and waits after each call that fails.

    Only this thread writes ``is_connected``, ``num_failures`` and ``num_reconnects``.
    """

    def __init__(self, name: str, url: str, exchange: Callable[[], None]) -> None:
        """Create the thread; after ``start()`` it calls ``exchange`` repeatedly, with delays after errors."""
        self.is_connected = False
        self.num_failures = 0
        self.num_reconnects = 0  # the number of successes after failures
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
        return self._stopping.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for some seconds or until ``stop`` is called; return whether ``stop`` was called."""
        return self._stopping.wait(seconds)

    def join(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def report(self, error: Exception) -> None:
        """Count a failure of Redis, and log it unless one was logged in the last minute.

        Only the background thread may call this.
        """
        self.num_failures += 1
        if time.monotonic() < self._next_log:
            return
        self._next_log = time.monotonic() + _LOG_INTERVAL_S
        self._has_logged = True
        reason = redact_password(f"{type(error).__name__}: {error}", self._url)
        log.warning(
            "sharing of text is interrupted (thread %s, %s) and is retried; requests continue. Failures so "
            "far: %d; the last one: %s",
            self._thread.name,
            redacted_address(self._url),
            self.num_failures,
            reason,
        )

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
                    address = redacted_address(self._url)
                    # A warning like the interruption, as inside vLLM and SGLang nothing below is shown.
                    log.warning("sharing of text is resumed (thread %s, %s)", self._thread.name, address)
                    self._has_logged = False
            self.is_connected = True
            backoff.reset()
