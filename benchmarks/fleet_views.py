"""Who asks a fleet what, when and where, and what its replicas can draft from at any time.

All replicas read one log in one order. So what replica i can search at time t is the log up to t - lag, the same for
all, and what i itself stored since then: one index that is advanced in order of time, with the few own texts of the
last ``lag`` seconds in its tail, in place of an index for each replica. Replicas that stored everything, through the
reader and the writer that serve, accepted the same within 1 % when this shortcut was compared with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np

from cache_builder.evaluation.log import Row, TokenIds
from ssd.compiled.addresses import Int64s
from ssd.config import IndexConfig
from ssd.retrieval.packed import Tokens
from ssd.retrieval.prefixes import PrefixFilter, split_sequence
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot, make_snapshot
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS

Routing = Literal["random", "sticky"]
ROUTINGS: Final[tuple[Routing, ...]] = ("random", "sticky")


@dataclass(frozen=True, slots=True)
class Session:
    """Rows of one conversation or trajectory, in order."""

    trace: str
    rows: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a fleet is asked: each of ``replicas`` has ``concurrency`` requests running on average.

    ``tokens_per_s`` : of one request, so that when it ends does not depend on what is drafted. ``think_s`` : mean time
    between an answer and the next turn of its session. ``scored`` : share of the sessions that are drafted for; all
    are learned.
    """

    replicas: int
    concurrency: float
    tokens_per_s: float
    think_s: float
    scored: float
    seed: int


@dataclass(frozen=True, slots=True)
class Request:
    """One row in virtual time: drafted for as of ``arrival``, learned at ``end``, seconds."""

    session: int
    trace: str
    row: Row
    arrival: float
    end: float
    is_scored: bool

    @property
    def text(self) -> TokenIds:
        """int32[n], context then output."""
        return np.concatenate([self.row.context, self.row.output])


def requests_of(sessions: Sequence[Session], load: Load) -> list[Request]:
    """The requests in the order they arrive.

    Sessions come in random order, at times of a Poisson process whose rate keeps the fleet as busy as asked; a turn
    comes a while (exponential) after the one before it was answered.
    """
    random = np.random.default_rng(load.seed)
    total_s = sum(len(row.output) for session in sessions for row in session.rows) / load.tokens_per_s
    span_s = total_s / (load.replicas * load.concurrency)
    order = random.permutation(len(sessions))
    begins = np.sort(random.uniform(0.0, span_s, len(sessions)))  # a Poisson process of so many events
    is_scored = random.random(len(sessions)) < load.scored
    requests = []
    for number, time in zip(order, begins, strict=True):
        session = sessions[number]
        thinks = random.exponential(load.think_s, len(session.rows))
        for row, think_s in zip(session.rows, thinks, strict=True):
            end = time + len(row.output) / load.tokens_per_s
            requests.append(Request(int(number), session.trace, row, time, end, bool(is_scored[number])))
            time = end + think_s
    return sorted(requests, key=lambda request: request.arrival)


def places_of(requests: Sequence[Request], replicas: int, routing: Routing, seed: int) -> list[int]:
    """The replica of each request: any one, or for all of a session the same."""
    random = np.random.default_rng(seed)
    if routing == "random":
        return [int(place) for place in random.integers(replicas, size=len(requests))]
    by_session = random.integers(replicas, size=1 + max(request.session for request in requests))
    return [int(by_session[request.session]) for request in requests]


class Told:
    """A log that is read after a lag: what replicas write to it and know of it. Times never fall.

    One filter is told for all replicas, in the log's order, under each one's own text: what those that serve have, but
    where the last tokens of two blocks are equal, and a filter guesses which of them a piece goes on from.
    """

    def __init__(self, replicas: int, config: IndexConfig) -> None:
        self._all = _Filter(config)
        self._filters = [_Filter(config, self._all) for _ in range(replicas)]
        self._log: list[tuple[float, Tokens]] = []
        self._num_told = 0
        self.num_entries = 0
        self.num_tokens = 0
        """Written to the log."""

    def advance(self, until: float) -> list[Tokens]:
        """What all are told of by now and were not before: all that was written ``until`` then, in order."""
        told: list[Tokens] = []
        while self._num_told < len(self._log) and self._log[self._num_told][0] <= until:
            told.append(self._log[self._num_told][1])
            self._num_told += 1
            self._all.note(told[-1], 0)
        return told

    def learn(self, replica: int, now: float, text: Tokens, prompt_length: int) -> list[Tokens]:
        """What ``replica`` stores of a request that ended, and writes to the log."""
        pieces = self._filters[replica].pieces(text, prompt_length, 0)
        for piece in pieces:
            for part in split_sequence(piece, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS):
                self._log.append((now, part))
                self.num_entries += 1
                self.num_tokens += len(part)
        return pieces


class _Filter(PrefixFilter):
    """``told`` : what is known beside what it notes itself."""

    def __init__(self, config: IndexConfig, told: PrefixFilter | None = None) -> None:
        super().__init__(config.dedup_block_tokens, config.lead_in_tokens, follows_others=True)
        self._told = told

    def num_known(self, hashes: Int64s) -> int:
        known, before = super().num_known(hashes), -1
        while self._told is not None and known > before:
            before = known
            known += self._told.num_known(hashes[known:])
            known += super().num_known(hashes[known:])
        return known

    def block_before(self, end: int) -> int | None:
        found = super().block_before(end)
        return self._told.block_before(end) if found is None and self._told is not None else found


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
