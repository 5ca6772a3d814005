"""Replicas that learn from each other through Redis; without it each goes on alone."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from ssd.errors import ConfigError
from ssd.retrieval.files import check_fingerprint
from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.suffix_cache import Pieces, SuffixCache
from ssd.sharing.background import BackgroundLoop, Backoff
from ssd.sharing.connection import connect
from ssd.sharing.cursor import Cursor, sequence_id_of
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS, Entry, max_entries_of, pack_entry, stream_key
from ssd.sharing.reader import LogReader
from ssd.sharing.stream import append, is_cluster

DEFAULT_MAX_TOKENS: Final = 1 << 22
"""Most tokens a stream keeps, as many as a cache: some 8 to 16 MB of Redis memory."""

_CLOSE_TIMEOUT_S = 3.0
_BATCH = 64
_IDLE_S = 0.5


class WriteQueue:
    """Entries for one stream in the order they came. The writer's lock guards it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.entries: deque[Entry] = deque()
        self.num_tokens = 0
        self.is_attached = True
        """Whether more may come; what is queued is written all the same."""
        self.is_refused = False
        """Whether the server refused some of the last batch."""
        self.backoff = Backoff()

    def put(self, entry: Entry) -> None:
        """A new one, behind the others."""
        self.entries.append(entry)
        self.num_tokens += len(entry.tokens)

    def take(self, count: int) -> list[Entry]:
        """At most ``count`` of the oldest, for whoever writes them."""
        taken = [self.entries.popleft() for _ in range(min(count, len(self.entries)))]
        self.num_tokens -= sum(len(entry.tokens) for entry in taken)
        return taken

    def put_back(self, entries: list[Entry]) -> None:
        """Those that were taken and not written, before the others."""
        self.entries.extendleft(reversed(entries))
        self.num_tokens += sum(len(entry.tokens) for entry in entries)


class LogWriter:
    """The half of a log that writes: a bounded queue for each stream, and the thread that empties them into Redis.

    While Redis is away, or refuses, the oldest entries make room for new ones, where most is queued. An entry whose
    write was not confirmed is written again with the same sequence id, so that readers can tell. A stream that is
    refused (no rights, no memory, a key of another kind) is tried again after a while; the others are written.
    """

    def __init__(self, url: str, *, max_entries: int, max_queued_tokens: int) -> None:
        """``max_entries`` : a stream is never longer than about this; ``max_queued_tokens`` : bound of all queues."""
        self.num_published = 0
        self.num_published_tokens = 0
        self.num_dropped = 0
        self._max_entries = max_entries
        self._max_queued_tokens = max_queued_tokens
        self._client = connect(url)
        self._is_cluster = is_cluster(self._client)
        self._lock = threading.Lock()
        self._is_filled = threading.Event()
        self._queues: dict[str, WriteQueue] = {}  # the one written last stands last
        self._num_taken = 0  # entries out of their queue and not written yet
        self.loop = BackgroundLoop("ssd-share-writer", url, self._exchange)

    def attach(self, key: str) -> None:
        """From now on stream ``key`` is written."""
        with self._lock:
            self._queues.setdefault(key, WriteQueue(key)).is_attached = True

    def publish(self, key: str, replica_id: bytes, pieces: Pieces) -> None:
        """Queue ``pieces`` for the stream ``key``, written by ``replica_id``. Never waits for Redis. O(entries).

        The sequence id of a piece's k-th entry has the ring position of the piece plus k: the piece lies there, and
        whether a position reached a file is the same for all of it.
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
        self._is_filled.set()

    def detach(self, key: str, *, discard: bool = False) -> None:
        """Nothing more comes for stream ``key``. ``discard`` : nor is what is queued written. O(1)."""
        with self._lock:
            if (queue := self._queues.get(key)) is not None:
                queue.is_attached = False
                if discard:
                    queue.take(len(queue.entries))
                self._remove_if_done(queue)

    def forget(self, key: str) -> None:
        """Delete the stream and what is queued for it. Waits for Redis; raises its errors."""
        self.detach(key, discard=True)
        self._client.delete(key)

    @property
    def num_queued(self) -> int:
        """Entries not written yet."""
        with self._lock:
            return sum(len(queue.entries) for queue in self._queues.values()) + self._num_taken

    @property
    def is_refused(self) -> bool:
        """Whether the server refused what was last written to some stream."""
        with self._lock:
            return any(queue.is_refused for queue in self._queues.values())

    def stop(self) -> None:
        """End the thread after one last attempt to write what is queued."""
        self.loop.stop()
        with self._lock:
            for queue in self._queues.values():
                queue.backoff.reset()
        self._is_filled.set()

    def close(self, timeout_s: float) -> None:
        """Wait for the end and give the connection back; what could not be written counts as dropped."""
        self.loop.join(timeout_s)
        if self.num_queued:  # stopped before it saw the last of them, or while it waited for Redis
            with contextlib.suppress(Exception):
                self._exchange()
        with self._lock:
            self.num_dropped += sum(len(queue.entries) for queue in self._queues.values())
            self._queues.clear()
        self._client.close()

    def _exchange(self) -> None:
        """Write until nothing is due."""
        self._is_filled.wait(_IDLE_S)  # and look now and then what may be tried again
        self._is_filled.clear()
        while taken := self._take():
            queue, entries = taken
            left, reason = entries, None
            try:
                left, reason = self._write(queue, entries)
            finally:
                self._settle(queue, entries, left, is_refused=reason is not None)
            if reason is not None:
                self.loop.report(reason)

    def _write(self, queue: WriteQueue, entries: list[Entry]) -> tuple[list[Entry], Exception | None]:
        """Returns what was refused, and why. Raises what ends the connection."""
        from redis.exceptions import ConnectionError, ResponseError, TimeoutError

        values = [pack_entry(entry, queue.key) for entry in entries]
        try:
            answers = append(self._client, queue.key, values, max_entries=self._max_entries)
        except ResponseError as error:
            return entries, error
        except (ConnectionError, TimeoutError, OSError) as error:
            if not self._is_cluster:
                raise
            return entries, error  # of a cluster it is one node, the others take what is theirs
        refused = [entry for entry, answer in zip(entries, answers, strict=True) if answer is not None]
        return refused, next((answer for answer in answers if answer is not None), None)

    def _take(self) -> tuple[WriteQueue, list[Entry]] | None:
        with self._lock:
            due = (queue for queue in self._queues.values() if queue.entries and not queue.backoff.is_resting)
            if (queue := next(due, None)) is None:
                return None
            self._queues[queue.key] = self._queues.pop(queue.key)  # the others come first the next time
            entries = queue.take(_BATCH)
            self._num_taken = len(entries)
            return queue, entries

    def _settle(self, queue: WriteQueue, entries: list[Entry], left: list[Entry], *, is_refused: bool) -> None:
        """``entries`` were written but for those that are ``left``, as the server refused them or did not answer."""
        with self._lock:
            self._num_taken = 0
            queue.put_back(left)
            num_written = len(entries) - len(left)
            self.num_published += num_written
            self.num_published_tokens += sum(len(entry.tokens) for entry in entries)
            self.num_published_tokens -= sum(len(entry.tokens) for entry in left)
            if is_refused or not left:  # the server answered
                queue.is_refused = is_refused
                if num_written:
                    queue.backoff.reset()
                if is_refused:
                    queue.backoff.rest()
            self._remove_if_done(queue)
            self._drop_oldest()
        if left:
            self._is_filled.set()

    def _remove_if_done(self, queue: WriteQueue) -> None:
        if not queue.is_attached and not queue.entries and self._queues.get(queue.key) is queue:
            del self._queues[queue.key]

    def _drop_oldest(self) -> None:
        num_tokens = sum(queue.num_tokens for queue in self._queues.values())
        while num_tokens > self._max_queued_tokens:
            dropped = max(self._queues.values(), key=lambda queue: queue.num_tokens).take(1)
            num_tokens -= len(dropped[0].tokens)
            self.num_dropped += 1


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

        ``url`` : as ``connect`` takes it. ``fingerprint`` and ``vocab_size`` : the tokenizer's. ``max_tokens`` : bound
        of each stream, but for those of smaller caches; a replica that joins begins with what it holds. Raises
        ConfigError.
        """
        check_fingerprint(fingerprint)
        if max_tokens < MAX_ENTRY_TOKENS or max_queued_tokens < MAX_ENTRY_TOKENS:
            raise ConfigError(f"max_tokens and max_queued_tokens must be at least {MAX_ENTRY_TOKENS}, one full entry")
        self._fingerprint = fingerprint
        self._writer = LogWriter(url, max_entries=max_entries_of(max_tokens), max_queued_tokens=max_queued_tokens)
        self.reader = LogReader(url, vocab_size=vocab_size, max_tokens=max_tokens)
        self._writer.loop.start()
        self.reader.loop.start()

    def attach(self, cache: SuffixCache) -> None:
        """From now on ``cache`` publishes what it learns and learns what others published. Returns at once.

        A cache with a directory goes on where its last life stopped: what that one sealed is not stored again, what it
        lost with its tail comes back if it was published; ``cursor`` says how, and when text is stored twice even so.
        """
        key = stream_key(self._fingerprint, cache.name)
        replica_id = secrets.token_bytes(8)  # each time another: the directory may be a copy, and its original alive
        cursor = Cursor(replica_id, cache.kept)
        cache.set_source(cursor.position())  # kept with the first segment that holds text of this life
        cache.add_listener(lambda pieces: self._writer.publish(key, replica_id, pieces))
        self._writer.attach(key)
        self.reader.follow(key, cache, cursor)

    def detach(self, cache: SuffixCache) -> None:
        """Read its stream no more: the cache is being closed. What it has queued is written. O(1)."""
        key = stream_key(self._fingerprint, cache.name)
        self.reader.leave(key)
        self._writer.detach(key)

    def forget(self, namespace: str) -> None:
        """Remove the stream of a namespace that is not attached any more, and what is queued for it.

        Waits for Redis; raises its errors. A replica that still writes there makes the stream anew.
        """
        key = stream_key(self._fingerprint, namespace)
        self.reader.leave(key)
        self._writer.forget(key)

    def stats(self) -> SharingStats:
        """The counters as they are now."""
        writer, reader = self._writer, self.reader
        return SharingStats(
            is_connected=reader.is_connected and writer.loop.is_connected and not writer.is_refused,
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
            streams={each.name: StreamStats(lag_seconds=each.lag_s) for each in reader.streams()},
        )

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
