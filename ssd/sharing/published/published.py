"""What a server shares: the log of each namespace where there is Redis, whole texts there or at a URL.

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
from dataclasses import replace
from typing import Final, NamedTuple, Self

from ssd.errors import SSDError
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.background import BackgroundLoop
from ssd.sharing.connection import connect
from ssd.sharing.cursor import Cursor
from ssd.sharing.entry import heartbeat_key, purge_key
from ssd.sharing.published.joiner import Joiner
from ssd.sharing.published.publisher import LEAST_TOKENS, Namespace, Publisher
from ssd.sharing.published.store import Store, open_place, store_at
from ssd.sharing.redis_log import DEFAULT_MAX_TOKENS, RedisLog
from ssd.sharing.stats import SharingStats
from ssd.sharing.stream import ask_all

log = logging.getLogger(__name__)

HEARTBEAT_MS: Final = 100_000
"""Three looks of a joiner that has many namespaces open."""

TOKEN_CHARACTERS: Final = 32
_TOKEN: Final = re.compile(rb"[0-9a-f]{32}")


class Answer(NamedTuple):
    """``token`` : of the demand that was answered last, empty for none; ``is_gone`` : whether all was forgotten."""

    token: bytes
    is_gone: bool


_FIRST_LOOK_S: Final = 5.0
"""The log of a new namespace is not read for so long, unless it is said sooner that all is taken: what it holds is in
the text that is published."""

_IDLE_S: Final = 0.5
_GAP_LOOK_S: Final = 2.0
_LOOK_S: Final = 10.0
_LONGEST_LOOK_S: Final = 30.0
_FEW: Final = 16  # of more namespaces each is looked at less often: some exchanges with Redis a look
_REFUSED_S: Final = 30.0
_CLOSE_TIMEOUT_S: Final = 3.0
_NO_ANSWER: Final = Answer(b"", is_gone=False)


class Sharing:
    """All that one server shares. Namespaces begin with what others published, and are published, on one thread.

    Without Redis nothing is shared from request to request, but each server takes what a newer head has that it lacks,
    and publishes what it knows then; so all come to know what each does, a minute or more later.
    """

    def __init__(
        self,
        url: str | None,
        *,
        fingerprint: str,
        vocab_size: int,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        publishes: bool = True,
        publish_to: str | None = None,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        """Starts all threads; Redis need not be there.

        ``url`` : of Redis, None where there is none; then heads lie at ``publish_to`` as well. ``max_tokens`` : bound
        of each log. ``publishes`` : whether this server publishes, from ``least_tokens`` on in a namespace;
        ``publish_to`` : an fsspec URL where chunks lie, None for Redis. Raises ConfigError.
        """
        self._fingerprint = fingerprint
        self._place = None if publish_to is None else open_place(publish_to)
        self._client = None if url is None else connect(url)
        self._member = secrets.token_hex(8)
        self._discard: Callable[[str], None] | None = None
        self._answers: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self._open: dict[str, Namespace] = {}
        self._left: dict[str, Namespace] = {}  # and those that ask are not told yet, nor is the lease given back
        self._is_changed = threading.Event()
        self.log = (
            None
            if url is None
            else RedisLog(url, fingerprint=fingerprint, vocab_size=vocab_size, max_tokens=max_tokens)
        )
        """From request to request; None where there is no Redis."""
        self.loop = BackgroundLoop("ssd-share-published", url or publish_to or "", self._exchange)
        self._joiner = Joiner(None if self.log is None else self.log.reader, vocab_size=vocab_size)
        self._publisher = Publisher(self.loop, least_tokens=least_tokens) if publishes else None
        self.loop.start()

    def store_of(self, namespace: str) -> Store:
        """Where a namespace is published."""
        return store_at(self._client, self._place, self._fingerprint, namespace)

    def attach(self, cache: SuffixCache) -> None:
        """Bring ``cache`` what is published, then have it follow its log; publish it. Returns at once."""
        if self.log is not None:
            stream = self.log.attach(cache, wait_s=_FIRST_LOOK_S)
            cursor = stream.cursor
        else:
            stream, cursor = None, Cursor(secrets.token_bytes(8))
            cache.set_source(cursor.position())
        with self._lock:
            self._open[cache.name] = Namespace(self.store_of(cache.name), cache, cursor, stream)
        self._is_changed.set()

    def detach(self, cache: SuffixCache) -> None:
        """Neither take nor publish it from now on: it is being closed. What it has queued is written. O(1)."""
        if self.log is not None:
            self.log.detach(cache)
        self._leave(cache.name)

    def obey(self, discard: Callable[[str], None]) -> None:
        """Forget a namespace where whoever has the right to demands it (``ssd-cache purge``), and what is shared of it.

        ``discard`` : of the caches and their files; raises CacheError where it cannot, ConfigError for one that stays.
        """
        self._discard = discard

    def forget(self, namespace: str) -> None:
        """Remove all that is shared of a namespace that is not attached any more. Waits; raises the store's errors.

        A replica that still writes there makes it anew.
        """
        self._leave(namespace)
        if self.log is not None:
            self.log.forget(namespace)
        self.store_of(namespace).clear()

    def stats(self) -> SharingStats:
        """The counters as they are now."""
        said = SharingStats(is_connected=self.loop.is_connected) if self.log is None else self.log.stats()
        return replace(
            said,
            num_failures=said.num_failures + self.loop.num_failures,
            num_reconnects=said.num_reconnects + self.loop.num_reconnects,
            num_taken_tokens=self._joiner.num_taken_tokens,
            num_heads=self._publisher.num_heads if self._publisher else 0,
        )

    def close(self) -> None:
        """Write what is queued if Redis takes it at once, let others publish, say that nothing is open here any more.

        At most some seconds; may be called twice.
        """
        self.loop.stop()
        self._is_changed.set()
        if self.log is not None:
            self.log.close()
        self.loop.join(_CLOSE_TIMEOUT_S)
        with self._lock:
            left = [*self._left.values(), *self._open.values()]
        if self.loop.is_connected:
            with contextlib.suppress(Exception):  # leases and what is said expire
                self._say_left(left)
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave(self, namespace: str) -> None:
        with self._lock:
            if (gone := self._open.pop(namespace, None)) is not None:
                gone.has_left = True
                self._left[namespace] = gone
        self._is_changed.set()

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
                self._joiner.settle(each)
            if self._publisher and not self.loop.is_stopping and time.monotonic() >= each.publish_at:
                each.publish_at = time.monotonic() + self._publisher.look_s * min(2.0, times)
                if not self._attempt(each, self._publisher.look):
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
        if each.cache is not None and self._obeys(each.name):
            self._joiner.look(each)

    def _say_left(self, left: Sequence[Namespace]) -> None:
        for each in left:
            if self._publisher is not None:
                each.store.release()
            if self._client is not None:
                self._client.delete(heartbeat_key(self._fingerprint, each.name, self._member))

    def _obeys(self, namespace: str) -> bool:
        """Say that a namespace is open here, and forget it if that is demanded; whether it is open still."""
        answer = self._answers.get(namespace, _NO_ANSWER)
        token = self._tell(namespace, answer)
        if not token or token == answer.token:
            return True
        answer = self._answers[namespace] = Answer(token, self._forget(namespace))
        with self._lock:
            self._left.pop(namespace, None)  # the answer stays for whoever waits for it
        self._tell(namespace, answer)
        return not answer.is_gone

    def _tell(self, namespace: str, answer: Answer) -> bytes:
        """Say that it is open here, or was until just now; the token of a demand to forget it, empty if there is none.

        One exchange with the server.
        """
        if self._client is None:
            return b""
        key, value = heartbeat_key(self._fingerprint, namespace, self._member), b"gone" if answer.is_gone else b"kept"
        _, found = ask_all(
            self._client,
            [
                ("SET", key, b"%s %s" % (answer.token, value), "PX", HEARTBEAT_MS),
                ("GETRANGE", purge_key(self._fingerprint, namespace), 0, TOKEN_CHARACTERS),
            ],
        )
        return found if isinstance(found, bytes) and _TOKEN.fullmatch(found) else b""

    def _forget(self, namespace: str) -> bool:
        if self._discard is None:
            return False
        try:
            self._discard(namespace)
            self.forget(namespace)
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
