"""How long somebody is waited for who sends or takes bytes slowly."""

from __future__ import annotations


class Patience:
    """A bucket of seconds that leaks all the time and is filled by bytes that moved.

    Who stalls has ``seconds``; who moves ``bytes_per_s`` is waited for as long as it takes. All times are of one clock.
    """

    def __init__(self, seconds: float, bytes_per_s: float, now: float) -> None:
        self._seconds, self._bytes_per_s = seconds, bytes_per_s
        self.until = now + seconds
        """When patience ends."""

    def moved(self, num_bytes: int, now: float) -> None:
        """So many bytes have come, or gone, since the last call. O(1)."""
        self.until = min(now + self._seconds, self.until + num_bytes / self._bytes_per_s)
