"""Replicas that learn from each other through Redis; without it each goes on alone."""

from __future__ import annotations

import secrets
from typing import Any, Final, Self

from ssd.errors import ConfigError
from ssd.retrieval.files import check_fingerprint
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.connection import connect
from ssd.sharing.cursor import Cursor
from ssd.sharing.entry import MAX_ENTRY_TOKENS, stream_key
from ssd.sharing.reader import LogReader, Stream
from ssd.sharing.stats import SharingStats, StreamStats, all_reasons
from ssd.sharing.writer import LogWriter

DEFAULT_MAX_TOKENS = 1 << 22
"""Tokens a stream keeps: some 8 to 16 MB of Redis memory for each namespace."""

_MIN_MEAN_ENTRY_TOKENS = 64
_CLOSE_TIMEOUT_S = 3.0


class RedisLog:
    """Shares namespaces of one tokenizer with every replica that has the same URL.

    ``attach`` and ``detach`` are made to be ``on_open`` and ``on_close`` of a ``CacheSet``. One thread and connection
    write, one of each reads; neither is ever waited for. Whatever happens to Redis shows in ``stats`` and in at most
    one complaint a minute::

        append -> listener -> queue (bounded) -> writer -> XADD      stream ssd:1:{<fingerprint>:<namespace>}
        append_all_shared <- checks <- reader <- XREAD
    """

    def __init__(
        self,
        url: str,
        *,
        fingerprint: str,
        vocab_size: int,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        max_queued_tokens: int = 1 << 20,
    ) -> None:
        """Starts both threads; Redis need not be there.

        ``url`` : as ``connect`` takes it. ``fingerprint`` and ``vocab_size`` : the tokenizer's.
        ``max_tokens`` : bound of each stream. Raises ConfigError.
        """
        check_fingerprint(fingerprint)
        if max_tokens < MAX_ENTRY_TOKENS or max_queued_tokens < MAX_ENTRY_TOKENS:
            raise ConfigError(f"max_tokens and max_queued_tokens must be at least {MAX_ENTRY_TOKENS}, one full entry")
        self._fingerprint = fingerprint
        max_entries = max_entries_of(max_tokens)
        self._writer = LogWriter(url, max_entries=max_entries, max_queued_tokens=max_queued_tokens)
        self.reader = LogReader(url, vocab_size=vocab_size, max_tokens=max_tokens, max_entries=max_entries)
        self._names: dict[str, str] = {}
        self._writer.loop.start()
        self.reader.loop.start()

    def attach(self, cache: SuffixCache, *, wait_s: float = 0.0) -> Stream:
        """From now on ``cache`` publishes what it learns and learns what others published. Returns at once.

        ``wait_s`` : where nothing of its log was ever read, reading begins after so many seconds, unless the reader is
        to ``resume`` it before.

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
        return self.reader.follow(key, cache, cursor, wait_s=0.0 if cursor.waypoints else wait_s)

    def detach(self, cache: SuffixCache) -> None:
        """Read its stream no more: the cache is being closed. What it has queued is written. O(1)."""
        key = stream_key(self._fingerprint, cache.name)
        self.reader.leave(key)
        self._writer.count_no_more(key)
        self._names.pop(key, None)

    def forget(self, namespace: str) -> None:
        """Remove the stream of a namespace that is not attached any more, and what is queued for it.

        Waits for Redis; raises its errors. A replica that still writes there makes the stream anew.
        """
        key = stream_key(self._fingerprint, namespace)
        self.reader.leave(key)
        self._writer.remove(key)

    def stats(self) -> SharingStats:
        """The counters as they are now."""
        writer, reader = self._writer, self.reader
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
            num_failures=writer.loop.num_failures + reader.loop.num_failures,
            num_reconnects=writer.loop.num_reconnects + reader.loop.num_reconnects,
            refusals=all_reasons(writer.loop.refusals + reader.loop.refusals, reader.invalid),
            delays=reader.delays,
            streams=self._streams(),
        )

    def _streams(self) -> dict[str, StreamStats]:
        names, sent = dict(self._names), self._writer.sent()
        return {
            names[key]: received.stats(*sent.get(key, (0, 0)))
            for key, received in self.reader.received().items()
            if key in names
        }

    def close(self) -> None:
        """Write what is queued if Redis takes it at once, then stop. At most some seconds; may be called twice."""
        self._writer.stop()
        self.reader.stop()
        self._writer.close(_CLOSE_TIMEOUT_S)
        self.reader.close(_CLOSE_TIMEOUT_S)

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
