"""All that one process publishes and takes: where it lies, and the threads that do it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.bookmark import Bookmark, Stream
from ssd.sharing.connection import connect
from ssd.sharing.link import Link
from ssd.sharing.published.joiner import Joiner, Presence
from ssd.sharing.published.publisher import LEAST_TOKENS, Member, Publisher
from ssd.sharing.published.store import Store, UrlChunks, open_place, redis_store, url_store
from ssd.sharing.reader import LogReader
from ssd.sharing.redis_log import DEFAULT_MAX_TOKENS, RedisLog, SharingStats


class Published:
    """A joiner, and a publisher where this process is to publish; heads in Redis, chunks there or at a URL."""

    def __init__(
        self,
        url: str | None,
        reader: LogReader | None,
        *,
        fingerprint: str,
        vocab_size: int,
        publishes: bool = True,
        publish_to: str | None = None,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        """Starts the threads; Redis need not be there.

        ``url``, ``reader`` : None where there is no Redis; then heads lie at ``publish_to`` as well.
        ``publishes`` : whether this process publishes, from ``least_tokens`` on in a namespace; ``publish_to`` : an
        fsspec URL where chunks lie, None for Redis. Raises ConfigError.
        """
        self._fingerprint = fingerprint
        self._client = None if url is None else connect(url)
        self._place = None if publish_to is None else open_place(publish_to)
        presence = None if self._client is None else Presence(self._client, fingerprint)
        where = url or publish_to or ""
        self._joiner = Joiner(where, self.store_of, reader, vocab_size=vocab_size, presence=presence)
        self._publisher = Publisher(where, self.store_of, least_tokens=least_tokens) if publishes else None
        for link in self._links():
            link.start()

    def store_of(self, namespace: str) -> Store:
        """Where a namespace is published."""
        if self._client is None:
            assert self._place is not None
            return url_store(self._place, self._fingerprint, namespace)
        store = redis_store(self._client, self._fingerprint, namespace)
        if self._place is not None:
            return store._replace(chunks=UrlChunks(self._place, self._fingerprint, namespace))
        return store

    @property
    def is_connected(self) -> bool:
        """Whether the store answers."""
        return all(link.is_connected for link in self._links())

    def attach(self, cache: SuffixCache, bookmark: Bookmark, stream: Stream | None) -> None:
        """Bring it what is published, then have the reader go on with ``stream``; publish it. O(1)."""
        member = Member(self._fingerprint, cache, bookmark, stream)
        self._joiner.add(member)
        if self._publisher is not None:
            self._publisher.add(member)

    def obey(self, discard: Callable[[str], None]) -> None:
        """Forget a namespace with ``discard`` where whoever has the right to demands it (``ssd-cache purge``)."""
        self._joiner.discard = discard

    def leave(self, namespace: str) -> None:
        """Do neither from now on. O(1)."""
        self._joiner.leave(namespace)
        if self._publisher is not None:
            self._publisher.leave(namespace)

    def remove(self, namespace: str) -> None:
        """Remove all that is published of a namespace. Waits for the store; raises its errors."""
        store = self.store_of(namespace)
        store.heads.clear()
        store.chunks.clear()

    @property
    def num_failures(self) -> int:
        """Looks that failed."""
        return sum(link.num_failures for link in self._links())

    @property
    def num_reconnects(self) -> int:
        """How often one worked again after it had failed."""
        return sum(link.num_reconnects for link in self._links())

    @property
    def num_taken_tokens(self) -> int:
        """Tokens stored here that others had published."""
        return self._joiner.num_taken_tokens

    @property
    def num_heads(self) -> int:
        """How often a namespace was published."""
        return 0 if self._publisher is None else self._publisher.num_published_heads

    def stop(self) -> None:
        """End the threads soon."""
        self._joiner.stop()
        if self._publisher is not None:
            self._publisher.stop()

    def close(self, timeout_s: float) -> None:
        """Wait for their end and give the connections back."""
        self._joiner.close(timeout_s)
        if self._publisher is not None:
            self._publisher.close(timeout_s)
        if self._client is not None:
            self._client.close()

    def _links(self) -> list[Link]:
        return [self._joiner.link] if self._publisher is None else [self._joiner.link, self._publisher.link]


def shared_log(
    url: str,
    *,
    fingerprint: str,
    vocab_size: int,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    publishes: bool = True,
    publish_to: str | None = None,
    least_tokens: int = LEAST_TOKENS,
) -> RedisLog:
    """A log whose namespaces begin with what others published, and are published. As ``RedisLog`` and ``Published``."""
    published = partial(
        Published,
        url,
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        publishes=publishes,
        publish_to=publish_to,
        least_tokens=least_tokens,
    )
    return RedisLog(url, fingerprint=fingerprint, vocab_size=vocab_size, max_tokens=max_tokens, published=published)


class StoreShare:
    """In place of a ``RedisLog``: nothing is shared from request to request, but what was published is, both ways.

    Each server takes what a newer head has that it lacks, and publishes what it knows then; so all come to know what
    each does, a minute or more later.
    """

    def __init__(
        self,
        publish_to: str,
        *,
        fingerprint: str,
        vocab_size: int,
        publishes: bool = True,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        """As for ``shared_log``. Raises ConfigError."""
        self._published = Published(
            None,
            None,
            fingerprint=fingerprint,
            vocab_size=vocab_size,
            publishes=publishes,
            publish_to=publish_to,
            least_tokens=least_tokens,
        )

    def attach(self, cache: SuffixCache) -> None:
        """Bring ``cache`` what is published, and publish it. Returns at once."""
        bookmark = Bookmark(secrets.token_bytes(8))
        cache.set_source(bookmark.position())
        self._published.attach(cache, bookmark, None)

    def detach(self, cache: SuffixCache) -> None:
        """Do neither: the cache is being closed. O(1)."""
        self._published.leave(cache.name)

    def forget(self, namespace: str) -> None:
        """Remove what is published of a namespace that is not attached any more. Waits; raises the store's errors."""
        self._published.leave(namespace)
        self._published.remove(namespace)

    def obey(self, discard: Callable[[str], None]) -> None:
        """Nobody can demand anything: there is no Redis."""

    def stats(self) -> SharingStats:
        """The counters as they are now; nothing comes entry by entry."""
        published = self._published
        return SharingStats(
            is_connected=published.is_connected,
            num_published=0,
            num_published_tokens=0,
            num_queued=0,
            num_received=0,
            num_received_tokens=0,
            num_known=0,
            num_dropped=0,
            num_invalid=0,
            num_failures=published.num_failures,
            num_reconnects=published.num_reconnects,
            num_taken_tokens=published.num_taken_tokens,
            num_heads=published.num_heads,
        )

    def close(self) -> None:
        """Stop. At most some seconds; may be called twice."""
        self._published.stop()
        self._published.close(3.0)
