"""What learning and upkeep of one namespace share: its index and counters under one lock."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from ssd.retrieval.index import SuffixIndex

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


log = logging.getLogger(__name__)


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
    """Tokens given to append and append_shared."""
    num_skipped_tokens: int
    """Of those, prompt tokens that were stored already."""
    num_sealed: int
    num_merged: int
    num_failed_merges: int
    """Merges that could be done neither by the rebuild process nor here; each is tried again later."""
    num_damaged_segments: int
    """Segments given up because their bytes changed while they were in use."""
    num_evicted_segments: int
    num_evicted_tokens: int
    num_dropped_tokens: int
    """Tokens lost because sealing could not keep up."""
    num_failures: int
    """Refused appends, failed listeners, files that could not be read or written, failed merges."""


class CacheState:
    """The index, the checkpoints and the counters of the namespace ``name``.

    ``lock`` : held for microseconds while any of them is changed, or read where more than one must fit together.
    ``room`` : a condition of that lock, notified when sealing made room and when the cache is being closed, which
    ``is_closing`` says.
    """

    def __init__(self, name: str, index: SuffixIndex, kept: Checkpoint | None) -> None:
        self.name = name
        self.index = index
        self.checkpoints = PendingCheckpoints(kept)
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.is_closing = False
        self.is_discarded = False
        """Whether all was to be forgotten: nothing is stored any more."""
        self.num_appended = self.num_skipped = self.num_sealed = self.num_merged = self.num_failures = 0
        self.num_failed_merges = self.num_damaged = 0
        self._complained: set[str] = set()

    @property
    def tail_start(self) -> int:
        """Ring position of the first token that no segment holds."""
        return self.index.next_position - self.index.num_tail_tokens

    def report_failure(self, what: str, error: BaseException) -> None:
        """Count a failure and log the first of its kind: what fails once often fails always."""
        self.num_failures += 1
        kind = f"{what} {type(error).__name__}"
        if kind not in self._complained:
            self._complained.add(kind)
            log.warning("cache namespace=%s: %s (logged once): %s", self.name, what, error)

    def stats(self) -> CacheStats:
        """Sizes and counters."""
        with self.lock:
            snapshot, index = self.index.snapshot(), self.index
            num_borrowed = sum(map(len, index.borrowed))
            num_static = sum(len(segment) for segment in index.own if segment.start is None)
            return CacheStats(
                num_tokens=snapshot.num_tokens - num_static - num_borrowed,
                num_kept_tokens=index.num_kept_tokens,
                num_static_tokens=num_static,
                num_borrowed_tokens=num_borrowed,
                num_tail_tokens=index.num_tail_tokens,
                num_segments=len(snapshot.segments),
                generation=snapshot.generation,
                num_appended_tokens=self.num_appended,
                num_skipped_tokens=self.num_skipped,
                num_sealed=self.num_sealed,
                num_merged=self.num_merged,
                num_failed_merges=self.num_failed_merges,
                num_damaged_segments=self.num_damaged,
                num_evicted_segments=index.num_evicted_segments,
                num_evicted_tokens=index.num_evicted_tokens,
                num_dropped_tokens=index.num_dropped_tokens,
                num_failures=self.num_failures,
            )
