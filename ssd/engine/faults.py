"""Faults that end nothing but what they happened in: counted, logged, survived."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from ssd.errors import require_fault

log = logging.getLogger(__name__)

T = TypeVar("T")


class Faults:
    """Counts faults by where they happened, and logs the 1st, 2nd, 4th, 8th ... of each place with its traceback."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, where: str, error: BaseException, consequence: str) -> None:
        """``consequence`` : what it meant, for the log."""
        self.counts[where] += 1
        count = self.counts[where]
        if count.bit_count() == 1:
            log.error("%s failed (%d times so far): %s", where, count, consequence, exc_info=error)


class BestEffort:
    """Best-effort calls into a drafter or a cache: a failure is a count and a log line, never a failed request."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._faults = Faults()

    def __call__(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns, None where it raises."""
        try:
            return call()
        except BaseException as error:
            require_fault(error)
            self.num_failures += 1
            self._faults.note("drafting or caching", error, "requests go on without")
            return None
