"""The half of a log that reads: what other replicas learned goes into the cache."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import Any

from ssd.retrieval.cache import SuffixCache
from ssd.sharing.connection import BLOCK_MS, connect
from ssd.sharing.entry import InvalidEntryError, num_tokens_of, unpack_entry
from ssd.sharing.link import Link
from ssd.sharing.writer import FIELD

_PAGE = 64  # entries; 1 MB at most
_MAX_SEEN = 1 << 16
_BEGINNING = b"0-0"

RawEntry = tuple[bytes, dict[bytes, bytes] | None]


class Stream:
    """One namespace's stream as this replica has read it. Only the reader's thread changes it.

    ``last_id`` : id of the last entry read, None before the log was paged through. ``entries`` : (id, tokens) of what
    the log holds, oldest first, to keep it within its bound.
    """

    def __init__(self, key: str, cache: SuffixCache) -> None:
        self.key = key
        self.cache = weakref.ref(cache)
        self.last_id: bytes | None = None
        self.entries: deque[tuple[bytes, int]] = deque()
        self.num_tokens = 0

    def saw(self, entry_id: bytes, num_tokens: int) -> None:
        """Entry ``entry_id`` is in the log and has been read."""
        self.last_id = entry_id
        self.entries.append((entry_id, num_tokens))
        self.num_tokens += num_tokens

    def forget(self) -> None:
        """The log is not the one that was read."""
        self.last_id = None
        self.entries.clear()
        self.num_tokens = 0


class LogReader:
    """Follows any number of streams on one thread and one connection, and trims them.

    A stream that is new here is first paged through, newest entries first until its bound in tokens is reached, and
    stored oldest first. After that only new entries are read. Entries that were trimmed before are lost, and
    that is all.
    """

    def __init__(self, url: str, *, replica_id: bytes, vocab_size: int, max_tokens: int) -> None:
        self.num_received = 0
        self.num_received_tokens = 0
        self.num_invalid = 0
        self._replica_id = replica_id
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._client = connect(url)
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._is_changed = threading.Event()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.link = Link("ssd-share-reader", url, self._exchange)

    def follow(self, key: str, cache: SuffixCache) -> None:
        """Store what arrives in stream ``key`` in ``cache``, for as long as that lives."""
        with self._lock:
            self._streams[key] = Stream(key, cache)
        self._is_changed.set()

    def stop(self) -> None:
        """End the thread within the time a read may block."""
        self.link.stop()
        self._is_changed.set()

    def close(self, timeout_s: float) -> None:
        """Wait for the end and give the connection back."""
        self.link.join(timeout_s)
        self._client.close()

    def _exchange(self) -> None:
        streams = self._living_streams()
        if not streams:
            self._is_changed.wait(BLOCK_MS / 1000)
            self._is_changed.clear()
            self._client.ping()
            return
        if not self.link.is_connected:
            for stream in streams.values():
                self._forget_if_replaced(stream)
        for stream in streams.values():
            if stream.last_id is None:
                self._catch_up(stream)
        followed = {key: stream.last_id or _BEGINNING for key, stream in streams.items()}
        answer: Any = self._client.xread(followed, count=_PAGE, block=BLOCK_MS)  # type: ignore[arg-type]
        for key, entries in answer or ():
            stream = streams[key.decode()]
            for raw in entries:
                self._receive(stream, raw)
            self._trim(stream)

    def _living_streams(self) -> dict[str, Stream]:
        with self._lock:
            for key in [key for key, stream in self._streams.items() if stream.cache() is None]:
                del self._streams[key]
            return dict(self._streams)

    def _forget_if_replaced(self, stream: Stream) -> None:
        """After an interruption: a server that lost its data may count ids from an earlier clock."""
        newest: Any = self._client.xrevrange(stream.key, count=1)
        if stream.last_id is not None and (not newest or _order(newest[0][0]) < _order(stream.last_id)):
            stream.forget()

    def _catch_up(self, stream: Stream) -> None:
        """Read the newest ``max_tokens`` tokens of the log, page by page."""
        pages: list[RawEntry] = []
        num_tokens, before = 0, b"+"
        while num_tokens <= self._max_tokens and not self.link.is_stopping:
            page: Any = self._client.xrevrange(stream.key, max=before, count=_PAGE)
            pages += page
            num_tokens += sum(_num_tokens(raw) for raw in page)
            if len(page) < _PAGE:
                break
            before = b"(" + page[-1][0]
        stream.last_id = _BEGINNING
        for raw in reversed(pages):
            self._receive(stream, raw)
        self._trim(stream)

    def _receive(self, stream: Stream, raw: RawEntry) -> None:
        stream.saw(raw[0], _num_tokens(raw))
        cache = stream.cache()
        try:
            entry = unpack_entry(_data(raw), vocab_size=self._vocab_size)
        except InvalidEntryError:
            self.num_invalid += 1
            return
        if cache is None or entry.replica_id == self._replica_id or self._has_seen(entry.sequence_id):
            return
        cache.append_shared(entry.tokens)
        self.num_received += 1
        self.num_received_tokens += len(entry.tokens)

    def _has_seen(self, sequence_id: bytes) -> bool:
        if sequence_id in self._seen:
            self._seen.move_to_end(sequence_id)
            return True
        self._seen[sequence_id] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def _trim(self, stream: Stream) -> None:
        """Every replica reads everything and so knows when the log is too long; trimming twice does no harm."""
        if stream.num_tokens <= self._max_tokens:
            return
        while stream.num_tokens > self._max_tokens - self._max_tokens // 16:  # some room, so as not to trim every time
            stream.num_tokens -= stream.entries.popleft()[1]
        oldest = stream.entries[0][0] if stream.entries else stream.last_id
        self._client.xtrim(stream.key, minid=oldest, approximate=False)


def _data(raw: RawEntry) -> bytes:
    """A stream entry's value; empty when it has not our field."""
    return (raw[1] or {}).get(FIELD, b"")


def _num_tokens(raw: RawEntry) -> int:
    return num_tokens_of(_data(raw))


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, number = entry_id.split(b"-")
    return int(milliseconds), int(number)
