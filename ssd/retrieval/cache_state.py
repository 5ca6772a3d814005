"""What stands beside the text of one namespace: how far its source was read, what drafting learned, counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

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

    def _skip_to(self, position: int) -> None:
        while len(self._pending) > 1 and self._pending[1][0] <= position:
            self._pending.popleft()


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

    def publish(self, copy: Copy) -> None:
        """Make ``copy`` the newest. O(1), from any thread."""
        self.newest = copy


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters of one namespace since it was opened; sizes are those of now. Tokens include separators."""

    num_tokens: int
    """Ring-born tokens that can be matched, at most the capacity."""
    num_kept_tokens: int
    """Of those, what stays for having been of use, though it is older than text that was evicted."""
    num_static_tokens: int
    num_borrowed_tokens: int
    """Of another namespace, searched too: text of warm-up directories, and of the shared namespace."""
    num_tail_tokens: int
    num_segments: int
    generation: int
    num_appended_tokens: int
    """Tokens given to append and append_all_shared."""
    num_skipped_tokens: int
    """Of those, prompt tokens that were stored already."""
    num_sealed: int
    num_merged: int
    num_failed_merges: int
    """Merges that could not be done, for want of memory or room on disk; each is tried again later."""
    num_evicted_segments: int
    num_evicted_tokens: int
    num_dropped_tokens: int
    """Tokens lost because sealing could not keep up."""
    num_failures: int
    """Refused appends, failed listeners, files that could not be read or written, failed merges."""
