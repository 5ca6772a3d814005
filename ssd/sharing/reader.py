"""The half of a log that reads: what other replicas learned goes into the cache."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ssd.retrieval.packed import Tokens
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.background import BackgroundLoop
from ssd.sharing.connection import BLOCK_MS, connect, server_of
from ssd.sharing.cursor import PAGE, Cursor, Stream
from ssd.sharing.entry import Entry, InvalidEntryError, num_tokens_of, unpack_entry, warm_up_entries
from ssd.sharing.stats import Delays, Received
from ssd.sharing.stream import (
    BEGINNING,
    FIELD,
    OversizedReplyError,
    RawEntry,
    check_entries,
    entries_after,
    entries_before,
    entry_at,
    is_cluster,
)

_COMPARE_S = 2.0
_COMPARE_EACH_S = 0.01  # many streams are compared less often: a reply of one entry for each
_SLOW_S = 0.25
GATHER_S = 0.05
"""What comes within so long after entries is taken in one reply: many small ones are what a fleet costs its server."""
_SUSPEND_S = 5.0
_TOGETHER_TOKENS = 4096  # stored at once: most of what storing costs is once a call, and a cache is held up by it
_MAX_BATCH = 7 * PAGE  # entries of all streams together that surely fit in one reply


class LogReader:
    """Follows any number of streams on one thread and one connection, and trims them.

    Where reading begins is searched for from the log's end backwards, until its bounds are reached; from there on what
    the cursor does not know is stored, oldest first. Entries that were trimmed before are lost, and that is all.
    Entries that are known are read for their sizes, which bound the log, and their sequence ids, by which a second
    copy is told.

    Nothing in a stream is trusted. Each log is compared with what was read every two seconds, by whether it still
    holds the entry read last: one that does not was emptied or replaced, and the search begins again. So no id that
    somebody chose can keep this replica from reading on, and no clock is asked. An entry too large to be fetched is
    passed by its id. A stream that is refused, or whose cache takes its time, rests while the others are read.
    """

    def __init__(self, url: str, *, vocab_size: int, max_tokens: int, max_entries: int) -> None:
        """``max_tokens``, ``max_entries`` : bounds of each stream."""
        self.num_received = 0
        self.num_received_tokens = 0
        self.num_known = 0
        self.num_invalid = 0
        self.invalid: Counter[str] = Counter()
        """Of those, how many failed what, by ``refusals.INVALID``."""
        self.delays = Delays()
        """Seconds from when an entry of another replica was appended to when it was stored here, by Redis' clock."""
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._max_entries = max_entries
        self._client = connect(url)
        warm_up_entries()
        self._is_cluster = is_cluster(self._client)
        self._lock = threading.Lock()
        self._round = threading.Condition(self._lock)
        self._num_rounds = 0
        self._streams: dict[str, Stream] = {}
        self._is_changed = threading.Event()
        self.loop = BackgroundLoop("ssd-share-reader", url, self._exchange)

    def follow(self, key: str, cache: SuffixCache, cursor: Cursor, *, wait_s: float = 0.0) -> Stream:
        """Store what arrives in stream ``key`` in ``cache``, for as long as that lives. Owns ``cursor`` from now on.

        Writes the cursor into the cache as it advances. ``wait_s`` : begin after so many seconds, unless ``resume``
        is called before.
        """
        stream = Stream(key, cache, cursor)
        stream.held_until = time.monotonic() + wait_s
        with self._lock:
            self._streams[key] = stream
        self._is_changed.set()
        return stream

    def suspend(self, stream: Stream) -> bool:
        """Have the caller own ``stream`` and its cursor until ``resume``; False where that cannot be had.

        Waits for the round that is under way, some seconds at most. Not for the request path.
        """
        with self._round:
            stream.held_until = math.inf
            self._is_changed.set()
            begun = self._num_rounds
            if self._round.wait_for(lambda: self._num_rounds > begun or self.loop.is_stopping, _SUSPEND_S):
                return not self.loop.is_stopping
        self.resume(stream)
        return False

    def resume(self, stream: Stream) -> None:
        """Read it now. Safe from any thread."""
        stream.held_until = 0.0
        self._is_changed.set()

    def leave(self, key: str) -> None:
        """Follow stream ``key`` no more, if it was followed. O(1)."""
        with self._lock:
            self._streams.pop(key, None)

    def received(self) -> Mapping[str, Received]:
        """What was received of each stream that is followed, by key."""
        return {stream.key: stream.received for stream in self._living_streams()}

    @property
    def is_connected(self) -> bool:
        """Whether the server answers, and for every stream as it should."""
        return self.loop.is_connected and not any(stream.is_refused for stream in self._living_streams())

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
        with self._round:
            self._num_rounds += 1
            self._round.notify_all()
        streams = self._living_streams()
        if not streams:
            self._is_changed.wait(BLOCK_MS / 1000)
            self._is_changed.clear()
            self._client.ping()
            return
        awake = [stream for stream in streams if not stream.is_resting]
        for stream in awake:
            self._attempt(stream, self._compare)
        for stream in awake:
            if stream.last_id is None:
                self._attempt(stream, self._search)
            elif stream.page < PAGE:
                self._attempt(stream, self._read_alone)
        awake = [stream for stream in awake if not stream.is_resting]
        followed = [stream for stream in awake if stream.last_id is not None and stream.page == PAGE]
        if followed and not self.loop.is_stopping:
            self._read_together(followed, block=BLOCK_MS if len(followed) == len(awake) else None)
        elif not awake:
            self._is_changed.wait(BLOCK_MS / 1000)  # new streams are heard of, those that rest wait a little longer
            self._is_changed.clear()

    def _living_streams(self) -> list[Stream]:
        with self._lock:
            for key in [key for key, stream in self._streams.items() if stream.cache() is None]:
                del self._streams[key]
            return list(self._streams.values())

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
            stream.refuse(is_cut=is_cut)
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
        if stream.received.clock.is_due or not self.loop.is_connected:
            stream.received.clock.set_by(server_of(self._client, stream.key))
        if stream.anchor is not None and entry_at(self._client, stream.key, stream.anchor) is None:
            stream.forget()  # lost, trimmed beyond it, or another log: the cursor will tell

    def _search(self, stream: Stream) -> None:
        """One page further back, or the end of the search."""
        search = stream.search
        page = entries_before(self._client, stream.key, search.oldest, stream.page)
        stream.turn_page(was_cut=page.was_cut)
        for raw in page.entries:
            search.found(raw[0], _num_tokens(raw))
            if search.num_tokens > self._max_tokens or search.num_entries > self._max_entries:
                break
        else:
            search.is_whole = page.is_last
            if not search.is_whole:
                return
        stream.begin(stream.cursor.find(search.oldest, lambda entry_id: self._sequence_id_at(stream, entry_id)))

    def _sequence_id_at(self, stream: Stream, entry_id: bytes) -> bytes | None:
        raw = entry_at(self._client, stream.key, entry_id)
        entry = None if raw is None else self._unpack(stream, raw)
        return entry.sequence_id if isinstance(entry, Entry) else None

    def _read_together(self, streams: Sequence[Stream], *, block: int | None) -> None:
        """A page of each stream, or what comes to one of them within ``block`` milliseconds."""
        from redis.exceptions import ConnectionError, ResponseError, TimeoutError

        by_key = {stream.key: stream for stream in streams}
        places: Any = {stream.key: stream.last_id or BEGINNING for stream in streams}
        count = max(1, min(PAGE, _MAX_BATCH // len(places)))
        try:
            answer: Any = self._client.xread(places, count=count, block=block)
        except (ResponseError, OversizedReplyError, ConnectionError, TimeoutError, OSError) as error:
            if not self._is_cluster and not isinstance(error, ResponseError | OversizedReplyError):
                raise
            for stream in streams:  # one by one it will show whose it is
                self._attempt(stream, self._read_alone)
            return
        unheard = {} if answer and self._is_cluster else dict(by_key)  # what it says of those it does not name
        for key, entries in answer or ():
            stream = by_key[key.decode()]
            self._attempt(stream, partial(self._receive_all, entries=entries))
            if len(entries) >= count or stream.is_resting:
                unheard.pop(stream.key, None)
            elif stream.key not in unheard:
                stream.received.caught_up()
        for stream in unheard.values():
            stream.received.caught_up()
        for stream in streams:
            if stream.is_refused and not stream.is_resting:
                stream.wake()
        if answer and all(len(entries) < count for _, entries in answer):  # they have been read up to now
            self._is_changed.wait(GATHER_S)
            self._is_changed.clear()

    def _read_alone(self, stream: Stream) -> None:
        page = entries_after(self._client, stream.key, stream.last_id or BEGINNING, stream.page)
        stream.turn_page(was_cut=page.was_cut)
        self._receive_all(stream, page.entries)
        if page.is_last and not stream.is_resting:
            stream.received.caught_up()

    def _receive_all(self, stream: Stream, entries: Sequence[RawEntry]) -> None:
        """Entries of the log, in order; what is left when the cache is slow is read again later."""
        check_entries(entries, after=stream.last_id or BEGINNING)
        started, place, num_tokens = time.monotonic(), stream.cursor.waypoints, 0
        arrived: list[tuple[bytes, Tokens]] = []
        for raw in entries:
            if self.loop.is_stopping:
                break
            try:
                num_tokens += self._receive(stream, raw, arrived)
            except Exception:
                self._store(stream, arrived)  # the cursor is past it
                raise
            if num_tokens >= _TOGETHER_TOKENS:
                self._store(stream, arrived)
                now = time.monotonic()
                if now - started > _SLOW_S:
                    stream.rest()
                    return
                started, place, num_tokens = now, stream.cursor.waypoints, 0
                arrived.clear()
        if stream.cursor.waypoints is not place:
            self._store(stream, arrived)
            if time.monotonic() - started > _SLOW_S:
                stream.rest()
                return
        if not self.loop.is_stopping:
            stream.wake()
            self._trim(stream)

    def _receive(self, stream: Stream, raw: RawEntry, arrived: list[tuple[bytes, Tokens]]) -> int:
        """The next entry of the log: what is new of it is added to ``arrived``. Returns how many tokens that are."""
        data = _data(raw)
        stream.saw(raw[0], num_tokens_of(data), was_fetched=raw[1] is not None)
        stream.received.num_bytes += len(data)
        try:
            entry = unpack_entry(data, stream.key, vocab_size=self._vocab_size)
        except InvalidEntryError as error:
            self.num_invalid += 1
            self.invalid[error.kind] += 1
            return 0
        if stream.cache() is None:
            return 0
        has_seen = stream.has_seen(entry.sequence_id)
        if stream.is_known(raw[0]):
            self.num_known += 1
            return 0
        stream.cursor.passed(raw[0], entry.sequence_id)
        if has_seen or stream.cursor.is_ours(entry):
            self.num_known += 1
            return 0
        arrived.append((raw[0], entry.tokens))
        return len(entry.tokens)

    def _store(self, stream: Stream, arrived: Sequence[tuple[bytes, Tokens]]) -> None:
        """Store what arrived, and that the cursor is past it."""
        cache = stream.cache()
        if cache is None:
            return
        if not arrived:
            cache.set_source(stream.cursor.position())
            return
        texts = [tokens for _, tokens in arrived]
        cache.append_all_shared(texts, source=stream.cursor.position())
        self.num_received += len(texts)
        self.num_received_tokens += sum(map(len, texts))
        stream.received.num_entries += len(texts)
        for entry_id, _ in arrived:
            if (delay_s := stream.received.delay_of(entry_id)) is not None:
                self.delays.observe(delay_s)

    def _unpack(self, stream: Stream, raw: RawEntry) -> Entry | InvalidEntryError:
        try:
            return unpack_entry(_data(raw), stream.key, vocab_size=self._vocab_size)
        except InvalidEntryError as error:
            return error

    def _trim(self, stream: Stream) -> None:
        """Every replica reads everything and so knows when the log is too long; trimming twice does no harm."""
        from redis.exceptions import ResponseError

        if stream.num_tokens <= self._max_tokens and len(stream.entries) <= self._max_entries:
            return
        max_tokens = self._max_tokens - self._max_tokens // 16  # some room, so as not to trim every time
        max_entries = self._max_entries - self._max_entries // 16
        while stream.num_tokens > max_tokens or len(stream.entries) > max_entries:
            stream.num_tokens -= stream.entries.popleft()[1]
        oldest = stream.entries[0][0] if stream.entries else stream.last_id
        try:
            self._client.xtrim(stream.key, minid=oldest, approximate=False)
        except ResponseError as error:  # reading goes on; writers bound the log as well
            self.loop.report(error)


def _data(raw: RawEntry) -> bytes:
    """A stream entry's value; empty when it has not our field."""
    data = (raw[1] or {}).get(FIELD)
    return data if isinstance(data, bytes) else b""


def _num_tokens(raw: RawEntry) -> int:
    return num_tokens_of(_data(raw))
