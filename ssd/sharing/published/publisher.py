"""Publishes what the open namespaces know, off the request path, those whose lease this process has."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Final

import xxhash

from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_cache import SealedText, SuffixCache
from ssd.sharing.background import BackgroundLoop
from ssd.sharing.cursor import Cursor
from ssd.sharing.published.format import (
    MAX_CHUNKS,
    MAX_LEARNED_BYTES,
    TAG_BYTES,
    ChunkRef,
    Head,
    cut,
    fence_of,
    name_of,
    pack_chunk,
    parts_of,
)
from ssd.sharing.published.store import Store
from ssd.sharing.reader import Stream

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


class Namespace:
    """One open namespace. ``stream`` : as the reader follows it, None where there is no log."""

    def __init__(self, store: Store, cache: SuffixCache, cursor: Cursor, stream: Stream | None) -> None:
        self.name = cache.name
        self.store = store
        self.stream = stream
        self.cursor = cursor
        self.has_left = False
        """Whether it is closed here."""
        self._cache = weakref.ref(cache)

        self.is_new = not cursor.waypoints
        """Whether nothing of the log was ever read here."""
        self.is_settled = False
        """Whether what was published has been looked at."""
        self.num_gaps_closed = 0
        self.tag = b""
        """Of the head that was taken last."""
        self.lacks_head = False
        """Whether the store was emptied while it was taken."""
        self.layer_tag = b""
        self.layer: tuple[Segment, ...] = ()
        self.take_at = self.publish_at = 0.0
        """When to look again, by ``time.monotonic``."""
        self.published_tag = b""
        self.published_position = 0
        self.published_at = time.monotonic()
        self._unnamed_since: dict[bytes, float] = {}

    @property
    def cache(self) -> SuffixCache | None:
        """None once it is closed."""
        return None if self.has_left else self._cache()

    @property
    def num_gaps(self) -> int:
        """How often the log may have lost what was not read here."""
        return 0 if self.stream is None else self.stream.num_gaps

    @property
    def has_gap(self) -> bool:
        """Whether the log may have lost what was not read here, since a head was taken last."""
        return self.stream is None or self.lacks_head or self.num_gaps > self.num_gaps_closed

    def remove_unnamed(self, unnamed: set[bytes]) -> None:
        """Remove chunks that have been unnamed for so long that nobody is fetching them."""
        now = time.monotonic()
        self._unnamed_since = {name: self._unnamed_since.get(name, now) for name in unnamed}
        due = [name for name, since in self._unnamed_since.items() if now - since >= _GRACE_S]
        if due and self.store.renew():
            self.store.remove(due)
            for name in due:
                del self._unnamed_since[name]


class Publisher:
    """A namespace's text is cut into chunks, those the store lacks are sent, then the head is replaced.

    Chunks that no head has named for a minute are removed: whoever reads the head before it has them by then, or takes
    the newer one.
    """

    def __init__(self, loop: BackgroundLoop, *, least_tokens: int = LEAST_TOKENS, look_s: float = LOOK_S) -> None:
        """``loop`` : whose thread calls. ``least_tokens`` : shorter text is left to the log."""
        self.num_heads = 0
        self.look_s = look_s
        self._loop = loop
        self._least_tokens = least_tokens

    def look(self, each: Namespace) -> None:
        """Publish a namespace if it is our turn and time to."""
        cache = each.cache
        if cache is None or not each.is_settled:
            return
        sealed = cache.sealed()
        if sum(map(len, sealed.segments)) < self._least_tokens or sealed.checkpoint is None:
            return
        if not each.store.hold():
            return
        head = each.store.tags().head
        if fence_of(head) is None:
            head = b""
        if head and head not in (each.tag, each.published_tag) and each.has_gap:
            return  # it may say more than we know, and is taken first
        num_new = sealed.position - each.published_position
        is_old = time.monotonic() - each.published_at >= PUBLISH_S
        is_lost = not head or (is_old and not num_new and not each.store.names())  # Redis may evict it
        if is_lost or (num_new and (is_old or num_new >= PUBLISH_TOKENS)):
            self._publish(each, cache, sealed)

    def _publish(self, each: Namespace, cache: SuffixCache, sealed: SealedText) -> None:
        store = each.store
        recent = () if sealed.checkpoint is None else each.cursor.recent(sealed.checkpoint)  # of few, and more come
        former, layer = store.head(), store.head(layer=True)
        there = store.names()
        sizes = {ref.name: ref.num_bytes for ref in former.chunks if ref.name in there} if former else {}
        chunks: list[ChunkRef] = []
        renew_at = time.monotonic() + self.look_s
        for sequences in cut(parts_of(newest_segments(sealed.segments, MOST_TOKENS))):
            name = name_of(store.owner, sequences)
            if (num_bytes := sizes.get(name)) is None:
                data = pack_chunk(store.owner, sequences)
                store.put(name, data)
                num_bytes = sizes[name] = len(data)
                time.sleep(num_bytes / _BYTES_PER_S)
            chunks.append(ChunkRef(name, sum(map(len, sequences)), num_bytes))
            if self._loop.is_stopping or each.has_left:
                return
            if time.monotonic() >= renew_at:
                if not store.renew():
                    return
                renew_at = time.monotonic() + self.look_s
        head = Head(
            owner=store.owner,
            chunks=tuple(chunks[-MAX_CHUNKS:]),
            learned=_put_learned(store, cache.learned.to_bytes(), there),
            mark=sealed.checkpoint,
            recent=recent,
            about={"made": int(time.time()), "tokens": sum(chunk.num_tokens for chunk in chunks)},
        )
        data = head.to_bytes()
        if each.has_left or not store.replace(data):
            return
        each.published_tag, each.published_position = data[:TAG_BYTES], sealed.position
        each.published_at = time.monotonic()
        self.num_heads += 1
        log.debug("published %d chunks of namespace=%s", len(chunks), each.name)
        each.remove_unnamed((there | sizes.keys()) - head.names - (layer.names if layer else frozenset()))


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
        store.put(name, learned)
    return name
