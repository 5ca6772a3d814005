"""The state stored with the text of one namespace: replication-log positions, learned models, and counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

SourcePosition = Mapping[str, Any]
"""A position in a replication log or another source of stored text: a JSON object that the cache does not interpret."""


class Checkpoint(NamedTuple):
    """A position in a replication log (or another source of text) up to which all text is stored in files.

    After a restart, only later text must be read again. Text that was evicted, or dropped because flushing could not
    keep up, also counts as stored, because it cannot be recovered.

    Attributes:
        source: All text of the log up to this position is in files.
        position: All text before this position of the ring buffer is in files.
    """

    source: SourcePosition
    position: int

    @classmethod
    def from_json(cls, content: object) -> Self | None:
        """Parse the output of ``to_json``; return None for anything else."""
        if not isinstance(content, dict):
            return None
        source, position = content.get("mark"), content.get("position")
        return cls(source, position) if isinstance(source, dict) and type(position) is int and position >= 0 else None

    def to_json(self) -> Mapping[str, Any]:
        return {"position": self.position, "mark": self.source}


class PendingCheckpoints:
    """Positions of a replication log that become checkpoints once the text before them is in files.

    Only one thread may use this object.
    """

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self._checkpoint = checkpoint
        self._pending: deque[tuple[int, SourcePosition]] = deque()  # oldest first, so that positions grow

    def __len__(self) -> int:
        return len(self._pending)

    def set(self, source: SourcePosition, position: int, memtable_start: int) -> None:
        """Add ``source``, the position in a replication log that was read last.

        After a restart, the log can be read from ``source`` on if all text before ring-buffer position ``position`` is
        in files. ``memtable_start`` is the ring-buffer position at which the memtable begins.
        """
        if self._pending and self._pending[-1][0] == position:
            self._pending.pop()
        self._pending.append((position, source))
        self._skip_to(memtable_start)

    def durable_at(self, position: int) -> Checkpoint | None:
        """Return the newest checkpoint that is valid if all text before ring-buffer position ``position`` is in files.

        If a segment could not be written, ``position`` is before the memtable. The result may then be older than
        necessary, because ``set`` forgets all but the newest of the checkpoints before the memtable.
        """
        self._skip_to(position)
        if self._pending and self._pending[0][0] <= position:
            self._checkpoint = Checkpoint(self._pending[0][1], position)
        return self._checkpoint

    def _skip_to(self, position: int) -> None:
        while len(self._pending) > 1 and self._pending[1][0] <= position:
            self._pending.popleft()


class PublishedState(Protocol):
    """An immutable copy of what a drafter has learned about a namespace, such as an acceptance model."""

    def to_bytes(self) -> bytes:
        """Serialize what the drafter has learned, for the file that a later process reads. Thread-safe."""
        ...


class LearnedState:
    """Holds the latest copy of what a drafter has learned about a namespace, so that this copy can be saved to disk.

    The drafter changes its own state at every step and publishes copies here, each with one assignment. If several
    drafters learn about one namespace, the copy published last is saved. This class does not interpret the copies.

    Attributes:
        stored: The bytes that an earlier process saved in the directory; None if there are none.
        newest: The copy that was published last; None if none was published.
    """

    def __init__(self, stored: bytes | None = None) -> None:
        self.stored = stored
        self.newest: PublishedState | None = None

    def publish(self, state: PublishedState) -> None:
        self.newest = state


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The counters of one namespace's cache since it was opened, and its present sizes. Separators count as tokens."""

    num_tokens: int
    """The number of stored tokens that can be matched, at most the capacity; prebuilt and shared segments do not count.
    """
    num_retained_tokens: int
    """The part of ``num_tokens`` in retained segments, i.e. old text that is not evicted because outputs repeated it.
    """
    num_prebuilt_tokens: int
    num_shared_tokens: int
    """The number of tokens of attached shared segments: prebuilt segments, and the text of the shared namespace."""
    num_memtable_tokens: int
    num_segments: int
    generation: int
    num_appended_tokens: int
    """The number of tokens that requests and other replicas passed to the cache, whether they were stored or not."""
    num_skipped_tokens: int
    """The part of ``num_appended_tokens`` that was not stored again, because earlier prompts began with the same text.
    """
    num_flushes: int
    num_merges: int
    num_failed_merges: int
    """The number of merges of segments that failed for lack of memory or disk space. Each is retried later."""
    num_evicted_segments: int
    num_evicted_tokens: int
    num_dropped_tokens: int
    """The number of tokens lost because appended text was not flushed to segments fast enough."""
    num_failures: int
    """The sum of rejected appends, failed listeners, failed reads and writes of files, and failed merges."""
