"""What an accepted token is worth, and so how much of a draft pays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FORGETTING = 0.99
"""What a pass counts after each later one."""


class Worth:
    """Chooses what gives most tokens per second, of this pass and one like the recent ones together.

    A token that is accepted saves the time it would have taken later. How much that is, recent passes tell, and this
    one too: text that is easy to draft now is easy a little later, and what it saves is then cheap. So for an expected
    output G and a time C of the pass, and T and K the average ones of late, (G + T) / (C + K) is maximised. In replays
    of recorded outputs that gave more than G / C, and more than charging time at the rate T / K (Dinkelbach 1967).
    """

    def __init__(self) -> None:
        self._passes = self._tokens = self._seconds = 0.0  # the older the less

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A pass put out ``num_tokens``."""
        self._passes = FORGETTING * self._passes + 1.0
        self._tokens = FORGETTING * self._tokens + num_tokens
        self._seconds = FORGETTING * self._seconds + seconds

    def forget(self) -> None:
        """Begin anew."""
        self._passes = self._tokens = self._seconds = 0.0

    def price(self, num_tokens: int, seconds: float, more_seconds: float) -> float:
        """Below which chance of being accepted a drafted token cannot pay.

        ``num_tokens``, ``seconds`` : output and time of this pass without any draft. ``more_seconds`` : what a drafted
        token adds. What `best` leaves of a draft is never shorter for having ended it here.
        """
        tokens, time = self._recent()
        return more_seconds * (num_tokens + tokens) / max(seconds + time, 1e-9)

    def best(self, num_tokens: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> int:
        """Which of the ways to do this pass is best: each one's expected output and time, float64[n]."""
        tokens, time = self._recent()
        return int(np.argmax((num_tokens + tokens) / np.maximum(seconds + time, 1e-9)))

    def _recent(self) -> tuple[float, float]:
        passes = self._passes
        return (self._tokens / passes, self._seconds / passes) if passes else (0.0, 0.0)
