"""The half of a log that writes: what this replica learned, as entries, in batches, off the request path."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.suffix_cache import Pieces
from ssd.sharing.background import BackgroundLoop
from ssd.sharing.connection import Backoff, connect
from ssd.sharing.cursor import sequence_id_of
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS, Entry, pack_entry
from ssd.sharing.stream import append, is_cluster


class WriteQueue:
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


_BATCH = 64
_IDLE_S = 0.5


class LogWriter:
    """A bounded queue for each stream, and the thread that empties them into Redis.

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
        self._sent: dict[str, tuple[int, int]] = {}
        self._num_taken = 0  # entries out of their queue and not written yet
        self.loop = BackgroundLoop("ssd-share-writer", url, self._exchange)

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
            queue = self._queues.setdefault(key, WriteQueue(key))
            for entry in entries:
                queue.put(entry)
            self._drop_oldest()
        self._is_filled.set()

    def count(self, key: str) -> None:
        """From now on count what is written to stream ``key``. O(1)."""
        with self._lock:
            self._sent.setdefault(key, (0, 0))

    def count_no_more(self, key: str) -> None:
        """Forget what was counted of stream ``key``. O(1)."""
        with self._lock:
            self._sent.pop(key, None)

    def sent(self) -> dict[str, tuple[int, int]]:
        """Entries and their bytes that were written to each stream that is counted."""
        with self._lock:
            return dict(self._sent)

    def remove(self, key: str) -> None:
        """Write nothing of what is queued for stream ``key``, and delete it. Waits for Redis; raises its errors."""
        with self._lock:
            queue = self._queues.get(key)
            if queue is not None:
                queue.take(len(queue))
        self._client.delete(key)

    @property
    def num_queued(self) -> int:
        """Entries not written yet."""
        with self._lock:
            return sum(map(len, self._queues.values())) + self._num_taken

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
                queue.wake()
        self._is_filled.set()

    def close(self, timeout_s: float) -> None:
        """Wait for the end and give the connection back; what could not be written counts as dropped."""
        self.loop.join(timeout_s)
        if self.num_queued and self.loop.is_connected:  # stopped before it saw the last of them
            with contextlib.suppress(Exception):
                self._exchange()
        with self._lock:
            self.num_dropped += sum(map(len, self._queues.values()))
            self._queues.clear()
        self._client.close()

    def _exchange(self) -> None:
        """Write until nothing is due."""
        self._is_filled.wait(_IDLE_S)  # and look now and then what may be tried again
        self._is_filled.clear()
        while taken := self._take():
            queue, entries = taken
            refused, reason = entries, None
            try:
                refused, reason = self._write(queue.key, entries)
            finally:
                self._settle(queue, num_written=len(entries) - len(refused), refused=refused, reason=reason)
            if reason is not None:
                self.loop.report(reason)

    def _write(self, key: str, entries: list[Entry]) -> tuple[list[Entry], Exception | None]:
        """Returns what was refused, and why. Raises what ends the connection."""
        from redis.exceptions import ConnectionError, ResponseError, TimeoutError

        values = [pack_entry(entry, key) for entry in entries]
        try:
            answers = append(self._client, key, values, max_entries=self._max_entries)
        except ResponseError as error:
            return entries, error
        except (ConnectionError, TimeoutError, OSError) as error:
            if not self._is_cluster:
                raise
            return entries, error  # of a cluster it is one node, the others take what is theirs
        refused = [entry for entry, answer in zip(entries, answers, strict=True) if answer is not None]
        num_bytes = sum(len(value) for value, answer in zip(values, answers, strict=True) if answer is None)
        self._count(key, len(entries) - len(refused), num_bytes)
        self.num_published += len(entries) - len(refused)
        self.num_published_tokens += sum(
            len(entry.tokens) for entry, answer in zip(entries, answers, strict=True) if answer is None
        )
        return refused, next((answer for answer in answers if answer is not None), None)

    def _count(self, key: str, num_entries: int, num_bytes: int) -> None:
        with self._lock:
            if (sent := self._sent.get(key)) is not None:
                self._sent[key] = (sent[0] + num_entries, sent[1] + num_bytes)

    def _take(self) -> tuple[WriteQueue, list[Entry]] | None:
        with self._lock:
            queue = next((queue for queue in self._queues.values() if queue.is_due), None)
            if queue is None:
                return None
            self._queues[queue.key] = self._queues.pop(queue.key)  # the others come first the next time
            entries = queue.take(_BATCH)
            self._num_taken = len(entries)
            return queue, entries

    def _settle(self, queue: WriteQueue, *, num_written: int, refused: list[Entry], reason: Exception | None) -> None:
        with self._lock:
            self._num_taken = 0
            queue.put_back(refused)
            if reason is not None or not refused:  # the server answered
                queue.answered(num_written=num_written, num_refused=len(refused))
            if not queue and not queue.is_refused:
                del self._queues[queue.key]
            self._drop_oldest()
        if refused:
            self._is_filled.set()

    def _drop_oldest(self) -> None:
        num_tokens = sum(queue.num_tokens for queue in self._queues.values())
        while num_tokens > self._max_queued_tokens:
            dropped = max(self._queues.values(), key=lambda queue: queue.num_tokens).take(1)
            num_tokens -= len(dropped[0].tokens)
            self.num_dropped += 1
