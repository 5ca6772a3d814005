"""Reading logs: what other replicas learned goes into the caches."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ssd.retrieval.segment import Tokens
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.background import BackgroundLoop, Backoff
from ssd.sharing.connection import BLOCK_MS, connect
from ssd.sharing.cursor import Cursor
from ssd.sharing.entry import Entry, InvalidEntryError, announced_id, max_entries_of, num_tokens_of, unpack_entry
from ssd.sharing.stream import (
    BEGINNING,
    OversizedReplyError,
    RawEntry,
    check_entries,
    entries_after,
    entry_at,
    is_cluster,
    order,
    value_of,
)

PAGE = 64
"""Entries of a page, where none is too large; 1 MB at most."""

_COMPARE_S = 2.0
_COMPARE_EACH_S = 0.01  # many streams are compared less often: a reply of one entry for each
_SLOW_S = 0.25
_SLOW_REST_S = 0.1
GATHER_S = 0.05
"""What comes within so long after entries is taken in one reply: many small ones are what a fleet costs its server."""
_TOGETHER_TOKENS = 4096  # stored at once: most of what storing costs is once a call, and a cache is held up by it
_MAX_BATCH = 7 * PAGE  # entries of all streams together that surely fit in one reply
_LEAST_BATCH = 8  # of each of very many: few have so many new ones, and a reply for each entry is what costs
_CLUSTER_WAIT_S = 0.1
_LEAST_SEEN = 1 << 16
_LEAST_TOKENS = 1 << 16  # of a log, however small its caches are


class Stream:
    """One stream and where it is read. Only the reader's thread changes it.

    ``cursor`` : what of it is in the cache, over restarts. ``last_id`` : what comes after it is to be read, None
    before it was found what of the log is known. ``entries`` : (id, tokens) of what the log holds, oldest first, to
    keep it within its bounds.
    """

    def __init__(self, key: str, cache: SuffixCache, cursor: Cursor, max_tokens: int) -> None:
        """``max_tokens`` : the log's bound."""
        self.key = key
        self.max_tokens, self.max_entries = max_tokens, max_entries_of(max_tokens)
        self.name = cache.name
        self.cache = weakref.ref(cache)
        self.cursor = cursor
        self.page = PAGE
        """Entries to ask for at once: 1 after one was too large, as the server makes all of the reply at once."""
        self.has_more = False
        """Whether the page read last, where it was asked for alone, was not the end of the log."""
        self.is_refused = False
        """Whether the server refused the last command for this stream."""
        self.is_cut = False
        """Whether it did not answer, while others may: a node of a cluster."""
        self.backoff = Backoff()
        """Rests after a refusal."""
        self.slow_until = 0.0
        """Until when it rests because its cache took its time: others are served. Always briefly, as busy machines are
        slow with every page."""
        self.compare_at = 0.0
        self.caught_up_at = time.monotonic()
        """When nothing was left to read last."""
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._max_seen = max(_LEAST_SEEN, self.max_entries)
        """Of so many sequence ids a second copy is told."""
        self.forget()

    def forget(self) -> None:
        """The log is not the one that was read: what of it is known is to be found."""
        self.last_id: bytes | None = None
        self.anchor: bytes | None = None
        """An entry that is in the log as long as it is the one that was read; the newest of them that was fetched."""
        self._known: tuple[int, int] | None = None
        self.entries: deque[tuple[bytes, int]] = deque()
        self.num_tokens = 0

    def begin(self, oldest: bytes | None, known_id: bytes | None) -> None:
        """Read from ``oldest``, the first entry, on; entries up to ``known_id`` are in the cache already."""
        self.last_id, self.anchor = BEGINNING, oldest
        self._known = None if known_id is None else order(known_id)

    def is_known(self, entry_id: bytes) -> bool:
        """Whether the cursor is past this entry."""
        return self._known is not None and order(entry_id) <= self._known

    def saw(self, entry_id: bytes, num_tokens: int, *, was_fetched: bool) -> None:
        """Entry ``entry_id`` is in the log and has been read, or was too large to be."""
        self.last_id = entry_id
        if was_fetched or self.anchor is None:
            self.anchor = entry_id
        self.entries.append((entry_id, num_tokens))
        self.num_tokens += num_tokens

    def has_seen(self, sequence_id: bytes) -> bool:
        """Whether an entry with this sequence id was read before; from now on it was."""
        is_seen = sequence_id in self._seen
        self._seen[sequence_id] = None
        self._seen.move_to_end(sequence_id)
        if len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)
        return is_seen

    @property
    def is_resting(self) -> bool:
        """Whether nothing is to be read of it now."""
        return self.backoff.is_resting or time.monotonic() < self.slow_until

    @property
    def lag_s(self) -> float:
        """How long it is not known that all was read, beyond what a read may wait."""
        return max(0.0, time.monotonic() - self.caught_up_at - BLOCK_MS / 1000)

    def wake(self) -> None:
        """All is well with it."""
        self.is_refused = False
        self.backoff.reset()


class LogReader:
    """The half of a log that reads: any number of streams on one thread and one connection, which are trimmed as well.

    A log is read from its beginning, and what the cursor does not know is stored, oldest first. Entries that were
    trimmed before are lost, and that is all. Entries that are known are read for their sizes, which bound the log, and
    their sequence ids, by which a second copy is told.

    Nothing in a stream is trusted. Each log is compared with what was read every two seconds, by whether it still
    holds the entry read last: one that does not was emptied or replaced, and reading begins again. So no id that
    somebody chose can keep this replica from reading on, and no clock is asked. An entry too large to be fetched is
    passed by its id. A stream that is refused, or whose cache takes its time, rests while the others are read.
    """

    def __init__(self, url: str, *, vocab_size: int, max_tokens: int) -> None:
        """``max_tokens`` : bound of each stream, but for those of smaller caches."""
        self.num_received = 0
        self.num_received_tokens = 0
        self.num_known = 0
        self.num_invalid = 0
        """Entries that failed a check."""
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._client = connect(url)
        self._is_cluster = is_cluster(self._client)
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._least_batch = _LEAST_BATCH
        self._is_changed = threading.Event()
        self.loop = BackgroundLoop("ssd-share-reader", url, self._exchange)

    def follow(self, key: str, cache: SuffixCache, cursor: Cursor) -> None:
        """Store what arrives in stream ``key`` in ``cache``, for as long as that lives. Owns ``cursor`` from now on.

        Writes the cursor into the cache as it advances. A log holds no more than about what the cache does.
        """
        max_tokens = min(self._max_tokens, max(_LEAST_TOKENS, cache.capacity_tokens))
        with self._lock:
            self._streams[key] = Stream(key, cache, cursor, max_tokens)
        self._is_changed.set()

    def leave(self, key: str) -> None:
        """Follow stream ``key`` no more, if it was followed. O(1)."""
        with self._lock:
            self._streams.pop(key, None)

    def streams(self) -> list[Stream]:
        """Those that are followed, and whose caches live."""
        with self._lock:
            for key in [key for key, stream in self._streams.items() if stream.cache() is None]:
                del self._streams[key]
            return list(self._streams.values())

    @property
    def is_connected(self) -> bool:
        """Whether the server answers, and for every stream as it should."""
        return self.loop.is_connected and not any(stream.is_refused for stream in self.streams())

    def stop(self) -> None:
        """End the thread within the time a read may block."""
        self.loop.stop()
        self._is_changed.set()

    def close(self, timeout_s: float) -> None:
        """Wait for the end and give the connection back."""
        self.loop.join(timeout_s)
        self._client.close()

    def _exchange(self) -> None:
        """A page of each stream that has more, or a wait until one has."""
        streams, began = self.streams(), time.monotonic()
        if not streams:
            self._wait(BLOCK_MS / 1000)
            self._client.ping()
            return
        awake = [stream for stream in streams if not stream.is_resting]
        for stream in awake:
            self._attempt(stream, self._compare)
        for stream in awake:
            if stream.last_id is None:
                self._attempt(stream, self._begin)
            elif stream.page < PAGE or self._is_cluster:
                self._attempt(stream, self._read_alone)
        awake = [stream for stream in awake if not stream.is_resting]
        followed = [stream for stream in awake if stream.last_id is not None and stream.page == PAGE]
        if self.loop.is_stopping:
            return
        slow_s = [stream.slow_until - time.monotonic() for stream in streams if stream.slow_until > began]
        wait_s = max(1e-3, min([BLOCK_MS / 1000, *slow_s]))  # those that are refused wait longer
        if not awake:
            self._wait(wait_s)  # or until new streams are heard of
        elif followed and not self._is_cluster:
            self._read_together(followed, block=math.ceil(1000 * wait_s) if len(followed) == len(awake) else None)
        elif not any(stream.has_more for stream in awake) and len(followed) == len(awake):
            self._wait(_CLUSTER_WAIT_S)  # streams of several slots cannot be waited for at once

    def _wait(self, seconds: float) -> None:
        self._is_changed.wait(seconds)
        self._is_changed.clear()

    def _attempt(self, stream: Stream, step: Callable[[Stream], object]) -> None:
        """One step for one stream; only what ends the connection ends more than that."""
        from redis.exceptions import ConnectionError, TimeoutError

        if self.loop.is_stopping or stream.is_resting:
            return
        try:
            step(stream)
        except Exception as error:  # no rights, a key of another kind, a cache that is closed
            is_cut = isinstance(error, ConnectionError | TimeoutError | OSError)
            if is_cut and not self._is_cluster:  # of a cluster it is one node
                raise
            stream.is_refused, stream.is_cut = True, is_cut
            if is_cut:
                stream.compare_at = 0.0  # the log may be another one afterwards
            stream.backoff.rest()
            self.loop.report(error)
            return
        if stream.is_cut:
            stream.is_cut = False
            self.loop.num_reconnects += 1

    def _compare(self, stream: Stream) -> None:
        """Every few seconds, and after an interruption: is the log the one that was read?"""
        now = time.monotonic()
        if self.loop.is_connected and now < stream.compare_at:
            return
        stream.compare_at = now + max(_COMPARE_S, _COMPARE_EACH_S * len(self._streams))
        if stream.anchor is not None and entry_at(self._client, stream.key, stream.anchor) is None:
            stream.forget()  # lost, trimmed beyond it, or another log: the cursor will tell

    def _begin(self, stream: Stream) -> None:
        """Find what of the log is known, before it is read from its beginning."""
        from redis.exceptions import ResponseError

        try:
            self._client.xtrim(stream.key, maxlen=stream.max_entries, approximate=False)
        except ResponseError as error:  # it is read all the same
            self.loop.report(error)
        oldest = entries_after(self._client, stream.key, BEGINNING, 1).entries
        check_entries(oldest, after=BEGINNING)
        oldest_id = oldest[0][0] if oldest else None
        stream.begin(oldest_id, stream.cursor.find(oldest_id, partial(self._sequence_id_at, stream)))

    def _sequence_id_at(self, stream: Stream, entry_id: bytes) -> bytes | None:
        raw = entry_at(self._client, stream.key, entry_id)
        try:
            return None if raw is None else self._unpack(stream, raw).sequence_id
        except InvalidEntryError:
            return None

    def _read_together(self, streams: Sequence[Stream], *, block: int | None) -> None:
        """A page of each stream, or what comes to one of them within ``block`` milliseconds."""
        from redis.exceptions import ResponseError

        by_key = {stream.key: stream for stream in streams}
        places: Any = {stream.key: stream.last_id or BEGINNING for stream in streams}
        count = max(self._least_batch, min(PAGE, _MAX_BATCH // len(places)))
        try:
            answer: Any = self._client.xread(places, count=count, block=block)
        except (ResponseError, OversizedReplyError):
            self._least_batch = 1  # until they have been read
            for stream in streams:  # one by one it will show whose it is
                self._attempt(stream, self._read_alone)
            return
        is_read = set(by_key)
        for key, entries in answer or ():
            stream = by_key[key.decode()]
            self._attempt(stream, partial(self._receive_all, entries=entries))
            if len(entries) >= count or stream.is_resting:
                is_read.discard(stream.key)
        for key in is_read:
            by_key[key].caught_up_at = time.monotonic()
        for stream in streams:
            if stream.is_refused and not stream.backoff.is_resting:
                stream.wake()
        if all(len(entries) < count for _, entries in answer or ()):  # they have been read up to now
            self._least_batch = _LEAST_BATCH
            if answer:
                self._wait(GATHER_S)

    def _read_alone(self, stream: Stream) -> None:
        page = entries_after(self._client, stream.key, stream.last_id or BEGINNING, stream.page)
        stream.page = 1 if page.was_cut else min(2 * stream.page, PAGE)
        stream.has_more = not page.is_last
        self._receive_all(stream, page.entries)
        if page.is_last and not stream.is_resting:
            stream.caught_up_at = time.monotonic()

    def _receive_all(self, stream: Stream, entries: Sequence[RawEntry]) -> None:
        """Entries of the log, in order; what is left when the cache is slow is read again later."""
        check_entries(entries, after=stream.last_id or BEGINNING)
        arrived: list[Tokens] = []
        num_tokens = 0
        for num_left, raw in zip(range(len(entries) - 1, -1, -1), entries, strict=True):
            if self.loop.is_stopping:
                return
            num_tokens += self._receive(stream, raw, arrived)
            if num_left and num_tokens < _TOGETHER_TOKENS:
                continue
            began = time.monotonic()
            self._store(stream, arrived)
            if time.monotonic() - began > _SLOW_S:
                stream.slow_until = time.monotonic() + _SLOW_REST_S
                return
            arrived, num_tokens = [], 0
        stream.wake()
        self._trim(stream)

    def _receive(self, stream: Stream, raw: RawEntry, arrived: list[Tokens]) -> int:
        """The next entry of the log: what is new of it is added to ``arrived``. Returns how many tokens that are."""
        data = value_of(raw)
        stream.saw(raw[0], num_tokens_of(data), was_fetched=raw[1] is not None)
        if stream.is_known(raw[0]) and (sequence_id := announced_id(data)) is not None:  # it was checked when it came
            stream.has_seen(sequence_id)
            self.num_known += 1
            return 0
        try:
            entry = self._unpack(stream, raw)
        except InvalidEntryError:
            self.num_invalid += 1
            return 0
        if stream.cache() is None:
            return 0
        has_seen = stream.has_seen(entry.sequence_id)
        stream.cursor.passed(raw[0], entry.sequence_id)
        if has_seen or stream.cursor.is_ours(entry):
            self.num_known += 1
            return 0
        arrived.append(entry.tokens)
        return len(entry.tokens)

    def _store(self, stream: Stream, arrived: Sequence[Tokens]) -> None:
        """Store what arrived, and that the cursor is past it."""
        cache = stream.cache()
        if cache is None:
            return
        if not arrived:
            cache.set_source(stream.cursor.position())
            return
        cache.append_all_shared(arrived, source=stream.cursor.position())
        self.num_received += len(arrived)
        self.num_received_tokens += sum(map(len, arrived))

    def _unpack(self, stream: Stream, raw: RawEntry) -> Entry:
        return unpack_entry(value_of(raw), stream.key, vocab_size=self._vocab_size)

    def _trim(self, stream: Stream) -> None:
        """Every replica reads everything and so knows when the log is too long; trimming twice does no harm."""
        from redis.exceptions import ResponseError

        if stream.num_tokens <= stream.max_tokens and len(stream.entries) <= stream.max_entries:
            return
        max_tokens = stream.max_tokens - stream.max_tokens // 16  # some room, so as not to trim every time
        max_entries = stream.max_entries - stream.max_entries // 16
        while stream.num_tokens > max_tokens or len(stream.entries) > max_entries:
            stream.num_tokens -= stream.entries.popleft()[1]
        oldest = stream.entries[0][0] if stream.entries else stream.last_id
        try:
            self._client.xtrim(stream.key, minid=oldest, approximate=False)
        except ResponseError as error:  # reading goes on; writers bound the log as well
            self.loop.report(error)
