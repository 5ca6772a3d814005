"""How sharing goes: what came of each stream and how late, and why it was interrupted."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ssd.sharing.connection import BLOCK_MS
from ssd.sharing.stream import OversizedReplyError, order

if TYPE_CHECKING:
    import redis


_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_LOOK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """Counters of one namespace since it was opened, its log alone."""

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


class ServerClock:
    """A server's clock, by which it names entries, as TIME told it now and then."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None
        self._look_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether to ask again."""
        return time.monotonic() >= self._look_at

    def set_by(self, server: redis.Redis) -> None:
        """Ask ``server``. One that does not tell, for want of rights say, is not asked for half a minute.

        Raises what ends the connection.
        """
        from redis.exceptions import ResponseError

        self._ahead_s, self._look_at = None, time.monotonic() + _LOOK_S
        before = time.monotonic()
        try:
            seconds, microseconds = self._time_of(server)
        except (ResponseError, ValueError, TypeError, IndexError):
            return
        self._ahead_s = seconds + microseconds / 1e6 - (before + time.monotonic()) / 2

    def now(self) -> float | None:
        """Its time in seconds, right by half of what an answer takes; None where it is not known."""
        return None if self._ahead_s is None else time.monotonic() + self._ahead_s

    @staticmethod
    def _time_of(server: redis.Redis) -> tuple[int, int]:
        answer: Any = server.time()
        return int(answer[0]), int(answer[1])


class Received:
    """What was received of one stream. Written by the reader's thread alone."""

    def __init__(self) -> None:
        self.num_entries = 0
        """Entries stored."""
        self.num_bytes = 0
        """Of all entries read."""
        self.clock = ServerClock()
        self._has_caught_up = False
        self._caught_up_at = time.monotonic()

    def caught_up(self) -> None:
        """Just now nothing was left to read."""
        self._has_caught_up, self._caught_up_at = True, time.monotonic()

    def delay_of(self, entry_id: bytes) -> float | None:
        """Seconds since the entry was appended; None where that is not known, or it is of the past we began with."""
        now = self.clock.now()
        if now is None or not self._has_caught_up:
            return None
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


REASONS: Final = (
    "connection",
    "timeout",
    "authentication",
    "no_rights",
    "out_of_memory",
    "read_only",
    "wrong_type",
    "cluster_down",
    "busy",
    "oversized",
    "other",
)
"""What a server or the way to it may do: refuse or close a connection, not answer, know no such user, forbid a command,
be full, be a replica, hold a key of another kind, be without the node or the master that is needed, be loading or
running a script, answer too much, and all else."""

INVALID: Final = ("size", "format", "damaged", "checksum", "vocabulary")
"""What an entry that was skipped failed: its size, its format's version or numbers, its compression, its checksum, or a
token id beyond the vocabulary."""

_PREFIXES: Final = {
    "NOPERM": "no_rights",
    "WRONGTYPE": "wrong_type",
    "CLUSTERDOWN": "cluster_down",
    "MASTERDOWN": "cluster_down",
    "NOREPLICAS": "cluster_down",
    "TRYAGAIN": "cluster_down",
    "READONLY": "read_only",
    "OOM": "out_of_memory",
    "MISCONF": "read_only",
    "BUSY": "busy",
    "LOADING": "busy",
    "UNBLOCKED": "busy",
}


def reason_of(error: BaseException) -> str:
    """One of REASONS. Needs redis-py."""
    from redis import exceptions as of
    from redis.sentinel import MasterNotFoundError

    by_kind = (
        (OversizedReplyError, "oversized"),
        (of.BusyLoadingError, "busy"),
        (of.AuthenticationError, "authentication"),
        (of.AuthorizationError, "no_rights"),
        (of.NoPermissionError, "no_rights"),
        (of.OutOfMemoryError, "out_of_memory"),
        (of.ReadOnlyError, "read_only"),
        ((of.ClusterError, of.MasterDownError, of.AskError, MasterNotFoundError), "cluster_down"),
        ((of.TimeoutError, TimeoutError), "timeout"),
        ((of.ConnectionError, OSError), "connection"),
    )
    for kinds, reason in by_kind:
        if isinstance(error, kinds):
            return reason
    return _PREFIXES.get(str(error).partition(" ")[0], "other")


def all_reasons(refusals: Counter[str], invalid: Counter[str]) -> dict[str, int]:
    """Every reason with its count; those of entries as ``invalid_size`` and so on."""
    counts = {reason: refusals[reason] for reason in REASONS}
    return counts | {f"invalid_{kind}": invalid[kind] for kind in INVALID}
