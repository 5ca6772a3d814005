"""Servers that share through a store alone, without Redis: each begins with what others published."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.bookmark import Bookmark
from ssd.sharing.published.published import Published
from ssd.sharing.published.publisher import LEAST_TOKENS
from ssd.sharing.redis_log import SharingStats


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
