"""Brings the open namespaces what others published: all of it where a namespace begins, what is lacking after a gap."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from ssd.errors import SSDError
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.link import Link
from ssd.sharing.published.member import Member
from ssd.sharing.published.presence import Answer, Presence
from ssd.sharing.published.publisher import ends_connection
from ssd.sharing.published.store import Store
from ssd.sharing.published.taking import MAX_LAYER_TOKENS, Fetched, fetch, segments_of, store_lacking
from ssd.sharing.reader import LogReader

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.5
_GAP_LOOK_S: Final = 2.0
_LOOK_S: Final = 10.0
_FEW: Final = 16  # of more namespaces each is looked at less often: two exchanges with Redis a look
_LONGEST_LOOK_S: Final = 30.0
_REFUSED_S: Final = 30.0
_NO_ANSWER: Final = Answer(b"", is_gone=False)


class Joiner:
    """One thread. The log of a namespace that begins here is read once its published text is there, or after 5 s.

    Text is fetched before anything waits for it; then the log rests while what is lacking is stored, and is read on
    from where the text ends. The mark is kept before the text: what a crash loses in between is not stored twice.
    """

    def __init__(
        self,
        url: str,
        store_of: Callable[[str], Store],
        reader: LogReader | None,
        *,
        vocab_size: int,
        presence: Presence | None = None,
    ) -> None:
        """``reader``, ``presence`` : None where there is no Redis."""
        self.discard: Callable[[str], None] | None = None
        """Forgets a namespace where that is demanded, and removes its files; raises CacheError where it cannot."""
        self.num_taken_tokens = 0
        self.num_taken_heads = 0
        self.num_missing_chunks = 0
        self._store_of = store_of
        self._reader = reader
        self._presence = presence
        self._answers: dict[str, Answer] = {}
        self._left: set[str] = set()  # and those that ask are not told yet
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._members: dict[str, tuple[Member, Store]] = {}
        self._is_changed = threading.Event()
        self.link = Link("ssd-share-joiner", url, self._exchange)

    def add(self, member: Member) -> None:
        """Look for it from now on. O(1)."""
        with self._lock:
            self._members[member.namespace] = member, self._store_of(member.namespace)
        self._is_changed.set()

    def leave(self, namespace: str) -> None:
        """Look for it no more. O(1)."""
        with self._lock:
            self._members.pop(namespace, None)
            self._left.add(namespace)

    def stop(self) -> None:
        """End the thread with what it is at."""
        self.link.stop()
        self._is_changed.set()

    def close(self, timeout_s: float) -> None:
        """Wait for the end, and say that nothing is open here any more."""
        self.link.join(timeout_s)
        if self._presence is not None and self.link.is_connected:
            with self._lock:
                left = {*self._left, *self._members}
            with contextlib.suppress(Exception):  # what is said expires
                for namespace in left:
                    self._presence.leave(namespace)

    def _exchange(self) -> None:
        self._is_changed.wait(_IDLE_S)
        self._is_changed.clear()
        with self._lock:
            members, left = list(self._members.values()), self._left - self._members.keys()
            self._left = set()
        if self._presence is not None:
            for namespace in left:
                self._presence.leave(namespace)
        times = max(1.0, len(members) / _FEW)
        for member, store in members:
            interval_s = _GAP_LOOK_S if member.stream is not None and member.has_gap else _LOOK_S
            interval_s = min(times * interval_s, _LONGEST_LOOK_S)
            is_due = not member.is_settled or time.monotonic() >= member.looked_at + interval_s
            if is_due and not self.link.is_stopping:
                self._attempt(member, store)

    def _attempt(self, member: Member, store: Store) -> None:
        """Only what ends the connection concerns the others."""
        cache = member.cache
        if cache is None:
            return
        try:
            if self._presence is not None and not self._obeys(self._presence, member.namespace):
                return
            self._look(member, store, cache)
            member.looked_at = time.monotonic()
        except Exception as error:
            if ends_connection(error):
                raise
            member.looked_at = time.monotonic() + _REFUSED_S
            self.link.report(error)
        self._settle(member)

    def _obeys(self, presence: Presence, namespace: str) -> bool:
        """Say that a namespace is open here, and forget it if that is demanded; whether it is open still."""
        answer = self._answers.get(namespace, _NO_ANSWER)
        token = presence.tell(namespace, answer)
        if not token or token == answer.token:
            return True
        answer = self._answers[namespace] = Answer(token, self._forget(namespace))
        with self._lock:
            self._left.discard(namespace)  # the answer stays for whoever waits for it
        presence.tell(namespace, answer)
        return not answer.is_gone

    def _forget(self, namespace: str) -> bool:
        if self.discard is None:
            return False
        try:
            self.discard(namespace)
        except SSDError as error:
            log.warning("namespace=%s was to be forgotten, and is not: %s", namespace, error)
            return False
        log.info("namespace=%s was forgotten, as was demanded", namespace)
        return True

    def _look(self, member: Member, store: Store, cache: SuffixCache) -> None:
        tags = store.heads.tags()
        if (not member.is_settled and member.is_new) or member.has_gap:
            num_gaps = member.num_gaps
            if tags.head and tags.head not in (member.tag, member.published_tag):
                self._take(member, store, cache, tags.head)
            elif tags.head:
                member.num_gaps_closed = num_gaps
        if tags.layer != member.layer_tag:
            self._settle(member)  # sorting takes its time
            self._exchange_layer(member, store, cache)

    def _take(self, member: Member, store: Store, cache: SuffixCache, tag: bytes) -> None:
        num_gaps = member.num_gaps
        fetched = fetch(store, cache.capacity_tokens)
        if fetched is None:
            member.tag = tag  # of no use, whatever it is
            return
        stream, reader = member.stream, self._reader
        if stream is not None and reader is not None and not reader.suspend(stream):
            return
        try:
            self._store(member, cache, fetched)
            member.num_gaps_closed = num_gaps
        finally:
            if stream is not None and reader is not None:
                stream.forget()
                stream.is_joined = True
                reader.resume(stream)

    def _store(self, member: Member, cache: SuffixCache, fetched: Fetched) -> None:
        began = time.monotonic()
        if fetched.head.mark is not None:
            member.bookmark.join(fetched.head.mark)
            member.bookmark.knows(fetched.head.recent)
            if member.stream is not None:
                member.stream.saw_before(fetched.head.recent)
            cache.set_source(member.bookmark.position())
        num_tokens = store_lacking(cache, fetched, self._vocab_size)
        member.tag = fetched.head.tag
        self.num_taken_tokens += num_tokens
        self.num_taken_heads += 1
        self.num_missing_chunks += fetched.num_missing
        log.info(
            "namespace=%s took %d tokens that others had published, in %.1f s",
            member.namespace, num_tokens, time.monotonic() - began,
        )  # fmt: skip

    def _exchange_layer(self, member: Member, store: Store, cache: SuffixCache) -> None:
        fetched = fetch(store, MAX_LAYER_TOKENS, layer=True)
        segments = [] if fetched is None else segments_of(fetched, self._vocab_size)
        cache.exchange_static(member.layer, segments)
        member.layer = tuple(segments)
        member.layer_tag = b"" if fetched is None else fetched.head.tag
        log.info("namespace=%s searches %d pushed tokens", member.namespace, sum(map(len, segments)))

    def _settle(self, member: Member) -> None:
        """Its log may be read."""
        if not member.is_settled:
            member.is_settled = True
            if member.stream is not None and self._reader is not None:
                self._reader.resume(member.stream)
