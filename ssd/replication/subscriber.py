"""The reading half of the replication log: adds other replicas' text to the caches."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ssd.replication.background import BackgroundLoop, Backoff
from ssd.replication.connection import BLOCK_MS, connect
from ssd.replication.entry import (
    Entry,
    InvalidEntryError,
    max_entries_of,
    unpack_entry,
    unverified_id,
    unverified_num_tokens,
)
from ssd.replication.offsets import ReplicaOffset
from ssd.replication.redis_stream import (
    BEGINNING,
    OversizedReplyError,
    RawEntry,
    check_entries,
    entries_after,
    entry_at,
    id_key,
    is_cluster,
    value_of,
)
from ssd.retrieval.namespace_cache import NamespaceCache
from ssd.retrieval.segment import Tokens

PAGE = 64  # entries per page, at most 1 MB

_CHECK_S = 2.0
_CHECK_EACH_S = 0.01  # many streams are checked less often, as each takes a reply of one entry
_SLOW_S = 0.25
_SLOW_PAUSE_S = 0.1
GATHER_S = 0.05  # waits after new entries, because many small replies load the server
_STORE_TOKENS = 4096  # tokens per call: the cost is mostly per call, but long calls delay the cache
_MAX_BATCH = 7 * PAGE  # the number of entries of all streams that fits in one reply in any case
_MIN_BATCH = 8  # entries per stream if there are very many streams: few have so many new entries
_CLUSTER_WAIT_S = 0.1
_MIN_SEEN = 1 << 16
_MIN_LOG_TOKENS = 1 << 16  # the minimum bound of a log, however small its caches are


class SubscribedStream:
    """The state of reading one replication stream, above all the position up to which the stream was read.

    Only the subscriber's thread changes this object.
    """

    def __init__(self, key: str, cache: NamespaceCache, offset: ReplicaOffset, max_tokens: int) -> None:
        self.key = key
        self.max_tokens, self.max_entries = max_tokens, max_entries_of(max_tokens)
        self.name = cache.name
        self.cache = weakref.ref(cache)
        self.offset = offset  # what is in the cache already, across restarts
        self.page = PAGE  # 1 after an entry was too large, because the server builds a whole reply
        self.has_more = False  # whether the last page did not reach the end of the log
        self.is_rejected = False  # whether the server rejected the last command for this stream
        self.is_disconnected = False  # whether the stream's cluster node did not answer
        self.backoff = Backoff()  # after a rejected command
        self.slow_until = 0.0  # skipped until then, because its cache was slow
        self.check_at = 0.0
        self.caught_up_at = time.monotonic()  # when the end of the log was last reached
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._max_seen = max(_MIN_SEEN, self.max_entries)  # sequence ids remembered to detect second copies
        self.reset()

    def reset(self) -> None:
        """Forget the position in the stream, because the stream was emptied or replaced."""
        self.last_id: bytes | None = None
        self.anchor: bytes | None = None  # the newest entry that was read; missing if the log was replaced
        self._known: tuple[int, int] | None = None
        self.entries: deque[tuple[bytes, int]] = deque()
        self.num_tokens = 0

    def start_at(self, oldest: bytes | None, known_id: bytes | None) -> None:
        """Start to read the stream at its oldest entry; the text of entries up to ``known_id`` is in the cache."""
        self.last_id, self.anchor = BEGINNING, oldest
        self._known = None if known_id is None else id_key(known_id)

    def is_known(self, entry_id: bytes) -> bool:
        """Return whether the text of a stream entry was already in the cache when reading the stream began."""
        return self._known is not None and id_key(entry_id) <= self._known

    def record(self, entry_id: bytes, num_tokens: int, *, was_fetched: bool) -> None:
        """Advance the position in the stream past an entry, and add the entry's size to that of the stream.

        ``was_fetched`` is False for an entry that was too large to transfer.
        """
        self.last_id = entry_id
        if was_fetched or self.anchor is None:
            self.anchor = entry_id
        self.entries.append((entry_id, num_tokens))
        self.num_tokens += num_tokens

    def remember_sequence_id(self, sequence_id: bytes) -> bool:
        """Remember the sequence id of an entry; return whether an entry with this id was read before."""
        is_seen = sequence_id in self._seen
        self._seen[sequence_id] = None
        self._seen.move_to_end(sequence_id)
        if len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)
        return is_seen

    @property
    def is_paused(self) -> bool:
        """Whether the stream is not read at present, after an error or because its cache is too slow."""
        return self.backoff.is_paused or time.monotonic() < self.slow_until

    @property
    def lag_s(self) -> float:
        """The seconds since the end of the stream was last reached, minus the half second for which a read may wait."""
        return max(0.0, time.monotonic() - self.caught_up_at - BLOCK_MS / 1000)

    def mark_ok(self) -> None:
        self.is_rejected = False
        self.backoff.reset()


class Subscriber:
    """The reading half of the replication log: a thread with its own connection that reads and trims all streams.

    Each stream is read from its oldest entry. The text of an entry is added to the cache if the cache does not contain
    it yet. Entries that were trimmed before they were read are lost. Entries whose text is in the cache are read too,
    because their sizes are needed to bound the stream, and their sequence ids to detect second copies.

    Nothing in a stream is trusted. Every two seconds, the subscriber checks that each stream still has the entry that
    was read last. If not, the stream was emptied or replaced, and is read from its oldest entry. So neither a forged id
    nor a wrong clock can stop this replica from reading. An entry that is too large to transfer is skipped. If Redis
    rejects reading one stream, or its cache is slow, this stream is paused while the others are read.
    """

    def __init__(self, url: str, *, vocab_size: int, max_tokens: int) -> None:
        """Create a subscriber, which connects to Redis at its first read.

        Each stream is trimmed to ``max_tokens`` tokens, or to the size of its cache if that is smaller.
        """
        self.num_received = 0
        self.num_received_tokens = 0
        self.num_known = 0
        self.num_invalid = 0  # entries that failed verification
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._client = connect(url)
        self._is_cluster = is_cluster(self._client)
        self._lock = threading.Lock()
        self._streams: dict[str, SubscribedStream] = {}
        self._min_batch = _MIN_BATCH
        self._has_changed = threading.Event()
        self.loop = BackgroundLoop("ssd-share-reader", url, self._exchange)

    def subscribe(self, key: str, cache: NamespaceCache, offset: ReplicaOffset) -> None:
        """Add the text of the Redis stream ``key`` to a cache, as long as the cache object exists.

        ``offset``, the position in the stream, is advanced and stored with the cache.
        """
        max_tokens = min(self._max_tokens, max(_MIN_LOG_TOKENS, cache.capacity_tokens))
        with self._lock:
            self._streams[key] = SubscribedStream(key, cache, offset, max_tokens)
        self._has_changed.set()

    def unsubscribe(self, key: str) -> None:
        with self._lock:
            self._streams.pop(key, None)

    def streams(self) -> list[SubscribedStream]:
        with self._lock:
            for key in [key for key, stream in self._streams.items() if stream.cache() is None]:
                del self._streams[key]
            return list(self._streams.values())

    @property
    def is_connected(self) -> bool:
        return self.loop.is_connected and not any(stream.is_rejected for stream in self.streams())

    def stop(self) -> None:
        """End the subscriber's thread after its current read, which may block for half a second."""
        self.loop.stop()
        self._has_changed.set()

    def close(self, timeout_s: float) -> None:
        self.loop.join(timeout_s)
        self._client.close()

    def _exchange(self) -> None:
        """Read a page of every stream; if no stream has more entries, wait for new ones."""
        streams, began = self.streams(), time.monotonic()
        if not streams:
            self._wait(BLOCK_MS / 1000)
            self._client.ping()
            return
        awake = [stream for stream in streams if not stream.is_paused]
        for stream in awake:
            self._attempt(stream, self._check_log)
        for stream in awake:
            if stream.last_id is None:
                self._attempt(stream, self._start_stream)
            elif stream.page < PAGE or self._is_cluster:
                self._attempt(stream, self._read_one)
        awake = [stream for stream in awake if not stream.is_paused]
        followed = [stream for stream in awake if stream.last_id is not None and stream.page == PAGE]
        if self.loop.is_stopping:
            return
        slow_s = [stream.slow_until - time.monotonic() for stream in streams if stream.slow_until > began]
        wait_s = max(1e-3, min([BLOCK_MS / 1000, *slow_s]))  # rejected streams wait longer
        if not awake:
            self._wait(wait_s)  # or until a stream is added
        elif followed and not self._is_cluster:
            self._read_all(followed, block=math.ceil(1000 * wait_s) if len(followed) == len(awake) else None)
        elif not any(stream.has_more for stream in awake) and len(followed) == len(awake):
            self._wait(_CLUSTER_WAIT_S)  # one XREAD cannot wait for streams of several slots

    def _wait(self, seconds: float) -> None:
        self._has_changed.wait(seconds)
        self._has_changed.clear()

    def _attempt(self, stream: SubscribedStream, step: Callable[[SubscribedStream], object]) -> None:
        """Run ``step`` for one stream. An error pauses only this stream, while the others are read.

        The error is raised if a server that is not part of a cluster cannot be reached, because this affects all
        streams.
        """
        from redis.exceptions import ConnectionError, TimeoutError

        if self.loop.is_stopping or stream.is_paused:
            return
        try:
            step(stream)
        except Exception as error:  # no permission, a key of another type, a closed cache
            is_cut = isinstance(error, ConnectionError | TimeoutError | OSError)
            if is_cut and not self._is_cluster:  # in a cluster, this affects one node only
                raise
            stream.is_rejected, stream.is_disconnected = True, is_cut
            if is_cut:
                stream.check_at = 0.0  # the log may be replaced meanwhile
            stream.backoff.pause()
            self.loop.report(error)
            return
        if stream.is_disconnected:
            stream.is_disconnected = False
            self.loop.num_reconnects += 1

    def _check_log(self, stream: SubscribedStream) -> None:
        """Check every few seconds, and after a lost connection, whether the stream was emptied or replaced.

        If so, the stream is read from its oldest entry.
        """
        now = time.monotonic()
        if self.loop.is_connected and now < stream.check_at:
            return
        stream.check_at = now + max(_CHECK_S, _CHECK_EACH_S * len(self._streams))
        if stream.anchor is not None and entry_at(self._client, stream.key, stream.anchor) is None:
            stream.reset()  # lost, trimmed beyond it, or another log: the offset decides

    def _start_stream(self, stream: SubscribedStream) -> None:
        """Start to read a stream at its oldest entry, and determine which entries are already in the cache."""
        from redis.exceptions import ResponseError

        try:
            self._client.xtrim(stream.key, maxlen=stream.max_entries, approximate=False)
        except ResponseError as error:  # the log is read nevertheless
            self.loop.report(error)
        oldest = entries_after(self._client, stream.key, BEGINNING, 1).entries
        check_entries(oldest, after=BEGINNING)
        oldest_id = oldest[0][0] if oldest else None
        stream.start_at(oldest_id, stream.offset.locate(oldest_id, partial(self._sequence_id_at, stream)))

    def _sequence_id_at(self, stream: SubscribedStream, entry_id: bytes) -> bytes | None:
        raw = entry_at(self._client, stream.key, entry_id)
        try:
            return None if raw is None else self._unpack(stream, raw).sequence_id
        except InvalidEntryError:
            return None

    def _read_all(self, streams: Sequence[SubscribedStream], *, block: int | None) -> None:
        """Read a page of each stream with one XREAD, which waits up to ``block`` milliseconds for new entries."""
        from redis.exceptions import ResponseError

        by_key = {stream.key: stream for stream in streams}
        places: Any = {stream.key: stream.last_id or BEGINNING for stream in streams}
        count = max(self._min_batch, min(PAGE, _MAX_BATCH // len(places)))
        try:
            answer: Any = self._client.xread(places, count=count, block=block)
        except (ResponseError, OversizedReplyError):
            self._min_batch = 1  # until the streams have been read
            for stream in streams:  # reading one by one shows which stream fails
                self._attempt(stream, self._read_one)
            return
        is_read = set(by_key)
        for key, entries in answer or ():
            stream = by_key[key.decode()]
            self._attempt(stream, partial(self._receive_all, entries=entries))
            if len(entries) >= count or stream.is_paused:
                is_read.discard(stream.key)
        for key in is_read:
            by_key[key].caught_up_at = time.monotonic()
        for stream in streams:
            if stream.is_rejected and not stream.backoff.is_paused:
                stream.mark_ok()
        if all(len(entries) < count for _, entries in answer or ()):  # all streams have been read to their ends
            self._min_batch = _MIN_BATCH
            if answer:
                self._wait(GATHER_S)

    def _read_one(self, stream: SubscribedStream) -> None:
        page = entries_after(self._client, stream.key, stream.last_id or BEGINNING, stream.page)
        stream.page = 1 if page.was_cut else min(2 * stream.page, PAGE)
        stream.has_more = not page.is_last
        self._receive_all(stream, page.entries)
        if page.is_last and not stream.is_paused:
            stream.caught_up_at = time.monotonic()

    def _receive_all(self, stream: SubscribedStream, entries: Sequence[RawEntry]) -> None:
        """Store the new text of entries of a stream in the cache, in order.

        If the cache is slow, the stream is paused, and the remaining entries are read again later.
        """
        check_entries(entries, after=stream.last_id or BEGINNING)
        arrived: list[Tokens] = []
        num_tokens = 0
        for num_left, raw in zip(range(len(entries) - 1, -1, -1), entries, strict=True):
            if self.loop.is_stopping:
                return
            num_tokens += self._receive(stream, raw, arrived)
            if num_left and num_tokens < _STORE_TOKENS:
                continue
            began = time.monotonic()
            self._store(stream, arrived)
            if time.monotonic() - began > _SLOW_S:
                stream.slow_until = time.monotonic() + _SLOW_PAUSE_S
                return
            arrived, num_tokens = [], 0
        stream.mark_ok()
        self._trim(stream)

    def _receive(self, stream: SubscribedStream, raw: RawEntry, arrived: list[Tokens]) -> int:
        """Append the text of one stream entry to ``arrived`` if it is new; return the number of tokens appended."""
        data = value_of(raw)
        stream.record(raw[0], unverified_num_tokens(data), was_fetched=raw[1] is not None)
        if stream.is_known(raw[0]) and (sequence_id := unverified_id(data)) is not None:  # it was verified before
            stream.remember_sequence_id(sequence_id)
            self.num_known += 1
            return 0
        try:
            entry = self._unpack(stream, raw)
        except InvalidEntryError:
            self.num_invalid += 1
            return 0
        if stream.cache() is None:
            return 0
        has_seen = stream.remember_sequence_id(entry.sequence_id)
        stream.offset.advance(raw[0], entry.sequence_id)
        if has_seen or stream.offset.is_stored(entry):
            self.num_known += 1
            return 0
        arrived.append(entry.tokens)
        return len(entry.tokens)

    def _store(self, stream: SubscribedStream, arrived: Sequence[Tokens]) -> None:
        """Add the received text to the cache, together with the new position in the stream."""
        cache = stream.cache()
        if cache is None:
            return
        if not arrived:
            cache.set_source(stream.offset.to_json())
            return
        cache.append_replicated(arrived, source=stream.offset.to_json())
        self.num_received += len(arrived)
        self.num_received_tokens += sum(map(len, arrived))

    def _unpack(self, stream: SubscribedStream, raw: RawEntry) -> Entry:
        return unpack_entry(value_of(raw), stream.key, vocab_size=self._vocab_size)

    def _trim(self, stream: SubscribedStream) -> None:
        """Trim a Redis stream that exceeds its limits. Every replica does so; trimming a stream twice is harmless."""
        from redis.exceptions import ResponseError

        if stream.num_tokens <= stream.max_tokens and len(stream.entries) <= stream.max_entries:
            return
        max_tokens = stream.max_tokens - stream.max_tokens // 16  # some slack, so that not every read trims
        max_entries = stream.max_entries - stream.max_entries // 16
        while stream.num_tokens > max_tokens or len(stream.entries) > max_entries:
            stream.num_tokens -= stream.entries.popleft()[1]
        oldest = stream.entries[0][0] if stream.entries else stream.last_id
        try:
            self._client.xtrim(stream.key, minid=oldest, approximate=False)
        except ResponseError as error:  # reading continues; publishers bound the log as well
            self.loop.report(error)
