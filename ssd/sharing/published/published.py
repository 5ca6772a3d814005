"""All that one process publishes and takes: where it lies, and the thread that does it.

A server says which namespaces it has open in keys of its own that expire. A demand to forget one is a key with a random
token, which each server that has the namespace open answers once with what became of it. So whoever demands
(``commands.purge_redis``) knows when the last one has obeyed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ssd.errors import SSDError
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.background import BackgroundLoop
from ssd.sharing.connection import connect
from ssd.sharing.cursor import Cursor, Stream
from ssd.sharing.entry import heartbeat_key, purge_key
from ssd.sharing.published.joiner import Joiner
from ssd.sharing.published.publisher import LEAST_TOKENS, Namespace, Publisher
from ssd.sharing.published.store import Store, UrlChunks, open_place, redis_store, url_store
from ssd.sharing.reader import LogReader
from ssd.sharing.redis_log import DEFAULT_MAX_TOKENS, RedisLog, SharingStats
from ssd.sharing.stream import ask_all

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

HEARTBEAT_MS: Final = 100_000
"""Three looks of a joiner that has many namespaces open."""

TOKEN_CHARACTERS: Final = 32
_TOKEN: Final = re.compile(rb"[0-9a-f]{32}")


class Answer(NamedTuple):
    """``token`` : of the demand that was answered last, empty for none; ``is_gone`` : whether all was forgotten."""

    token: bytes
    is_gone: bool


class Heartbeat:
    """What one process says of the namespaces it has open. Any call may raise what redis-py raises."""

    def __init__(self, client: redis.Redis, fingerprint: str) -> None:
        self._client = client
        self._fingerprint = fingerprint
        self._id = secrets.token_hex(8)

    def tell(self, namespace: str, answer: Answer) -> bytes:
        """Say that it is open here, or was until just now; the token of a demand to forget it, empty if there is none.

        One exchange with the server.
        """
        value = b"%s %s" % (answer.token, b"gone" if answer.is_gone else b"kept")
        _, found = ask_all(
            self._client,
            [
                ("SET", heartbeat_key(self._fingerprint, namespace, self._id), value, "PX", HEARTBEAT_MS),
                ("GETRANGE", purge_key(self._fingerprint, namespace), 0, TOKEN_CHARACTERS),
            ],
        )
        return found if isinstance(found, bytes) and _TOKEN.fullmatch(found) else b""

    def leave(self, namespace: str) -> None:
        """It is open here no more."""
        self._client.delete(heartbeat_key(self._fingerprint, namespace, self._id))


_IDLE_S: Final = 0.5
_GAP_LOOK_S: Final = 2.0
_LOOK_S: Final = 10.0
_LONGEST_LOOK_S: Final = 30.0
_FEW: Final = 16  # of more namespaces each is looked at less often: some exchanges with Redis a look
_REFUSED_S: Final = 30.0
_NO_ANSWER: Final = Answer(b"", is_gone=False)


class Published:
    """All that one process publishes and takes, on one thread; heads in Redis, chunks there or at a URL."""

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
        """Starts the thread; Redis need not be there.

        ``url``, ``reader`` : None where there is no Redis; then heads lie at ``publish_to`` as well.
        ``publishes`` : whether this process publishes, from ``least_tokens`` on in a namespace; ``publish_to`` : an
        fsspec URL where chunks lie, None for Redis. Raises ConfigError.
        """
        self._fingerprint = fingerprint
        self._client = None if url is None else connect(url)
        self._place = None if publish_to is None else open_place(publish_to)
        self._heartbeat = None if self._client is None else Heartbeat(self._client, fingerprint)
        self._discard: Callable[[str], None] | None = None
        self._answers: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self._open: dict[str, Namespace] = {}
        self._left: dict[str, Namespace] = {}  # and those that ask are not told yet, nor is the lease given back
        self._is_changed = threading.Event()
        self.loop = BackgroundLoop("ssd-share-published", url or publish_to or "", self._exchange)
        self.joiner = Joiner(reader, vocab_size=vocab_size)
        self.publisher = Publisher(self.loop, least_tokens=least_tokens) if publishes else None
        self.loop.start()

    def store_of(self, namespace: str) -> Store:
        """Where a namespace is published."""
        if self._client is None:
            assert self._place is not None
            return url_store(self._place, self._fingerprint, namespace)
        store = redis_store(self._client, self._fingerprint, namespace)
        if self._place is not None:
            return store._replace(chunks=UrlChunks(self._place, self._fingerprint, namespace))
        return store

    def attach(self, cache: SuffixCache, cursor: Cursor, stream: Stream | None) -> None:
        """Bring it what is published, then have the reader go on with ``stream``; publish it. O(1)."""
        with self._lock:
            self._open[cache.name] = Namespace(self.store_of(cache.name), cache, cursor, stream)
        self._is_changed.set()

    def obey(self, discard: Callable[[str], None]) -> None:
        """Forget a namespace with ``discard`` where whoever has the right to demands it (``ssd-cache purge``).

        ``discard`` : removes its files too; raises CacheError where it cannot.
        """
        self._discard = discard

    def leave(self, namespace: str) -> None:
        """Neither take nor publish it from now on, and let others have the lease. O(1)."""
        with self._lock:
            if (gone := self._open.pop(namespace, None)) is not None:
                gone.has_left = True
                self._left[namespace] = gone
        self._is_changed.set()

    def remove(self, namespace: str) -> None:
        """Remove all that is published of a namespace. Waits for the store; raises its errors."""
        store = self.store_of(namespace)
        store.heads.clear()
        store.chunks.clear()

    def stop(self) -> None:
        """End the thread with what it is at."""
        self.loop.stop()
        self._is_changed.set()

    def close(self, timeout_s: float) -> None:
        """Wait for its end, let others have the leases, and say that nothing is open here any more."""
        self.loop.join(timeout_s)
        with self._lock:
            left = [*self._left.values(), *self._open.values()]
        if self.loop.is_connected:
            with contextlib.suppress(Exception):  # leases and what is said expire
                self._say_left(left)
        if self._client is not None:
            self._client.close()

    def _exchange(self) -> None:
        self._is_changed.wait(_IDLE_S)
        self._is_changed.clear()
        with self._lock:
            opened = sorted(self._open.values(), key=lambda each: each.is_settled)  # whose log waits is looked at first
            left, self._left = [each for name, each in self._left.items() if name not in self._open], {}
        self._say_left(left)
        times = max(1.0, len(opened) / _FEW)
        for each in opened:
            if not self.loop.is_stopping and (not each.is_settled or time.monotonic() >= each.take_at):
                interval_s = _GAP_LOOK_S if each.stream is not None and each.has_gap else _LOOK_S
                each.take_at = time.monotonic() + min(times * interval_s, _LONGEST_LOOK_S)
                if not self._attempt(each, self._take):
                    each.take_at = time.monotonic() + _REFUSED_S
                self.joiner.settle(each)
            if self.publisher and not self.loop.is_stopping and time.monotonic() >= each.publish_at:
                each.publish_at = time.monotonic() + self.publisher.look_s * min(2.0, times)
                if not self._attempt(each, self.publisher.look):
                    each.publish_at = time.monotonic() + _REFUSED_S

    def _attempt(self, each: Namespace, step: Callable[[Namespace], None]) -> bool:
        """Whether it went well; only what ends the connection concerns the others."""
        try:
            step(each)
        except Exception as error:
            if _ends_connection(error):
                raise
            self.loop.report(error)
            return False
        return True

    def _take(self, each: Namespace) -> None:
        if each.cache is not None and (self._heartbeat is None or self._obeys(self._heartbeat, each.name)):
            self.joiner.look(each)

    def _say_left(self, left: Sequence[Namespace]) -> None:
        for each in left:
            if self.publisher is not None:
                each.store.heads.release()
            if self._heartbeat is not None:
                self._heartbeat.leave(each.name)

    def _obeys(self, heartbeat: Heartbeat, namespace: str) -> bool:
        """Say that a namespace is open here, and forget it if that is demanded; whether it is open still."""
        answer = self._answers.get(namespace, _NO_ANSWER)
        token = heartbeat.tell(namespace, answer)
        if not token or token == answer.token:
            return True
        answer = self._answers[namespace] = Answer(token, self._forget(namespace))
        with self._lock:
            self._left.pop(namespace, None)  # the answer stays for whoever waits for it
        heartbeat.tell(namespace, answer)
        return not answer.is_gone

    def _forget(self, namespace: str) -> bool:
        if self._discard is None:
            return False
        try:
            self._discard(namespace)
        except SSDError as error:
            log.warning("namespace=%s was to be forgotten, and is not: %s", namespace, error)
            return False
        log.info("namespace=%s was forgotten, as was demanded", namespace)
        return True


def _ends_connection(error: Exception) -> bool:
    """Whether Redis is away, rather than that it refused something."""
    try:
        from redis.exceptions import ConnectionError, TimeoutError
    except ModuleNotFoundError:  # nor was there any
        return False
    return isinstance(error, ConnectionError | TimeoutError)


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
        cursor = Cursor(secrets.token_bytes(8))
        cache.set_source(cursor.position())
        self._published.attach(cache, cursor, None)

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
            is_connected=published.loop.is_connected,
            num_failures=published.loop.num_failures,
            num_reconnects=published.loop.num_reconnects,
            num_taken_tokens=published.joiner.num_taken_tokens,
            num_heads=published.publisher.num_heads if published.publisher else 0,
        )

    def close(self) -> None:
        """Stop. At most some seconds; may be called twice."""
        self._published.stop()
        self._published.close(3.0)
