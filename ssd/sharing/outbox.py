"""What waits to be written to one stream."""

from __future__ import annotations

import time
from collections import deque

from ssd.sharing.connection import Backoff
from ssd.sharing.entry import Entry


class Outbox:
    """Entries in the order they came, and when to try again after a refusal. The writer's lock guards it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.num_tokens = 0
        self.is_refused = False
        """Whether the server refused some of the last batch."""
        self._entries: deque[Entry] = deque()
        self._backoff = Backoff()
        self._rests_until = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_due(self) -> bool:
        """Whether there is something to write now."""
        return bool(self._entries) and time.monotonic() >= self._rests_until

    def put(self, entry: Entry) -> None:
        """A new one, behind the others."""
        self._entries.append(entry)
        self.num_tokens += len(entry.tokens)

    def take(self, count: int) -> list[Entry]:
        """At most ``count`` of the oldest, for whoever writes them."""
        taken = [self._entries.popleft() for _ in range(min(count, len(self._entries)))]
        self.num_tokens -= sum(len(entry.tokens) for entry in taken)
        return taken

    def put_back(self, entries: list[Entry]) -> None:
        """Those that were taken and not written, before the others."""
        self._entries.extendleft(reversed(entries))
        self.num_tokens += sum(len(entry.tokens) for entry in entries)

    def answered(self, *, num_written: int, num_refused: int) -> None:
        """What became of a batch. While the server refuses, it is asked more and more seldom."""
        if num_written:
            self._backoff.reset()
        self.is_refused = num_refused > 0
        self._rests_until = time.monotonic() + self._backoff.next_delay_s() if num_refused else 0.0

    def wake(self) -> None:
        """Try again now."""
        self._rests_until = 0.0
