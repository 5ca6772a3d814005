"""What the replicas of a fleet can draft from, at any time: one cache, each its own, or a log that lags.

All replicas read one log in one order. So what replica i can search at time t is the log up to t - lag, the same for
all, and what i itself stored since then: one index that is advanced in order of time, with the few own texts of the
last ``lag`` seconds in its tail, in place of an index for each replica. The texts are those that a replica holds
(``full`` has them all, the tests compare), but for guesses of its filter (``told``). What differs beside these is that
in a replica own texts stand where they came, not last, which can change which of many equally long matches is sampled.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from benchmarks.fleet.told import Told
from ssd.config import IndexConfig
from ssd.retrieval.packed import Tokens
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot, make_snapshot
from ssd.retrieval.suffix_cache import SuffixCache

FINGERPRINT = "0" * 32


class View(Protocol):
    """What the replicas know. Times never fall."""

    def snapshot(self, replica: int, now: float) -> Snapshot:
        """What ``replica`` can search."""
        ...

    def learn(self, replica: int, now: float, text: Tokens, prompt_length: int) -> None:
        """A request of ``replica`` has ended."""
        ...


class OneCache:
    """All replicas in one index."""

    def __init__(self, config: IndexConfig) -> None:
        self._cache = make_cache(config)

    def snapshot(self, replica: int, now: float) -> Snapshot:
        return self._cache.snapshot()

    def learn(self, replica: int, now: float, text: Tokens, prompt_length: int) -> None:
        self._cache.append(text, prompt_length=prompt_length)
        self._cache.maintain()


class Isolated:
    """Each replica knows what it said itself."""

    def __init__(self, replicas: int, config: IndexConfig) -> None:
        self._caches = [OneCache(config) for _ in range(replicas)]

    def snapshot(self, replica: int, now: float) -> Snapshot:
        return self._caches[replica].snapshot(replica, now)

    def learn(self, replica: int, now: float, text: Tokens, prompt_length: int) -> None:
        self._caches[replica].learn(replica, now, text, prompt_length)


class Lagging:
    """A log: what a replica said, it knows at once, and the others ``lag_s`` later. ``told`` : what was written."""

    def __init__(self, replicas: int, lag_s: float, config: IndexConfig) -> None:
        self._lag_s = lag_s
        self._cache = make_cache(config)
        self._own: list[deque[tuple[float, Tokens]]] = [deque() for _ in range(replicas)]
        self.told = Told(replicas, config)

    def snapshot(self, replica: int, now: float) -> Snapshot:
        self._advance(now - self._lag_s)
        own = self._own[replica]
        while own and own[0][0] <= now - self._lag_s:
            own.popleft()
        return with_tail(self._cache.snapshot(), [piece for _, piece in own])

    def learn(self, replica: int, now: float, text: Tokens, prompt_length: int) -> None:
        self._advance(now - self._lag_s)
        self._own[replica] += [(now, piece) for piece in self.told.learn(replica, now, text, prompt_length)]

    def _advance(self, until: float) -> None:
        for piece in self.told.advance(until):
            self._cache.append_shared(piece)
            self._cache.maintain()


def with_tail(snapshot: Snapshot, pieces: list[Tokens]) -> Snapshot:
    """``snapshot`` with sequences more at the end of its tail. O(tail)."""
    if not pieces:
        return snapshot
    tail = snapshot.ring[np.arange(snapshot.tail_start, snapshot.tail_stop) & (len(snapshot.ring) - 1)]
    text = np.concatenate([tail, *(part for piece in pieces for part in (piece, [SEPARATOR]))]).astype(np.int32)
    ring = np.full(1 << len(text).bit_length(), SEPARATOR, np.int32)
    ring[: len(text)] = text
    return make_snapshot(snapshot.generation, snapshot.segments, snapshot.segment_table, ring, 0, len(text))


def make_cache(config: IndexConfig) -> SuffixCache:
    """An empty cache without threads."""
    return SuffixCache("fleet", config, fingerprint=FINGERPRINT)
