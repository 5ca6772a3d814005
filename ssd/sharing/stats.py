"""How sharing goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """Of one namespace since it was opened."""

    lag_seconds: float = 0.0
    """How long this replica has not known that it read all that the stream holds, beyond the half second a read may
    wait; 0 while all is well. It grows while Redis is away, refuses, or is read more slowly than it is written."""


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
    """Calls that failed; the log says why, once a minute."""
    num_reconnects: int = 0
    streams: Mapping[str, StreamStats] = field(default_factory=dict)
    """Of each namespace that is open."""
