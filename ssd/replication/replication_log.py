"""Replication of the cache's text between replicas through Redis streams. Without Redis, each replica works alone."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from ssd.errors import ConfigError
from ssd.replication.background import BackgroundLoop, Backoff
from ssd.replication.connection import connect
from ssd.replication.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS, Entry, max_entries_of, pack_entry, stream_key
from ssd.replication.offsets import ReplicaOffset, sequence_id_of
from ssd.replication.redis_stream import append_entries, is_cluster
from ssd.replication.subscriber import Subscriber
from ssd.retrieval.dedup import split_sequence
from ssd.retrieval.files import check_fingerprint
from ssd.retrieval.namespace_cache import NamespaceCache, StoredPieces

DEFAULT_MAX_TOKENS: Final = 1 << 22
"""The default maximum number of tokens in a replication stream. They take about 8 to 16 MB of Redis memory."""

_CLOSE_TIMEOUT_S = 3.0
_BATCH = 64
_IDLE_S = 0.5


class PublishQueue:
    """The queue of entries that wait to be written to one Redis stream. The caller must hold the publisher's lock."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.entries: deque[Entry] = deque()
        self.num_tokens = 0
        self.is_attached = True  # whether more entries may come
        self.is_rejected = False  # whether the server rejected entries of the last batch
        self.backoff = Backoff()

    def put(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.num_tokens += len(entry.tokens)

    def pop(self, count: int) -> list[Entry]:
        batch = [self.entries.popleft() for _ in range(min(count, len(self.entries)))]
        self.num_tokens -= sum(len(entry.tokens) for entry in batch)
        return batch

    def put_back(self, entries: list[Entry]) -> None:
        self.entries.extendleft(reversed(entries))
        self.num_tokens += sum(len(entry.tokens) for entry in entries)


class Publisher:
    """The writing half of the replication log: a bounded queue for each Redis stream, and a thread that writes.

    If too many tokens are queued because Redis is down or rejects writes, the oldest entries of the longest queue are
    dropped. An entry whose write was not confirmed is written again with the same sequence id, so that subscribers
    can detect the second copy. If Redis rejects the entries of one stream (no permission, no memory, a key of another
    type), this stream is retried after a delay, while the other streams are written.
    """

    def __init__(self, url: str, *, max_entries: int, max_queued_tokens: int) -> None:
        """Create a publisher, which connects to Redis at its first write.

        ``max_entries`` is the approximate maximum length of each stream; ``max_queued_tokens`` bounds all queues
        together.
        """
        self.num_published = 0
        self.num_published_tokens = 0
        self.num_dropped = 0
        self._max_entries = max_entries
        self._max_queued_tokens = max_queued_tokens
        self._client = connect(url)
        self._is_cluster = is_cluster(self._client)
        self._lock = threading.Lock()
        self._has_entries = threading.Event()
        self._queues: dict[str, PublishQueue] = {}  # in the order of their last writes
        self._num_in_flight = 0  # entries that left their queue and are not written yet
        self.loop = BackgroundLoop("ssd-share-writer", url, self._exchange)

    def attach(self, key: str) -> None:
        with self._lock:
            self._queues.setdefault(key, PublishQueue(key)).is_attached = True

    def publish(self, key: str, replica_id: bytes, pieces: StoredPieces) -> None:
        """Queue new text of a replica for the Redis stream ``key``. Never waits for Redis. O(entries).

        Each of the ``pieces`` is split into entries. The sequence id of a piece's k-th entry contains the sum of k and
        the piece's position in the ring buffer, so ids are unique. As a piece is never split between cache files, the
        id also shows after a restart whether the text had been written to a file.
        """
        entries: list[Entry] = []
        position = pieces.position
        for piece in pieces:
            for number, part in enumerate(split_sequence(piece, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS)):
                entries.append(Entry(replica_id, sequence_id_of(replica_id, position + number), part))
            position += len(piece) + 1
        with self._lock:
            if (queue := self._queues.get(key)) is None:
                return
            for entry in entries:
                queue.put(entry)
            self._drop_oldest()
        self._has_entries.set()

    def detach(self, key: str, *, discard: bool = False) -> None:
        """Accept no more entries for the Redis stream ``key``; with ``discard``, also drop its queued entries."""
        with self._lock:
            if (queue := self._queues.get(key)) is not None:
                queue.is_attached = False
                if discard:
                    queue.pop(len(queue.entries))
                self._remove_if_done(queue)

    def delete_stream(self, key: str) -> None:
        """Delete a Redis stream and the queued entries for it. Waits for Redis; raises redis-py's error if it fails."""
        self.detach(key, discard=True)
        self._client.delete(key)

    @property
    def num_queued(self) -> int:
        with self._lock:
            return sum(len(queue.entries) for queue in self._queues.values()) + self._num_in_flight

    @property
    def is_rejected(self) -> bool:
        """Whether the Redis server rejected the last write to any stream."""
        with self._lock:
            return any(queue.is_rejected for queue in self._queues.values())

    def stop(self) -> None:
        """End the publisher's thread after one last attempt to write the queued entries to Redis."""
        self.loop.stop()
        with self._lock:
            for queue in self._queues.values():
                queue.backoff.reset()
        self._has_entries.set()

    def close(self, timeout_s: float) -> None:
        """Wait for the publisher's thread and close the connection to Redis; entries not written count as dropped."""
        self.loop.join(timeout_s)
        if self.num_queued:  # the thread stopped before it wrote them, or while it waited for Redis
            with contextlib.suppress(Exception):
                self._exchange()
        with self._lock:
            self.num_dropped += sum(len(queue.entries) for queue in self._queues.values())
            self._queues.clear()
        self._client.close()

    def _exchange(self) -> None:
        self._has_entries.wait(_IDLE_S)  # also wakes up regularly for retries
        self._has_entries.clear()
        while batch := self._next_batch():
            queue, entries = batch
            left, reason = entries, None
            try:
                left, reason = self._write(queue, entries)
            finally:
                self._record_write(queue, entries, left, is_rejected=reason is not None)
            if reason is not None:
                self.loop.report(reason)

    def _write(self, queue: PublishQueue, entries: list[Entry]) -> tuple[list[Entry], Exception | None]:
        """Write entries to Redis; return the rejected entries and the first error, None if there is no error.

        Raises an error if the connection to a single server fails. In a cluster all entries then count as rejected.
        """
        from redis.exceptions import ConnectionError, ResponseError, TimeoutError

        values = [pack_entry(entry, queue.key) for entry in entries]
        try:
            answers = append_entries(self._client, queue.key, values, max_entries=self._max_entries)
        except ResponseError as error:
            return entries, error
        except (ConnectionError, TimeoutError, OSError) as error:
            if not self._is_cluster:
                raise
            return entries, error  # in a cluster, this affects one node only
        refused = [entry for entry, answer in zip(entries, answers, strict=True) if answer is not None]
        return refused, next((answer for answer in answers if answer is not None), None)

    def _next_batch(self) -> tuple[PublishQueue, list[Entry]] | None:
        with self._lock:
            due = (queue for queue in self._queues.values() if queue.entries and not queue.backoff.is_paused)
            if (queue := next(due, None)) is None:
                return None
            self._queues[queue.key] = self._queues.pop(queue.key)  # so that other queues come first next time
            entries = queue.pop(_BATCH)
            self._num_in_flight = len(entries)
            return queue, entries

    def _record_write(self, queue: PublishQueue, entries: list[Entry], left: list[Entry], *, is_rejected: bool) -> None:
        """Update the counters after a write, and put the entries that were not written (``left``) back in the queue."""
        with self._lock:
            self._num_in_flight = 0
            queue.put_back(left)
            num_written = len(entries) - len(left)
            self.num_published += num_written
            self.num_published_tokens += sum(len(entry.tokens) for entry in entries)
            self.num_published_tokens -= sum(len(entry.tokens) for entry in left)
            if is_rejected or not left:  # the server replied
                queue.is_rejected = is_rejected
                if num_written:
                    queue.backoff.reset()
                if is_rejected:
                    queue.backoff.pause()
            self._remove_if_done(queue)
            self._drop_oldest()
        if left:
            self._has_entries.set()

    def _remove_if_done(self, queue: PublishQueue) -> None:
        if not queue.is_attached and not queue.entries and self._queues.get(queue.key) is queue:
            del self._queues[queue.key]

    def _drop_oldest(self) -> None:
        num_tokens = sum(queue.num_tokens for queue in self._queues.values())
        while num_tokens > self._max_queued_tokens:
            dropped = max(self._queues.values(), key=lambda queue: queue.num_tokens).pop(1)
            num_tokens -= len(dropped[0].tokens)
            self.num_dropped += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """The state of the replication stream of one namespace."""

    lag_seconds: float = 0.0
    """The seconds since this replica last reached the end of the replication stream; 0 in normal operation.

    The lag grows while Redis is down or rejects reads, or if the stream is written faster than it is read. The half
    second for which a read may wait for new entries is subtracted.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationStats:
    """Counters of replication through Redis. An entry has at most 4,096 tokens; a longer sequence has several."""

    is_connected: bool  # Redis answers, and rejected neither the last read nor the last write of any namespace
    num_published: int = 0
    num_published_tokens: int = 0
    num_queued: int = 0
    num_received: int = 0  # stored entries: of other replicas, and own ones that were lost in a crash
    num_received_tokens: int = 0
    num_known: int = 0  # entries whose text was in the cache already: own ones, second copies, from before a restart
    num_dropped: int = 0  # own entries that were dropped because the queue was full while Redis did not accept them
    num_invalid: int = 0  # entries that failed verification or were too large, and were skipped
    num_failures: int = 0  # failed calls of Redis
    num_reconnects: int = 0
    streams: Mapping[str, StreamStats] = field(default_factory=dict)  # by namespace


class ReplicationLog:
    """Replicates the text of caches between all replicas with the same Redis URL and tokenizer.

    One thread writes to Redis and another thread reads, each with a connection of its own, so callers never wait for
    Redis. Failures of Redis are visible in ``stats`` and in at most one log line per minute. ``attach`` and ``detach``
    can be used as ``on_open`` and ``on_close`` of a ``CacheManager``::

        append -> listener -> queue (bounded) -> publisher -> XADD      stream ssd:1:{<fingerprint>:<namespace>}
        append_replicated <- verification <- subscriber <- XREAD
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
        """Start the threads that read and write the replication streams. Redis need not be reachable.

        Each stream keeps the newest ``max_tokens`` tokens (fewer if the cache is smaller), which a new replica reads at
        its start. At most ``max_queued_tokens`` of all streams wait to be written.

        Raises:
            ConfigError: An argument is invalid.
        """
        check_fingerprint(fingerprint)
        if max_tokens < MAX_ENTRY_TOKENS or max_queued_tokens < MAX_ENTRY_TOKENS:
            raise ConfigError(
                f"max_tokens and max_queued_tokens must be at least {MAX_ENTRY_TOKENS}, got {max_tokens} and "
                f"{max_queued_tokens}"
            )
        self._fingerprint = fingerprint
        self._publisher = Publisher(url, max_entries=max_entries_of(max_tokens), max_queued_tokens=max_queued_tokens)
        self.subscriber = Subscriber(url, vocab_size=vocab_size, max_tokens=max_tokens)
        self._publisher.loop.start()
        self.subscriber.loop.start()

    def attach(self, cache: NamespaceCache) -> None:
        """From now on, publish new text of a cache to the other replicas, and add their text to the cache.

        Never waits for Redis. After a restart, a cache with a directory continues where it stopped: stream entries
        whose text is in the cache's files are not stored again. Text that was lost because it was only in the memtable
        is read back from the stream. ``ssd/replication/offsets.py`` describes the cases in which text is stored twice.
        """
        key = stream_key(self._fingerprint, cache.name)
        replica_id = secrets.token_bytes(8)  # never stored: the directory may be a copy whose original is in use
        offset = ReplicaOffset(replica_id, cache.checkpoint)
        cache.set_source(offset.to_json())  # stored with the first segment of this incarnation
        cache.add_listener(lambda pieces: self._publisher.publish(key, replica_id, pieces))
        self._publisher.attach(key)
        self.subscriber.subscribe(key, cache, offset)

    def detach(self, cache: NamespaceCache) -> None:
        """Stop reading the Redis stream of a cache that is being closed; entries already queued are still written."""
        key = stream_key(self._fingerprint, cache.name)
        self.subscriber.unsubscribe(key)
        self._publisher.detach(key)

    def delete_stream(self, namespace: str) -> None:
        """Delete the Redis stream of a namespace, after `detach`, together with the queued entries for it.

        Waits for Redis; raises redis-py's error if it fails. A replica that still writes to the stream creates it
        again.
        """
        key = stream_key(self._fingerprint, namespace)
        self.subscriber.unsubscribe(key)
        self._publisher.delete_stream(key)

    def stats(self) -> ReplicationStats:
        publisher, subscriber = self._publisher, self.subscriber
        return ReplicationStats(
            is_connected=subscriber.is_connected and publisher.loop.is_connected and not publisher.is_rejected,
            num_published=publisher.num_published,
            num_published_tokens=publisher.num_published_tokens,
            num_queued=publisher.num_queued,
            num_received=subscriber.num_received,
            num_received_tokens=subscriber.num_received_tokens,
            num_known=subscriber.num_known,
            num_dropped=publisher.num_dropped,
            num_invalid=subscriber.num_invalid,
            num_failures=publisher.loop.num_failures + subscriber.loop.num_failures,
            num_reconnects=publisher.loop.num_reconnects + subscriber.loop.num_reconnects,
            streams={each.name: StreamStats(lag_seconds=each.lag_s) for each in subscriber.streams()},
        )

    def close(self) -> None:
        """Write the queued entries if Redis accepts them immediately, and stop the threads. May be called twice."""
        self._publisher.stop()
        self.subscriber.stop()
        self._publisher.close(_CLOSE_TIMEOUT_S)
        self.subscriber.close(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


COUNTERS_KEY: Final = "ssd:1:generations"
_MAX_COUNT: Final = 1 << 53


class RedisCounters:
    """Named counters in a Redis hash that all replicas share. Invalid values count as 0.

    Methods raise redis-py's exceptions if Redis cannot be reached or rejects a command.
    """

    def __init__(self, url: str) -> None:
        self._client = connect(url)

    def read(self, names: list[str]) -> list[int]:
        answer: Any = self._client.hmget(COUNTERS_KEY, names)
        return [_number(value) for value in answer]

    def add(self, name: str, amount: int) -> int:
        return int(self._client.hincrby(COUNTERS_KEY, name, amount))

    def raise_to(self, name: str, number: int) -> int:
        """Set a counter in Redis to ``number`` unless it is larger already, and return the counter's value."""
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
        self._client.close()


def _number(value: bytes | None) -> int:
    if value is None or len(value) > 16 or not value.isdigit():
        return 0
    return min(int(value), _MAX_COUNT - 1)
