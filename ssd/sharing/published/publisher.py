"""Publishes what the open namespaces know, off the request path, those whose lease this process has."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

import xxhash

from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_cache import SealedText, SuffixCache
from ssd.sharing.bookmark import Bookmark, Stream
from ssd.sharing.link import Link
from ssd.sharing.published.format import (
    MAX_CHUNKS,
    MAX_LEARNED_BYTES,
    TAG_BYTES,
    ChunkRef,
    Head,
    cut,
    fence_of,
    name_of,
    owner_of,
    pack_chunk,
    parts_of,
)
from ssd.sharing.published.store import Store


class Member:
    """``stream`` : as the reader follows it, None where there is no log.

    Each field is written by one thread: ``tag`` and those below by the joiner, ``published_*`` by the publisher.
    """

    def __init__(self, fingerprint: str, cache: SuffixCache, bookmark: Bookmark, stream: Stream | None) -> None:
        self.namespace = cache.name
        self.owner = owner_of(fingerprint, cache.name)
        self.stream = stream
        self.bookmark = bookmark
        self.has_left = False
        """Whether the namespace is closed here."""
        self._cache = weakref.ref(cache)

        self.is_new = not bookmark.waypoints
        """Whether nothing of the log was ever read here."""
        self.is_settled = False
        """Whether what was published has been looked at."""
        self.num_gaps_closed = 0
        self.tag = b""
        """Of the head that was taken last."""
        self.layer_tag = b""
        self.layer: tuple[Segment, ...] = ()
        self.looked_at = -math.inf

        self.published_tag = b""
        self.published_position = 0
        self.published_at = time.monotonic()

    @property
    def cache(self) -> SuffixCache | None:
        """None once it is closed."""
        return None if self.has_left else self._cache()

    @property
    def has_gap(self) -> bool:
        """Whether the log may have lost what was not read here, since a head was taken last."""
        return self.stream is None or self.num_gaps > self.num_gaps_closed

    @property
    def num_gaps(self) -> int:
        """How often the log may have lost what was not read here."""
        return 0 if self.stream is None else self.stream.num_gaps


log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""A lease is renewed, and a head that is gone is noticed, so often: two commands for a namespace."""

PUBLISH_S: Final = 60.0
"""Whoever joins reads what is newer than the head from the log, and a minute's text is read there in a moment."""

PUBLISH_TOKENS: Final = 1 << 19
"""An eighth of the log: what a head lacks is in it."""

LEAST_TOKENS: Final = 1 << 14
"""Less is read from the log in no time, so many small namespaces cost nothing."""

MOST_TOKENS: Final = 1 << 24
"""Of the newest text: some 40 MB in the store for each namespace."""

_BYTES_PER_S: Final = 32 << 20
_GRACE_S: Final = 60.0
_FEW: Final = 32  # of more namespaces each is looked at half as often: four exchanges with Redis a look
_REFUSED_S: Final = 30.0


class Publisher:
    """One thread. A namespace's text is cut into chunks, those the store lacks are sent, then the head is replaced.

    Chunks that no head has named for a minute are removed: whoever reads the head before it has them by then, or takes
    the newer one.
    """

    def __init__(
        self, url: str, store_of: Callable[[str], Store], *, least_tokens: int = LEAST_TOKENS, look_s: float = LOOK_S
    ) -> None:
        """``store_of`` : of a namespace. ``least_tokens`` : shorter text is left to the log."""
        self.num_published_heads = 0
        self.num_published_bytes = 0
        self._store_of = store_of
        self._least_tokens = least_tokens
        self._look_s = look_s
        self._lock = threading.Lock()
        self._members: dict[str, _Published] = {}
        self._leaving: list[Store] = []
        self._is_changed = threading.Event()
        self.link = Link("ssd-share-publisher", url, self._exchange)

    def add(self, member: Member) -> None:
        """Publish it from now on. O(1)."""
        with self._lock:
            self._members[member.namespace] = _Published(member, self._store_of(member.namespace))

    def leave(self, namespace: str) -> None:
        """Publish it no more, and let others have the lease. O(1)."""
        with self._lock:
            if (gone := self._members.pop(namespace, None)) is not None:
                self._leaving.append(gone.store)
        self._is_changed.set()

    def stop(self) -> None:
        """End the thread with the chunk it is at."""
        self.link.stop()
        self._is_changed.set()

    def close(self, timeout_s: float) -> None:
        """Wait for the end, and let others have the leases."""
        self.link.join(timeout_s)
        if self.link.is_connected:
            with self._lock:
                stores = [*self._leaving, *(each.store for each in self._members.values())]
            with contextlib.suppress(Exception):  # they expire
                for store in stores:
                    store.heads.release()

    def _exchange(self) -> None:
        self._is_changed.wait(min(1.0, self._look_s))
        self._is_changed.clear()
        with self._lock:
            members, leaving, self._leaving = list(self._members.values()), self._leaving, []
        for store in leaving:
            store.heads.release()
        look_s = self._look_s * min(2.0, max(1.0, len(members) / _FEW))
        for each in members:
            if self.link.is_stopping:
                return
            if time.monotonic() >= each.next_look:
                each.next_look = time.monotonic() + look_s
                self._attempt(each)

    def _attempt(self, each: _Published) -> None:
        """Only what ends the connection concerns the others."""
        try:
            self._look(each)
        except Exception as error:
            if ends_connection(error):
                raise
            each.next_look = time.monotonic() + _REFUSED_S
            self.link.report(error)

    def _look(self, each: _Published) -> None:
        member, cache = each.member, each.member.cache
        if cache is None or not member.is_settled:
            return
        sealed = cache.sealed()
        if sum(map(len, sealed.segments)) < self._least_tokens or sealed.checkpoint is None:
            return
        fence = each.store.heads.hold()
        if fence is None:
            return
        head = each.store.heads.tags().head
        if fence_of(head) is None:
            head = b""
        if head and head not in (member.tag, member.published_tag) and member.has_gap:
            return  # it may say more than we know, and is taken first
        num_new = sealed.position - member.published_position
        is_old = time.monotonic() - member.published_at >= PUBLISH_S
        is_lost = not head or (is_old and not num_new and not each.store.chunks.names())  # Redis may evict it
        if is_lost or (num_new and (is_old or num_new >= PUBLISH_TOKENS)):
            self._publish(each, cache, sealed, fence)

    def _publish(self, each: _Published, cache: SuffixCache, sealed: SealedText, fence: int) -> None:
        store, member = each.store, each.member
        recent = () if sealed.checkpoint is None else member.bookmark.recent(sealed.checkpoint)  # of few, and more come
        former, layer = store.head(), store.head(layer=True)
        there = store.chunks.names()
        sizes = {ref.name: ref.num_bytes for ref in former.chunks if ref.name in there} if former else {}
        chunks: list[ChunkRef] = []
        renew_at = time.monotonic() + self._look_s
        for sequences in cut(parts_of(newest_segments(sealed.segments, MOST_TOKENS))):
            name = name_of(store.owner, sequences)
            if (num_bytes := sizes.get(name)) is None:
                data = pack_chunk(store.owner, sequences)
                store.chunks.put(name, data)
                num_bytes = sizes[name] = len(data)
                self.num_published_bytes += num_bytes
                time.sleep(num_bytes / _BYTES_PER_S)
            chunks.append(ChunkRef(name, sum(map(len, sequences)), num_bytes))
            if self.link.is_stopping or member.has_left:
                return
            if time.monotonic() >= renew_at:
                if store.heads.hold() != fence:
                    return
                renew_at = time.monotonic() + self._look_s
        head = Head(
            owner=store.owner,
            chunks=tuple(chunks[-MAX_CHUNKS:]),
            fence=fence,
            learned=_put_learned(store, cache.learned.to_bytes(), there),
            mark=sealed.checkpoint,
            recent=recent,
            about={"made": int(time.time()), "tokens": sum(chunk.num_tokens for chunk in chunks)},
        )
        data = head.to_bytes()
        if member.has_left or not store.heads.replace(data):
            return
        member.published_tag, member.published_position = data[:TAG_BYTES], sealed.position
        member.published_at = time.monotonic()
        self.num_published_heads += 1
        log.debug("published %d chunks of namespace=%s", len(chunks), member.namespace)
        each.remove_unnamed((there | sizes.keys()) - head.names - (layer.names if layer else frozenset()))


class _Published:
    """``next_look`` : by ``time.monotonic``."""

    def __init__(self, member: Member, store: Store) -> None:
        self.member = member
        self.store = store
        self.next_look = 0.0
        self._unnamed_since: dict[bytes, float] = {}

    def remove_unnamed(self, unnamed: set[bytes]) -> None:
        """Remove chunks that have been unnamed for so long that nobody is fetching them."""
        now = time.monotonic()
        self._unnamed_since = {name: self._unnamed_since.get(name, now) for name in unnamed}
        due = [name for name, since in self._unnamed_since.items() if now - since >= _GRACE_S]
        if due and self.store.heads.hold() is not None:
            self.store.chunks.remove(due)
            for name in due:
                del self._unnamed_since[name]


def newest_segments(segments: tuple[Segment, ...], max_tokens: int) -> tuple[Segment, ...]:
    """The last of ``segments`` that hold at most ``max_tokens`` together, at least one."""
    first, num_tokens = len(segments), 0
    while first and (not num_tokens or num_tokens + len(segments[first - 1]) <= max_tokens):
        first -= 1
        num_tokens += len(segments[first])
    return segments[first:]


def learned_name(owner: bytes, learned: bytes) -> bytes:
    """The name of what drafting learned."""
    return xxhash.xxh3_128_digest(b"learned" + owner + learned)


def _put_learned(store: Store, learned: bytes | None, there: set[bytes]) -> bytes | None:
    if learned is None or len(learned) > MAX_LEARNED_BYTES:
        return None
    name = learned_name(store.owner, learned)
    if name not in there:
        store.chunks.put(name, learned)
    return name


def ends_connection(error: Any) -> bool:
    """Whether Redis is away, rather than that it refused something."""
    try:
        from redis.exceptions import ConnectionError, TimeoutError
    except ModuleNotFoundError:  # nor was there any
        return False
    return isinstance(error, ConnectionError | TimeoutError)
