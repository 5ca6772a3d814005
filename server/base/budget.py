"""An amount that requests share: who finds nothing left is told to come back."""

from __future__ import annotations

import threading

from ssd.errors import QueueFull


class Share:
    """What one request has taken of a budget; ``give_back`` may be called more than once."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.amount = 0

    def grow(self, amount: int) -> None:
        """Take more; raises QueueFull, with nothing more taken, where the budget has not got it."""
        self._budget.take(amount)
        self.amount += amount

    def give_back(self) -> None:
        """Return all of it."""
        self._budget.put(self.amount)
        self.amount = 0


class Budget:
    """``limit`` of something, ``what`` in the words of the refusal. Safe to use from several threads."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit, self._what = limit, what
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """How much is taken."""
        return self._used

    def share(self) -> Share:
        """An empty share."""
        return Share(self)

    def take(self, amount: int) -> None:
        """Raises QueueFull where less is left."""
        with self._lock:
            if self._used + amount > self._limit:
                raise QueueFull(f"the server has all the {self._what} it takes at once: try again later")
            self._used += amount

    def put(self, amount: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._used -= amount
            assert self._used >= 0
