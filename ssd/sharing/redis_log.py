"""Replicas that learn from each other through Redis; without it each goes on alone."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from ssd.errors import ConfigError
from ssd.retrieval.names import check_fingerprint
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.connection import address_of, connect
from ssd.sharing.cursor import Cursor
from ssd.sharing.entry import MAX_ENTRY_TOKENS, stream_key
from ssd.sharing.reader import LogReader
from ssd.sharing.stats import Delays, StreamStats, all_reasons
from ssd.sharing.writer import LogWriter

if TYPE_CHECKING:
    from ssd.sharing.published.published import Published

DEFAULT_MAX_TOKENS = 1 << 22
"""Tokens a stream keeps: some 8 to 16 MB of Redis memory for each namespace."""

FIRST_LOOK_S: Final = 5.0
"""Where text may be published, the log of a new namespace is not read for so long, unless it is said sooner that all is
taken: what it holds is in that text."""

_MIN_MEAN_ENTRY_TOKENS = 64
_CLOSE_TIMEOUT_S = 3.0


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
    num_taken_tokens: int = 0
    """Tokens that were stored here because others had published them, not from the log."""
    num_heads: int = 0
    """How often the whole of a namespace was published by this replica."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Failures by ``refusals.REASONS``, and entries that failed a check by ``refusals.INVALID``."""
    delays: Delays = field(default_factory=Delays)
    """From when an entry of another replica was appended to when it was stored here, seconds by Redis' clock."""
    streams: Mapping[str, StreamStats] = field(default_factory=dict)
    """Of each namespace that is open."""


class RedisLog:
    """Shares namespaces of one tokenizer with every replica that has the same URL.

    ``attach`` is made to be the ``on_open`` of a ``CacheSet``. One thread and connection write, one of each reads;
    neither is ever waited for. Whatever happens to Redis shows in ``stats`` and in at most one complaint a minute::

        append -> listener -> queue (bounded) -> writer -> XADD      stream ssd:1:{<fingerprint>:<namespace>}
        append_shared <- checks <- reader <- XREAD                    (XREVRANGE to find where to begin)
    """

    def __init__(
        self,
        url: str,
        *,
        fingerprint: str,
        vocab_size: int,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        max_queued_tokens: int = 1 << 20,
        published: Callable[[LogReader], Published] | None = None,
    ) -> None:
        """Starts both threads; Redis need not be there.

        ``url`` : as ``connect`` takes it. ``fingerprint`` and ``vocab_size`` : the tokenizer's.
        ``max_tokens`` : bound of each stream. ``published`` : makes what brings namespaces the text that others
        published before they read the log, see ``published.published.shared_log``. Raises ConfigError.
        """
        check_fingerprint(fingerprint)
        if max_tokens < MAX_ENTRY_TOKENS or max_queued_tokens < MAX_ENTRY_TOKENS:
            raise ConfigError(f"max_tokens and max_queued_tokens must be at least {MAX_ENTRY_TOKENS}, one full entry")
        self.address = address_of(url)
        self._fingerprint = fingerprint
        max_entries = max_entries_of(max_tokens)
        self._writer = LogWriter(url, max_entries=max_entries, max_queued_tokens=max_queued_tokens)
        self._reader = LogReader(url, vocab_size=vocab_size, max_tokens=max_tokens, max_entries=max_entries)
        self._published = None if published is None else published(self._reader)
        self._names: dict[str, str] = {}
        self._writer.loop.start()
        self._reader.loop.start()

    def attach(self, cache: SuffixCache) -> None:
        """From now on ``cache`` publishes what it learns and learns what others published. Returns at once.

        A cache with a directory goes on where its last life stopped: what that one sealed is not stored again, what it
        lost with its tail comes back if it was published; ``cursor`` says how, and when text is stored twice even so.
        """
        key, writer = stream_key(self._fingerprint, cache.name), self._writer
        replica_id = secrets.token_bytes(8)  # each time another: the directory may be a copy, and its original alive
        cursor = Cursor(replica_id, cache.kept)
        cache.set_source(cursor.position())  # kept with the first segment that holds text of this life
        cache.add_listener(lambda pieces: writer.publish(key, replica_id, pieces))
        self._names[key] = cache.name
        writer.count(key)
        wait_s = 0.0 if self._published is None or cursor.waypoints else FIRST_LOOK_S
        stream = self._reader.follow(key, cache, cursor, wait_s=wait_s)
        if self._published is not None:
            self._published.attach(cache, cursor, stream)

    def obey(self, discard: Callable[[str], None]) -> None:
        """Forget a namespace where that is demanded of all servers: ``discard``, then what is shared of it.

        ``discard`` : of the caches; raises CacheError where files are left over, and ConfigError for one that stays.
        """

        def forget(namespace: str) -> None:
            discard(namespace)
            self.forget(namespace)

        if self._published is not None:
            self._published.obey(forget)

    def detach(self, cache: SuffixCache) -> None:
        """Read its stream no more: the cache is being closed. What it has queued is written. O(1)."""
        key = stream_key(self._fingerprint, cache.name)
        self._reader.leave(key)
        self._writer.count_no_more(key)
        self._names.pop(key, None)
        if self._published is not None:
            self._published.leave(cache.name)

    def forget(self, namespace: str) -> None:
        """Remove the stream of a namespace that is not attached any more, and what is queued for it.

        Waits for Redis; raises its errors. A replica that still writes there makes the stream anew.
        """
        key = stream_key(self._fingerprint, namespace)
        self._reader.leave(key)
        if self._published is not None:
            self._published.leave(namespace)
        self._writer.remove(key)
        if self._published is not None:
            self._published.remove(namespace)

    def stats(self) -> SharingStats:
        """The counters as they are now."""
        writer, reader, published = self._writer, self._reader, self._published
        loops = [writer.loop, reader.loop, *([published.loop] if published else [])]
        return SharingStats(
            is_connected=reader.is_connected and not writer.is_refused,
            num_published=writer.num_published,
            num_published_tokens=writer.num_published_tokens,
            num_queued=writer.num_queued,
            num_received=reader.num_received,
            num_received_tokens=reader.num_received_tokens,
            num_known=reader.num_known,
            num_dropped=writer.num_dropped,
            num_invalid=reader.num_invalid,
            num_failures=sum(loop.num_failures for loop in loops),
            num_reconnects=sum(loop.num_reconnects for loop in loops),
            num_taken_tokens=published.joiner.num_taken_tokens if published else 0,
            num_heads=published.publisher.num_heads if published and published.publisher else 0,
            refusals=all_reasons(writer.loop.refusals + reader.loop.refusals, reader.invalid),
            delays=reader.delays,
            streams=self._streams(),
        )

    def _streams(self) -> dict[str, StreamStats]:
        names, sent = dict(self._names), self._writer.sent()
        return {
            names[key]: received.stats(*sent.get(key, (0, 0)))
            for key, received in self._reader.received().items()
            if key in names
        }

    def close(self) -> None:
        """Write what is queued if Redis takes it at once, then stop. At most some seconds; may be called twice."""
        self._writer.stop()
        self._reader.stop()
        if self._published is not None:
            self._published.stop()
        self._writer.close(_CLOSE_TIMEOUT_S)
        if self._published is not None:
            self._published.close(_CLOSE_TIMEOUT_S)
        self._reader.close(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def max_entries_of(max_tokens: int) -> int:
    """Most entries of a stream: its bound in tokens, for entries of a small mean length."""
    return max(1, max_tokens // _MIN_MEAN_ENTRY_TOKENS)


COUNTERS_KEY: Final = "ssd:1:generations"
_MOST: Final = 1 << 53


class RedisCounters:
    """A Redis hash of numbers, one connection; what is not a number there counts as 0. Any call may raise."""

    def __init__(self, url: str) -> None:
        """Nothing is sent yet. Raises ConfigError."""
        self._client = connect(url)

    def read(self, names: list[str]) -> list[int]:
        """Each number."""
        answer: Any = self._client.hmget(COUNTERS_KEY, names)
        return [_number(value) for value in answer]

    def add(self, name: str, amount: int) -> int:
        """The number after ``amount`` was added to it."""
        return int(self._client.hincrby(COUNTERS_KEY, name, amount))

    def raise_to(self, name: str, number: int) -> int:
        """The number, at least ``number`` from now on: replicas that tell an emptied Redis at once do not add up."""
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.watch(COUNTERS_KEY)  # type: ignore[no-untyped-call]
            found: Any = pipeline.hget(COUNTERS_KEY, name)
            if (counted := _number(found)) >= number:
                return counted
            pipeline.multi()
            pipeline.hset(COUNTERS_KEY, name, str(number))
            pipeline.execute()
        return number

    def close(self) -> None:
        """Give the connection back."""
        self._client.close()


def _number(value: bytes | None) -> int:
    if value is None or len(value) > 16 or not value.isdigit():
        return 0
    return min(int(value), _MOST - 1)
