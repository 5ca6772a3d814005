"""The half of a log that reads: what other replicas learned goes into the cache."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import Any

from ssd.retrieval.cache import SuffixCache
from ssd.sharing.bookmark import Bookmark, order
from ssd.sharing.connection import BLOCK_MS, connect
from ssd.sharing.entry import Entry, InvalidEntryError, num_tokens_of, unpack_entry
from ssd.sharing.link import Link
from ssd.sharing.writer import FIELD

_PAGE = 64  # entries; 1 MB at most
_MAX_SEEN = 1 << 16
_BEGINNING = b"0-0"

RawEntry = tuple[bytes, dict[bytes, bytes] | None]


class Stream:
    """One namespace's stream as this replica has read it. Only the reader's thread changes it.

    ``bookmark`` : what of it is in the cache, over restarts. ``last_id`` : id of the last entry read, None before the
    log was paged through. ``entries`` : (id, tokens) of what the log holds, oldest first, to keep it within its bound.
    """

    def __init__(self, key: str, cache: SuffixCache, bookmark: Bookmark) -> None:
        self.key = key
        self.cache = weakref.ref(cache)
        self.bookmark = bookmark
        self.last_id: bytes | None = None
        self.entries: deque[tuple[bytes, int]] = deque()
        self.num_tokens = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def saw(self, entry_id: bytes, num_tokens: int) -> None:
        """Entry ``entry_id`` is in the log and has been read."""
        self.last_id = entry_id
        self.entries.append((entry_id, num_tokens))
        self.num_tokens += num_tokens

    def has_seen(self, sequence_id: bytes) -> bool:
        """Whether an entry with this sequence id was read before, among the last 65,536; from now on it was."""
        if sequence_id in self._seen:
            self._seen.move_to_end(sequence_id)
            return True
        self._seen[sequence_id] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def forget(self) -> None:
        """The log is not the one that was read."""
        self.last_id = None
        self.entries.clear()
        self.num_tokens = 0


class LogReader:
    """Follows any number of streams on one thread and one connection, and trims them.

    When a stream is opened it is first paged through, newest entries first until its bound in tokens is reached; then
    what the bookmark does not know is stored, oldest first. After that only new entries are read. Entries that were
    trimmed before are lost, and that is all. Entries that are known are read for their sizes, which bound the log, and
    their sequence ids, by which a second copy is told.
    """

    def __init__(self, url: str, *, vocab_size: int, max_tokens: int) -> None:
        self.num_received = 0
        self.num_received_tokens = 0
        self.num_known = 0
        self.num_invalid = 0
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._client = connect(url)
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._is_changed = threading.Event()
        self.link = Link("ssd-share-reader", url, self._exchange)

    def follow(self, key: str, cache: SuffixCache, bookmark: Bookmark) -> None:
        """Store what arrives in stream ``key`` in ``cache``, for as long as that lives. Owns ``bookmark`` from now on.

        Writes the bookmark into the cache as it advances.
        """
        with self._lock:
            self._streams[key] = Stream(key, cache, bookmark)
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
        if self.link.is_stopping:
            return  # perhaps before the bookmark was compared with the log
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
        """After an interruption: is the entry read last still the one before what is to be read next?"""
        if stream.last_id not in (None, _BEGINNING):
            last: Any = self._client.xrevrange(stream.key, max=stream.last_id, count=1)
            if not last or last[0][0] != stream.last_id:
                stream.forget()  # lost, trimmed beyond it, or another log: the bookmark will tell

    def _catch_up(self, stream: Stream) -> None:
        """Read the newest ``max_tokens`` tokens of the log, page by page, and store what is not known."""
        pages: list[RawEntry] = []
        num_tokens, before = 0, b"+"
        while num_tokens <= self._max_tokens:
            page: Any = self._client.xrevrange(stream.key, max=before, count=_PAGE)
            if self.link.is_stopping:
                return  # with a part of the log stored, the bookmark would claim all of it
            pages += page
            num_tokens += sum(_num_tokens(raw) for raw in page)
            if len(page) < _PAGE:
                break
            before = b"(" + page[-1][0]
        pages.reverse()
        by_id = dict(pages)

        def sequence_id_at(entry_id: bytes) -> bytes | None:
            entry = self._unpack((entry_id, by_id.get(entry_id)))
            return None if entry is None else entry.sequence_id

        known_id = stream.bookmark.find(pages[0][0] if pages else None, sequence_id_at)
        stream.last_id = _BEGINNING
        for raw in pages:
            if self.link.is_stopping:
                return
            self._receive(stream, raw, is_known=known_id is not None and order(raw[0]) <= order(known_id))
        self._trim(stream)

    def _receive(self, stream: Stream, raw: RawEntry, *, is_known: bool = False) -> None:
        """One entry of the log, in order. ``is_known`` : the bookmark is past it."""
        stream.saw(raw[0], _num_tokens(raw))
        cache, entry = stream.cache(), self._unpack(raw)
        if entry is None or cache is None:
            self.num_invalid += entry is None
            return
        has_seen = stream.has_seen(entry.sequence_id)
        if is_known:
            self.num_known += 1
            return
        stream.bookmark.passed(raw[0], entry.sequence_id)
        if has_seen or stream.bookmark.is_ours(entry):
            cache.set_mark(stream.bookmark.mark())
            self.num_known += 1
            return
        cache.append_shared(entry.tokens, mark=stream.bookmark.mark())
        self.num_received += 1
        self.num_received_tokens += len(entry.tokens)

    def _unpack(self, raw: RawEntry) -> Entry | None:
        try:
            return unpack_entry(_data(raw), vocab_size=self._vocab_size)
        except InvalidEntryError:
            return None

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
