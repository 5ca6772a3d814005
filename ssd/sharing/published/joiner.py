"""Brings the open namespaces what others published: all of it where a namespace begins, what is lacking after a gap."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ssd.retrieval.files import new_segment_id
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens
from ssd.retrieval.suffix_array import build_segment
from ssd.retrieval.suffix_cache import SuffixCache
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
from ssd.sharing.published.publisher import Namespace, learned_name
from ssd.sharing.published.store import Store
from ssd.sharing.reader import LogReader

log = logging.getLogger(__name__)

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
        self.was_emptied = False
        """Whether the store was emptied meanwhile: somebody publishes anew."""
        self.learned = _learned(store, head)
        self._owner = store.owner
        self._chunks: list[tuple[bytes, bytes]] = []
        for chunk in chunks:
            data = store.get(chunk.name)
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

    A chunk that is missing means that there is a newer head by now, or the same again where the store was emptied and
    filled, which is fetched then. Raises as the store does.
    """
    fetched = None
    for _ in range(_MOST_ATTEMPTS):
        head = store.head(layer=layer)
        if head is None and fetched is not None:
            fetched.was_emptied = True
        if head is None:
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
    data = store.get(head.learned)
    return data if data is not None and learned_name(store.owner, data) == head.learned else None


def _counted(cache: SuffixCache) -> Counter[int]:
    """How often each sequence is in the cache, by its hash. O(tokens)."""
    segments, tail = cache.own_text()
    known = Counter(map(hash_of, parts_of(segments)))
    known.update(map(hash_of, parts_of_tail(tail)))
    return known


class Joiner:
    """The log of a namespace that begins here is read once its published text is there, or after 5 s.

    Text is fetched before anything waits for it; then the log rests while what is lacking is stored, and is read on
    from where the text ends. The mark is kept before the text: what a crash loses in between is not stored twice.
    """

    def __init__(self, reader: LogReader | None, *, vocab_size: int) -> None:
        """``reader`` : None where there is no log."""
        self.num_taken_tokens = 0
        self._reader = reader
        self._vocab_size = vocab_size

    def look(self, each: Namespace) -> None:
        """Take what a namespace lacks, where it begins or may have missed something, and the layer that was pushed."""
        cache = each.cache
        if cache is None:
            return
        tags = each.store.tags()
        if (not each.is_settled and each.is_new) or each.has_gap:
            num_gaps = each.num_gaps
            if tags.head and tags.head not in (each.tag, each.published_tag):
                self._take(each, cache, tags.head)
            elif tags.head:
                each.num_gaps_closed = num_gaps
        if tags.layer != each.layer_tag:
            self.settle(each)  # sorting takes its time
            self._exchange_layer(each, cache)

    def settle(self, each: Namespace) -> None:
        """Its log may be read."""
        if not each.is_settled:
            each.is_settled = True
            if each.stream is not None and self._reader is not None:
                self._reader.resume(each.stream)

    def _take(self, each: Namespace, cache: SuffixCache, tag: bytes) -> None:
        num_gaps = each.num_gaps
        fetched = fetch(each.store, cache.capacity_tokens)
        if fetched is None:
            each.tag = tag  # of no use, whatever it is
            return
        stream, reader = each.stream, self._reader
        if stream is not None and reader is not None and not reader.suspend(stream):
            return
        try:
            self._store(each, cache, fetched)
            each.num_gaps_closed = num_gaps
            each.lacks_head = fetched.was_emptied
        finally:
            if stream is not None and reader is not None:
                stream.forget()
                stream.is_joined = True
                reader.resume(stream)

    def _store(self, each: Namespace, cache: SuffixCache, fetched: Fetched) -> None:
        began = time.monotonic()
        if fetched.head.mark is not None:
            each.cursor.join(fetched.head.mark)
            each.cursor.knows(fetched.head.recent)
            if each.stream is not None:
                each.stream.saw_before(fetched.head.recent)
            cache.set_source(each.cursor.position())
        num_tokens = store_lacking(cache, fetched, self._vocab_size)
        each.tag = b"" if fetched.was_emptied else fetched.head.tag  # what is published anew may be the same
        self.num_taken_tokens += num_tokens
        log.info(
            "namespace=%s took %d tokens that others had published, in %.1f s",
            each.name, num_tokens, time.monotonic() - began,
        )  # fmt: skip

    def _exchange_layer(self, each: Namespace, cache: SuffixCache) -> None:
        fetched = fetch(each.store, MAX_LAYER_TOKENS, layer=True)
        segments = [] if fetched is None else segments_of(fetched, self._vocab_size)
        cache.exchange_static(each.layer, segments)
        each.layer = tuple(segments)
        each.layer_tag = b"" if fetched is None else fetched.head.tag
        log.info("namespace=%s searches %d pushed tokens", each.name, sum(map(len, segments)))
