"""The half of a log that writes: what this replica learned, as entries, in batches, off the request path."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import NamedTuple

from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.suffix_cache import Pieces
from ssd.sharing.bookmark import sequence_id_of
from ssd.sharing.connection import connect
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS, Entry, pack_entry
from ssd.sharing.link import Link

FIELD = b"e"
"""The one field of a stream entry; its value is what ``pack_entry`` made."""

_BATCH = 64
_IDLE_S = 0.5


class RefusedError(Exception):
    """The server answered, and said no: no rights, no memory, a key of another kind."""


class _Outgoing(NamedTuple):
    key: str
    entry: Entry


class LogWriter:
    """A bounded queue and the thread that empties it into Redis.

    While Redis is away the oldest entries make room for new ones. An entry whose write was not confirmed is written
    again with the same sequence id, so that readers can tell.
    """

    def __init__(self, url: str, *, max_entries: int, max_queued_tokens: int) -> None:
        """``max_entries`` : a stream is never longer than about this; ``max_queued_tokens`` : bound of the queue."""
        self.num_published = 0
        self.num_published_tokens = 0
        self.num_dropped = 0
        self._max_entries = max_entries
        self._max_queued_tokens = max_queued_tokens
        self._client = connect(url)
        self._lock = threading.Lock()
        self._is_filled = threading.Event()
        self._queue: deque[_Outgoing] = deque()
        self._num_queued_tokens = 0
        self._num_taken = 0  # entries out of the queue and not written yet
        self.link = Link("ssd-share-writer", url, self._exchange)

    def publish(self, key: str, replica_id: bytes, pieces: Pieces) -> None:
        """Queue ``pieces`` for the stream ``key``, written by ``replica_id``. Never waits for Redis. O(entries).

        The sequence id of a piece's k-th entry has the ring position of the piece plus k: the piece lies there, and
        whether a position reached a file is the same for all of it.
        """
        outgoing: list[_Outgoing] = []
        position = pieces.position
        for piece in pieces:
            for number, part in enumerate(split_sequence(piece, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS)):
                entry = Entry(replica_id, sequence_id_of(replica_id, position + number), part)
                outgoing.append(_Outgoing(key, entry))
            position += len(piece) + 1
        with self._lock:
            self._queue.extend(outgoing)
            self._num_queued_tokens += sum(len(item.entry.tokens) for item in outgoing)
            self._drop_oldest()
        self._is_filled.set()

    @property
    def num_queued(self) -> int:
        """Entries not written yet."""
        with self._lock:
            return len(self._queue) + self._num_taken

    def stop(self) -> None:
        """End the thread after one last attempt to write what is queued."""
        self.link.stop()
        self._is_filled.set()

    def close(self, timeout_s: float) -> None:
        """Wait for the end and give the connection back; what could not be written counts as dropped."""
        self.link.join(timeout_s)
        if self._queue and self.link.is_connected:  # stopped before it saw the last of them
            with contextlib.suppress(Exception):
                self._exchange()
        with self._lock:
            self.num_dropped += len(self._queue)
            self._queue.clear()
            self._num_queued_tokens = 0
        self._client.close()

    def _exchange(self) -> None:
        if not self._is_filled.wait(_IDLE_S):
            return
        self._is_filled.clear()
        while batch := self._take():
            try:
                self._write(batch)
            except RefusedError:
                raise  # asking again for the same would hold up everything behind it
            except BaseException:
                self._put_back(batch)
                raise
            finally:
                self._num_taken = 0

    def _write(self, batch: list[_Outgoing]) -> None:
        from redis.exceptions import ResponseError

        pipeline = self._client.pipeline(transaction=False)
        for key, entry in batch:
            # The bound in tokens is the reader's work; this one holds even if no reader lives.
            pipeline.xadd(key, {FIELD: pack_entry(entry)}, maxlen=self._max_entries, approximate=True)
        answers = pipeline.execute(raise_on_error=False)
        refused = [answer for answer in answers if isinstance(answer, ResponseError)]
        unanswered = [answer for answer in answers if isinstance(answer, Exception) and answer not in refused]
        if unanswered:  # all of them are written again; readers know those they have by their sequence ids
            raise unanswered[0]
        self.num_published += len(batch) - len(refused)
        self.num_published_tokens += sum(
            len(entry.tokens)
            for (_, entry), answer in zip(batch, answers, strict=True)
            if not isinstance(answer, Exception)
        )
        if refused:
            with self._lock:
                self.num_dropped += len(refused)
            raise RefusedError(str(refused[0]))

    def _take(self) -> list[_Outgoing]:
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            self._num_queued_tokens -= sum(len(item.entry.tokens) for item in batch)
            self._num_taken = len(batch)
            return batch

    def _put_back(self, batch: list[_Outgoing]) -> None:
        with self._lock:
            self._queue.extendleft(reversed(batch))
            self._num_taken = 0
            self._num_queued_tokens += sum(len(item.entry.tokens) for item in batch)
            self._drop_oldest()
        self._is_filled.set()

    def _drop_oldest(self) -> None:
        while self._num_queued_tokens > self._max_queued_tokens:
            self._num_queued_tokens -= len(self._queue.popleft().entry.tokens)
            self.num_dropped += 1
