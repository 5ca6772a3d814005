"""Tables of which every namespace has one of its own, and how many of them there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from ssd.retrieval.segment_store import LearnedState

T = TypeVar("T")

MOST_TABLES: Final = 16

IDLE_PASSES: Final = 64
"""Passes that a namespace must not have been part of before another's table takes the place of its own: were there a
few more busy namespaces than tables, all would lose theirs before they are read."""


class NamespaceTables(Generic[T]):
    """Tables by namespace, MOST_TABLES at most. No locks: owned by one thread.

    A table is forgotten with its namespace; where there are too many, the one used longest ago gives way, and none that
    is in use.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        """``make`` : a new table."""
        self._make = make
        self._tables: WeakKeyDictionary[LearnedState, T] = WeakKeyDictionary()
        self._last_passes: WeakKeyDictionary[LearnedState, int] = WeakKeyDictionary()
        self._num_passes = self._full_until = 0

    def begin_pass(self) -> None:
        """Another pass has been: by passes it is told how long ago a table was used."""
        self._num_passes += 1

    def get(self, learned: LearnedState) -> T | None:
        """The table of a namespace, if it has one. O(1)."""
        return self._tables.get(learned)

    def used(self, learned: LearnedState) -> T | None:
        """The table of a namespace that has something to enter, made if there is room. O(1) but for a new one."""
        table = self._tables.get(learned)
        if table is None:
            if not self._has_room():
                return None
            table = self._tables[learned] = self._make()
        self._last_passes[learned] = self._num_passes
        return table

    def _has_room(self) -> bool:
        """Whether there may be another table, one having been forgotten for it if need be."""
        if len(self._tables) < MOST_TABLES:
            return True
        if self._num_passes < self._full_until:
            return False
        oldest = min(self._tables, key=self._last_passes.__getitem__)
        self._full_until = self._last_passes[oldest] + IDLE_PASSES
        if self._num_passes < self._full_until:
            return False
        del self._tables[oldest]
        return True
