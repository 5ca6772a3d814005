"""So much of something a minute."""

from __future__ import annotations

import math
from typing import Final

_MINUTE_S: Final = 60.0


RATE_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{name}" for what in ("limit", "remaining", "reset") for name in ("requests", "tokens")
)
"""What answers say of an account's rates."""


class Allowance:
    """A token bucket that holds a minute's worth and is full at first. What is taken may leave a debt.

    Times are seconds of one clock that does not go back. No locks.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def left(self, now: float) -> float:
        """How much may be taken; below 0 what was taken too much."""
        gained = (now - self._at) * self.per_minute / _MINUTE_S
        return min(float(self.per_minute), self._left + gained)

    def take(self, amount: float, now: float) -> None:
        """Take ``amount``, whether it is there or not; below 0 gives back."""
        self._left, self._at = min(float(self.per_minute), self.left(now) - amount), now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until ``amount``, at most a minute's worth, is there."""
        return max(0.0, (min(amount, self.per_minute) - self.left(now)) * _MINUTE_S / self.per_minute)

    def change(self, per_minute: int, now: float) -> None:
        """Another amount from now on; what was used of the old one is used of the new one."""
        used = self.per_minute - self.left(now)
        self._left, self._at, self.per_minute = per_minute - used, now, per_minute

    def headers(self, name: str, now: float) -> dict[str, str]:
        """As OpenAI says it, of ``name``: the limit, what is left of it, and when all of it is there again."""
        return {
            f"x-ratelimit-limit-{name}": str(self.per_minute),
            f"x-ratelimit-remaining-{name}": str(max(0, math.floor(self.left(now)))),
            f"x-ratelimit-reset-{name}": duration(self.wait_s(self.per_minute, now)),
        }


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: ``12ms``, ``7s``, ``1m30s``; never too short."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
