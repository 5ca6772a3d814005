"""What was acknowledged, and what is there afterwards.

A *note* is a text that is asked for once, with a number of its own. A history says which notes were sent to which
namespace, which were acknowledged (their answer came whole), which were promised (on disk at a moment before the
fault, or acknowledged in a life that was closed in order), and which were found afterwards.
"""

from __future__ import annotations

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
    """One store's. Not for several threads at once."""

    sent: dict[int, str] = field(default_factory=dict)
    """The namespace of each note; a note is sent before it can be anywhere."""
    acknowledged: set[int] = field(default_factory=set)
    promised: set[int] = field(default_factory=set)

    def send(self, number: int, namespace: str) -> None:
        """A note is on its way. No number is sent twice."""
        assert number not in self.sent, f"note {number} was sent before"
        self.sent[number] = namespace

    def acknowledge(self, number: int) -> None:
        """Its answer came whole."""
        assert number in self.sent
        self.acknowledged.add(number)

    def promise(self, numbers: Iterable[int]) -> None:
        """These were seen where they cannot be lost any more."""
        self.promised.update(numbers)

    def promise_all(self) -> None:
        """Everything acknowledged so far must be there from now on: the store was closed in order."""
        self.promised |= self.acknowledged

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
