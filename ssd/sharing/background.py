"""How a background thread lives with a server that comes and goes."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from ssd.sharing.connection import Backoff, address_of, hide_password
from ssd.sharing.stats import reason_of

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0


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
        self.refusals: Counter[str] = Counter()
        """Failures by reason."""
        self._url = url
        self._exchange = exchange
        self._stopping = threading.Event()
        self._next_log = 0.0
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stopping(self) -> bool:
        """True once ``stop`` was called."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let the current round be the last one."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, at most so long."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def report(self, error: Exception) -> None:
        """Count a failure, and say so at most once a minute. Only the loop's own thread calls it."""
        self.num_failures += 1
        self.refusals[reason_of(error)] += 1
        self._complain(error)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                self._exchange()
            except Exception as error:  # the thread must outlive every kind of trouble with the server
                self.is_connected = False
                self.report(error)
                self._stopping.wait(backoff.next_delay_s())
                continue
            if not self.is_connected and self.num_failures:
                self.num_reconnects += 1
                if self._has_complained and not self._stopping.is_set():
                    log.info("%s goes on (%s)", self._thread.name, address_of(self._url))
                    self._has_complained = False
            self.is_connected = True
            backoff.reset()

    def _complain(self, error: Exception) -> None:
        if time.monotonic() < self._next_log:
            return
        self._next_log = time.monotonic() + _LOG_INTERVAL_S
        self._has_complained = True
        reason = hide_password(f"{type(error).__name__}: {error}", self._url)
        log.warning(
            "%s interrupted (%s), retrying; requests are served without it. %d failures so far: %s",
            self._thread.name, address_of(self._url), self.num_failures, reason,
        )  # fmt: skip
