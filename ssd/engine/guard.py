"""What may only make things faster must not be able to fail a request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Guard:
    """Runs something of a drafter's or a cache's: its failure is a count and a log line, never a failed request."""

    def __init__(self) -> None:
        self.num_failures = 0

    def __call__(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns, None where it raises."""
        try:
            return call()
        except Exception:
            self.num_failures += 1
            if self.num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... only
                log.exception("drafting or caching failed (%d times so far)", self.num_failures)
            return None
