"""One open namespace, as those see it who publish it and who bring it what others published."""

from __future__ import annotations

import math
import time
import weakref

from ssd.retrieval.cache import SuffixCache
from ssd.retrieval.segment import Segment
from ssd.sharing.bookmark import Bookmark
from ssd.sharing.published.chunk import owner_of
from ssd.sharing.stream import Stream


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
