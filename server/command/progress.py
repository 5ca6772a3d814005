"""What a start is doing, for those who wait for it."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

_INTERVAL_S = 10.0


class Progress:
    """The stage that a start has reached; one thread says it, another logs it now and then."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next_log_s = _INTERVAL_S
        self._stage = "starting"

    @property
    def seconds(self) -> float:
        """Since the start began."""
        return time.monotonic() - self._began

    def reach(self, stage: str) -> None:
        """What is being done from now on."""
        self._stage = stage
        log.debug("after %.1f s: %s", self.seconds, stage)

    def log_now_and_then(self) -> None:
        """To be called often: a line every ten seconds, so that a start that nobody hears of is one that hangs."""
        if self.seconds >= self._next_log_s:
            log.info("still starting after %.0f s: %s", self.seconds, self._stage)
            self._next_log_s = self.seconds + _INTERVAL_S
