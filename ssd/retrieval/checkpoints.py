"""Checkpoints: how far what a cache was given has reached its files, in the words of whoever gives."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

SourcePosition = Mapping[str, Any]
"""Where the giver of text is in its source. Opaque here; JSON, and never changed after it was given."""


class Checkpoint(NamedTuple):
    """``source`` : everything given up to it is in files. ``position`` : and everything stored before it in the ring.

    Either also holds when the text was evicted, or dropped because sealing could not keep up: it is gone for good.
    """

    source: SourcePosition
    position: int

    @classmethod
    def from_json(cls, content: object) -> Self | None:
        """What ``to_json`` made; None for anything else."""
        if not isinstance(content, dict):
            return None
        source, position = content.get("mark"), content.get("position")
        return cls(source, position) if isinstance(source, dict) and type(position) is int and position >= 0 else None

    def to_json(self) -> Mapping[str, Any]:
        """For a manifest."""
        return {"position": self.position, "mark": self.source}


class PendingCheckpoints:
    """Source positions whose text is not in a file yet, each with the ring position it waits for.

    One owner, no locks.
    """

    def __init__(self, kept: Checkpoint | None = None) -> None:
        """``kept`` : holds until one set here may replace it."""
        self._kept = kept
        self._pending: deque[tuple[int, SourcePosition]] = deque()  # oldest first; positions grow

    def __len__(self) -> int:
        """Those waiting, at most one for each sequence of the tail and one more."""
        return len(self._pending)

    def set(self, source: SourcePosition, position: int, tail_start: int) -> None:
        """``source`` may be kept once everything before ``position`` is in files; the tail starts at ``tail_start``."""
        if self._pending and self._pending[-1][0] == position:
            self._pending.pop()
        self._pending.append((position, source))
        self._skip_to(tail_start)

    def kept_at(self, position: int) -> Checkpoint | None:
        """What may be written down now that everything before ``position`` is in files.

        O(1) amortised. One that ``set`` gave up meanwhile is replaced by an older one, which is true as well.
        """
        self._skip_to(position)
        if self._pending and self._pending[0][0] <= position:
            self._kept = Checkpoint(self._pending[0][1], position)
        return self._kept

    def newest_at(self, position: int) -> Checkpoint | None:
        """What is true of the text before ``position``, at which whole sequences end; None where nothing was given.

        O(number waiting).
        """
        source = next((source for at, source in reversed(self._pending) if at <= position), None)
        return None if source is None else Checkpoint(source, position)

    def _skip_to(self, position: int) -> None:
        while len(self._pending) > 1 and self._pending[1][0] <= position:
            self._pending.popleft()
