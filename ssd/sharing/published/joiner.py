"""Brings the open namespaces what others published: all of it where a namespace begins, what is lacking after a gap."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ssd.errors import SSDError
from ssd.retrieval.names import new_segment_id
from ssd.retrieval.packed import Tokens
from ssd.retrieval.segment import SEPARATOR, Segment
from ssd.retrieval.suffix_array import build_segment
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.entry import member_key, purge_key
from ssd.sharing.link import Link
from ssd.sharing.published.format import (
    ChunkRef,
    Head,
    InvalidChunkError,
    hash_of,
    newest_within,
    parts_of,
    parts_of_tail,
    unpack_chunk,
)
from ssd.sharing.published.publisher import Member, ends_connection, learned_name
from ssd.sharing.published.store import Store
from ssd.sharing.reader import LogReader
from ssd.sharing.stream import ask_all

if TYPE_CHECKING:
    import redis


MAX_LAYER_TOKENS: Final = 1 << 25
"""Of pushed text a replica searches the newest so many: 7 bytes of memory each."""

_SEGMENT_TOKENS: Final = 1 << 24
_MOST_ATTEMPTS: Final = 3
_MOST_STORING_S: Final = 60.0


class Fetched:
    """A head with its chunks, as they came. ``num_missing`` : of its chunks, or not what they should be."""

    def __init__(self, store: Store, head: Head, chunks: Sequence[ChunkRef]) -> None:
        """Fetches them; raises what the store raises."""
        self.head = head
        self.num_missing = 0
        self.learned = _learned(store, head)
        self._owner = store.owner
        self._chunks: list[tuple[bytes, bytes]] = []
        for chunk in chunks:
            data = store.chunks.get(chunk.name)
            if data is None or len(data) != chunk.num_bytes:
                self.num_missing += 1
            else:
                self._chunks.append((chunk.name, data))

    def sequences(self, vocab_size: int) -> Iterator[Tokens]:
        """int32[n] each, in order; chunks that are not what their names say count as missing."""
        for name, data in self._chunks:
            try:
                yield from unpack_chunk(data, owner=self._owner, name=name, vocab_size=vocab_size)
            except InvalidChunkError:
                self.num_missing += 1


def fetch(store: Store, max_tokens: int, *, layer: bool = False) -> Fetched | None:
    """The newest ``max_tokens`` tokens of what is published, compressed in memory; None where nothing is.

    A chunk that is missing means that there is a newer head by now, which is fetched then. Raises as the store does.
    """
    fetched = None
    for _ in range(_MOST_ATTEMPTS):
        head = store.head(layer=layer)
        if head is None or (fetched is not None and head.chunks == fetched.head.chunks):
            break
        fetched = Fetched(store, head, newest_within(head.chunks, max_tokens))
        if not fetched.num_missing:
            break
    return fetched


def store_lacking(cache: SuffixCache, fetched: Fetched, vocab_size: int) -> int:
    """Store the sequences that ``cache`` has fewer times than ``fetched``, oldest first; how many tokens it lacked."""
    known = _counted(cache)
    num_tokens = 0
    deadline = time.monotonic() + _MOST_STORING_S
    for sequence in fetched.sequences(vocab_size):
        if known and known.get(key := hash_of(sequence), 0) > 0:
            known[key] -= 1
            continue
        cache.append_shared(sequence)
        num_tokens += len(sequence)
        if time.monotonic() > deadline:  # sealing does not keep up
            break
    if fetched.learned is not None:
        cache.learned.adopt(fetched.learned)
    return num_tokens


def segments_of(fetched: Fetched, vocab_size: int) -> list[Segment]:
    """The text as static segments in memory. O(n log n)."""
    segments: list[Segment] = []
    begun: list[Tokens] = []
    num_tokens = 0
    for sequence in fetched.sequences(vocab_size):
        if num_tokens + len(sequence) + 1 > _SEGMENT_TOKENS:
            segments.append(_segment(begun))
            begun, num_tokens = [], 0
        begun += [sequence, _END]
        num_tokens += len(sequence) + 1
    return [*segments, _segment(begun)] if begun else segments


_END = np.array([SEPARATOR], np.int32)


def _segment(pieces: list[Tokens]) -> Segment:
    return build_segment(np.concatenate(pieces), start=None, segment_id=new_segment_id(None))


def _learned(store: Store, head: Head) -> bytes | None:
    if head.learned is None:
        return None
    data = store.chunks.get(head.learned)
    return data if data is not None and learned_name(store.owner, data) == head.learned else None


def _counted(cache: SuffixCache) -> Counter[int]:
    """How often each sequence is in the cache, by its hash. O(tokens)."""
    segments, tail = cache.own_text()
    known = Counter(map(hash_of, parts_of(segments)))
    known.update(map(hash_of, parts_of_tail(tail)))
    return known


MEMBER_MS: Final = 100_000
"""Three looks of a joiner that has many namespaces open."""

DEMAND_S: Final = 600
"""A server that was just being started again hears of a demand as well."""

TOKEN_CHARACTERS: Final = 32
_TOKEN: Final = re.compile(rb"[0-9a-f]{32}")
_MOST_MEMBERS: Final = 1 << 14


class Answer(NamedTuple):
    """``token`` : of the demand that was answered last, empty for none; ``is_gone`` : whether all was forgotten."""

    token: bytes
    is_gone: bool


class Presence:
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
                ("SET", member_key(self._fingerprint, namespace, self._id), value, "PX", MEMBER_MS),
                ("GETRANGE", purge_key(self._fingerprint, namespace), 0, TOKEN_CHARACTERS),
            ],
        )
        return found if isinstance(found, bytes) and _TOKEN.fullmatch(found) else b""

    def leave(self, namespace: str) -> None:
        """It is open here no more."""
        self._client.delete(member_key(self._fingerprint, namespace, self._id))


def demand(client: redis.Redis, fingerprint: str, namespace: str) -> bytes:
    """Have all servers that have a namespace open forget it; the token of the demand."""
    token = secrets.token_hex(TOKEN_CHARACTERS // 2).encode()
    client.set(purge_key(fingerprint, namespace), token, ex=DEMAND_S)
    return token


def answers(client: redis.Redis, fingerprint: str, namespace: str) -> list[Answer]:
    """What each server said last that has the namespace open, or had it half a minute ago."""
    found: list[Answer] = []
    for key in client.scan_iter(match=member_key(fingerprint, namespace, "*"), count=1000):
        value: Any = client.getrange(key, 0, TOKEN_CHARACTERS + 8)
        if value and len(found) < _MOST_MEMBERS:
            token, _, state = value.partition(b" ")
            found.append(Answer(token, state == b"gone"))
    return found


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
