"""How sharing goes: what came of each stream, and how late."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ssd.sharing.connection import BLOCK_MS
from ssd.sharing.stream import order

if TYPE_CHECKING:
    import redis


_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_LOOK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """Counters of one namespace since it was opened."""

    num_sent: int = 0
    """Entries written."""
    num_sent_bytes: int = 0
    """What they weigh as Redis keeps them, without ids."""
    num_received: int = 0
    """Entries stored here."""
    num_received_bytes: int = 0
    """What all entries that were read weigh: our own, and those that were known or failed a check, too."""
    lag_seconds: float = 0.0
    """How long this replica has not known that it read all that the stream holds, beyond the half second a read may
    wait; 0 while all is well. It grows while Redis is away, refuses, or is read more slowly than it is written."""


class Delays:
    """Seconds counted by the bounds they are not above. Written by one thread, read by any."""

    def __init__(self) -> None:
        self.bounds = _BOUNDS_S
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one. O(log bounds)."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStats:
    """Counters since the log was opened. Entries are sequences or parts of at most 4,096 tokens."""

    is_connected: bool
    """Redis answers, and refused neither what was last read nor what was last written of any namespace."""
    num_published: int = 0
    num_published_tokens: int = 0
    num_queued: int = 0
    num_received: int = 0
    """Entries that were stored here: of other replicas, and our own that a crash had lost."""
    num_received_tokens: int = 0
    num_known: int = 0
    """Entries read that are in the cache already: our own, second copies, and those from before a restart."""
    num_dropped: int = 0
    """Entries of ours that were given up: Redis was away, or refused, for longer than the queue could hold them."""
    num_invalid: int = 0
    """Entries that failed a check, or were too large to be fetched, and were skipped."""
    num_failures: int = 0
    num_reconnects: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Failures by ``background.REASONS``, and entries that failed a check by invalid_ and ``entry.INVALID``."""
    delays: Delays = field(default_factory=Delays)
    """From when an entry of another replica was appended to when it was stored here, seconds by Redis' clock."""
    streams: Mapping[str, StreamStats] = field(default_factory=dict)
    """Of each namespace that is open."""


class Received:
    """What was received of one stream, and how late by the clock by which its server names entries.

    Written by the reader's thread alone.
    """

    def __init__(self) -> None:
        self.num_entries = 0
        """Entries stored."""
        self.num_bytes = 0
        """Of all entries read."""
        self._ahead_s: float | None = None  # of the server's clock, where it is known
        self._look_at = 0.0
        self._has_caught_up = False
        self._caught_up_at = time.monotonic()

    @property
    def is_clock_due(self) -> bool:
        """Whether to ask for the server's time again."""
        return time.monotonic() >= self._look_at

    def set_clock(self, server: redis.Redis) -> None:
        """Ask ``server`` for its time, right by half of what an answer takes.

        One that does not tell, for want of rights say, is not asked for half a minute. Raises what ends the connection.
        """
        from redis.exceptions import ResponseError

        self._ahead_s, self._look_at = None, time.monotonic() + _LOOK_S
        before = time.monotonic()
        try:
            answer: Any = server.time()
            now = int(answer[0]) + int(answer[1]) / 1e6
        except (ResponseError, ValueError, TypeError, IndexError):
            return
        self._ahead_s = now - (before + time.monotonic()) / 2

    def caught_up(self) -> None:
        """Just now nothing was left to read."""
        self._has_caught_up, self._caught_up_at = True, time.monotonic()

    def delay_of(self, entry_id: bytes) -> float | None:
        """Seconds since the entry was appended; None where that is not known, or it is of the past we began with."""
        if self._ahead_s is None or not self._has_caught_up:
            return None
        now = time.monotonic() + self._ahead_s
        return max(0.0, now - order(entry_id)[0] / 1000)  # below 0 where somebody chose the id, or clocks were set

    def stats(self, num_sent: int, num_sent_bytes: int) -> StreamStats:
        """With what was sent. Safe from any thread."""
        return StreamStats(
            num_sent=num_sent,
            num_sent_bytes=num_sent_bytes,
            num_received=self.num_entries,
            num_received_bytes=self.num_bytes,
            lag_seconds=max(0.0, time.monotonic() - self._caught_up_at - BLOCK_MS / 1000),
        )
