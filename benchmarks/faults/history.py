"""What was acknowledged, and what is there afterwards.

A *note* is a text that is asked for once, with a number of its own. A history says which notes were sent to which
namespace, which were acknowledged (their answer came whole), which were promised (on disk at a moment before the
fault, or acknowledged in a life of the server that was closed in order), and which were found afterwards.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Verdict:
    """``lost`` : promised, and not there. ``twice`` : there more than once. ``elsewhere`` : where they do not belong,
    or never sent at all."""

    num_promised: int
    lost: tuple[int, ...]
    twice: tuple[int, ...]
    elsewhere: tuple[int, ...]

    @property
    def is_clean(self) -> bool:
        """Nothing was lost, twice or elsewhere."""
        return not (self.lost or self.twice or self.elsewhere)


@dataclass(slots=True)
class History:
    """One store's. Several threads may tell it what they saw."""

    sent: dict[int, str] = field(default_factory=dict)
    """The namespace of each note; a note is sent before it can be anywhere."""
    acknowledged: set[int] = field(default_factory=set)
    """In this life of the server."""
    promised: set[int] = field(default_factory=set)
    family: tuple[History, ...] = ()
    """Of stores that learn from each other: a note sent to one of them may be in each."""
    _newest_of_former_life: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbering: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, namespace: str) -> int:
        """The number of a new note, which is on its way; the whole family is told."""
        with self._numbering:
            number = next(reversed(self.sent), 0) + 1
            for history in self.family or (self,):
                history.send(number, namespace)
        return number

    def send(self, number: int, namespace: str) -> None:
        """A note is on its way. Numbers grow."""
        with self._lock:
            assert number > next(reversed(self.sent), 0), f"note {number} is not a new one"
            self.sent[number] = namespace

    def acknowledge(self, number: int) -> None:
        """Its answer came whole."""
        with self._lock:
            if number > self._newest_of_former_life:
                self.acknowledged.add(number)

    def promise(self, numbers: Iterable[int]) -> None:
        """These were seen where they cannot be lost any more."""
        with self._lock:
            self.promised.update(numbers)

    def lose_all(self) -> None:
        """The store was thrown away, after its life ended: nothing is promised any more."""
        with self._lock:
            self.promised.clear()

    def end_life(self, *, in_order: bool) -> None:
        """The server ended: in order, so all it acknowledged must be there from now on, or it was killed."""
        with self._lock:
            if in_order:
                self.promised |= self.acknowledged
            self.acknowledged.clear()
            self._newest_of_former_life = next(reversed(self.sent), 0)

    def check(self, found: Iterable[tuple[str, int]]) -> Verdict:
        """``found`` : (namespace, number) for each time a note lies in the store."""
        counts = Counter(found)
        right = {number for namespace, number in counts if self.sent.get(number) == namespace}
        return Verdict(
            num_promised=len(self.promised),
            lost=tuple(sorted(self.promised - right)),
            twice=tuple(sorted(number for (_, number), count in counts.items() if count > 1)),
            elsewhere=tuple(sorted(number for namespace, number in counts if self.sent.get(number) != namespace)),
        )


def family(size: int) -> tuple[History, ...]:
    """Histories of so many stores that learn from each other; no number is given twice."""
    numbering = threading.Lock()
    members = tuple(History(_numbering=numbering) for _ in range(size))
    for member in members:
        member.family = members
    return members
