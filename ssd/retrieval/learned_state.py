"""What drafting learns about a namespace beside its text, as it crosses threads: copies that nobody changes."""

from __future__ import annotations

from typing import Protocol


class Copy(Protocol):
    """What was learned up to some moment; never changed after it was published."""

    def to_bytes(self) -> bytes:
        """All of it, for ``LearnedState.stored`` of the next process. From any thread."""
        ...


class LearnedState:
    """Where a drafter publishes copies of what it learns about a namespace, and upkeep finds the newest to save.

    What is learned has one owner, the drafter that changes it at every step; only copies get here, each with one
    assignment. Where several drafters learn about one namespace, the copy published last is kept. The retrieval layer
    knows nothing of what they hold.

    ``stored`` : bytes that the directory kept from an earlier process, None when there are none. ``newest`` : the copy
    that was published last; None before the first.
    """

    def __init__(self, stored: bytes | None = None) -> None:
        self.stored = stored
        self.newest: Copy | None = None

    def adopt(self, stored: bytes) -> None:
        """Begin with ``stored``, of another process, where nothing is known and nobody has begun. O(1), any thread."""
        if self.stored is None and self.newest is None:
            self.stored = stored

    def to_bytes(self) -> bytes | None:
        """The newest there is; None where nothing was learned."""
        newest = self.newest
        return self.stored if newest is None else newest.to_bytes()

    def publish(self, copy: Copy) -> None:
        """Make ``copy`` the newest. O(1), from any thread."""
        self.newest = copy
