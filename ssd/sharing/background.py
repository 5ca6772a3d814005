"""How a background thread lives with a server that comes and goes."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

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
        self.refusals: Counter[str] = Counter()
        """Failures by reason."""
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
        self.refusals[reason_of(error)] += 1
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


REASONS: Final = (
    "connection",
    "timeout",
    "authentication",
    "no_rights",
    "out_of_memory",
    "read_only",
    "wrong_type",
    "cluster_down",
    "busy",
    "oversized",
    "other",
)
"""What a server or the way to it may do: refuse or close a connection, not answer, know no such user, forbid a command,
be full, be a replica, hold a key of another kind, be without the node or the master that is needed, be loading or
running a script, answer too much, and all else."""

_OF_CLASS: Final = {
    "OversizedReplyError": "oversized",
    "BusyLoadingError": "busy",
    "AuthenticationError": "authentication",
    "AuthorizationError": "no_rights",
    "NoPermissionError": "no_rights",
    "OutOfMemoryError": "out_of_memory",
    "ReadOnlyError": "read_only",
    "ClusterError": "cluster_down",
    "MasterDownError": "cluster_down",
    "AskError": "cluster_down",
    "MasterNotFoundError": "cluster_down",
    "TimeoutError": "timeout",
    "ConnectionError": "connection",
    "OSError": "connection",
}
_OF_PREFIX: Final = {
    "NOPERM": "no_rights",
    "WRONGTYPE": "wrong_type",
    "CLUSTERDOWN": "cluster_down",
    "MASTERDOWN": "cluster_down",
    "NOREPLICAS": "cluster_down",
    "TRYAGAIN": "cluster_down",
    "READONLY": "read_only",
    "OOM": "out_of_memory",
    "MISCONF": "read_only",
    "BUSY": "busy",
    "LOADING": "busy",
    "UNBLOCKED": "busy",
}


def reason_of(error: BaseException) -> str:
    """One of REASONS, by the names of redis-py's exceptions, or by what a server's refusal begins with."""
    by_class = (_OF_CLASS[each.__name__] for each in type(error).__mro__ if each.__name__ in _OF_CLASS)
    return next(by_class, None) or _OF_PREFIX.get(str(error).partition(" ")[0], "other")
