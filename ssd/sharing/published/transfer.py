"""Directories into a store and out of it: text for servers that run, and the text of servers that run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ssd.errors import ConfigError, SSDError, StoreUnavailable, first_line
from ssd.retrieval.directory import LEARNED_NAME
from ssd.retrieval.files import write_file
from ssd.retrieval.names import check_namespace
from ssd.retrieval.segment import Segment
from ssd.retrieval.static import StaticWriter, load_static_directory
from ssd.sharing.connection import address_of, connect, hide_password
from ssd.sharing.published.chunk import name_of, pack_chunk
from ssd.sharing.published.chunking import cut, parts_of
from ssd.sharing.published.head import MAX_CHUNKS, ChunkRef, Head, newest_within
from ssd.sharing.published.redis_store import redis_store
from ssd.sharing.published.store import Store
from ssd.sharing.published.taking import MAX_LAYER_TOKENS, fetch
from ssd.sharing.published.url_store import UrlChunks, open_place, url_store

if TYPE_CHECKING:
    import redis

_ANY_ID: Final = 1 << 31
_EVERYTHING: Final = 1 << 26  # more than servers publish or search

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What servers search now, what of it was sent, and what was too much."""

    num_tokens: int
    num_sequences: int
    num_sent_bytes: int
    num_left_out_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What was written. ``num_missing`` : chunks that were not there, or damaged."""

    num_tokens: int
    num_sequences: int
    num_missing: int


@contextmanager
def open_store(redis_url: str | None, store_url: str | None, fingerprint: str, namespace: str) -> Iterator[Store]:
    """Where a namespace is published: heads in Redis where one is given, chunks at ``store_url`` where one is given.

    Raises ConfigError; what fails inside becomes StoreUnavailable, without passwords.
    """
    check_namespace(namespace)
    place = None if store_url is None else open_place(store_url)
    client: redis.Redis | None = None if redis_url is None else connect(redis_url)
    with store_errors(redis_url, store_url):
        try:
            if client is None:
                if place is None:
                    raise ConfigError("no store is named: give --redis URL or --store URL")
                yield url_store(place, fingerprint, namespace)
            else:
                store = redis_store(client, fingerprint, namespace)
                yield store if place is None else store._replace(chunks=UrlChunks(place, fingerprint, namespace))
        finally:
            if client is not None:
                client.close()


@contextmanager
def store_errors(redis_url: str | None, store_url: str | None) -> Iterator[None]:
    """What fails inside becomes StoreUnavailable, in one line, without passwords."""
    where = address_of(redis_url) if redis_url is not None else str(store_url).partition("?")[0]
    try:
        yield
    except SSDError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        if redis_url is not None:
            reason = hide_password(reason, redis_url)
        raise StoreUnavailable(
            f"{where} did not do what was asked ({reason}): check the address, the rights and the room there"
        ) from None


def push(directory: Path, store: Store, *, fingerprint: str, progress: Progress | None = None) -> Pushed:
    """Have servers search the text of ``directory`` in place of what was pushed before; the newest if not all fits.

    Chunks that the store has are not sent again. O(tokens), in memory of a chunk. Raises CacheError, and what the store
    raises.
    """
    segments = load_static_directory(directory, fingerprint=fingerprint)
    former, published = store.head(layer=True), store.head()
    sent = 0
    while True:
        chunks, num_sequences, sent_now = _send(segments, store, progress)
        sent += sent_now
        kept = newest_within(chunks[-MAX_CHUNKS:], MAX_LAYER_TOKENS)
        head = Head(owner=store.owner, chunks=kept, about={"made": int(time.time()), "from": "push"})
        store.heads.replace_layer(head.to_bytes())
        if head.names <= store.chunks.names():  # none was taken for one that nobody names, before somebody did
            break
        progress = None
    if former is not None:
        store.chunks.remove(former.names - head.names - (published.names if published else frozenset()))
    num_all = sum(chunk.num_tokens for chunk in chunks)
    return Pushed(
        num_tokens=head.num_tokens,
        num_sequences=num_sequences,
        num_sent_bytes=sent,
        num_left_out_tokens=num_all - head.num_tokens,
    )


def _send(
    segments: Sequence[Segment], store: Store, progress: Progress | None
) -> tuple[tuple[ChunkRef, ...], int, int]:
    """All chunks of ``segments``, how many sequences they have, and the bytes that were sent."""
    there = store.chunks.names()
    sizes: dict[bytes, int] = {}
    chunks: list[ChunkRef] = []
    num_sequences = num_sent = 0
    for sequences in cut(parts_of(segments)):
        name = name_of(store.owner, sequences)
        if name not in sizes:
            data = pack_chunk(store.owner, sequences)
            sizes[name] = len(data)
            if name not in there:
                store.chunks.put(name, data)
                num_sent += len(data)
        num_tokens = sum(map(len, sequences))
        chunks.append(ChunkRef(name, num_tokens, sizes[name]))
        num_sequences += len(sequences)
        if progress is not None:
            progress(num_tokens)
    return tuple(chunks), num_sequences, num_sent


def pull(
    store: Store, directory: Path, *, fingerprint: str, namespace: str, progress: Progress | None = None
) -> Pulled:
    """Write what was pushed and what servers published into ``directory``, a cache as ``ssd-cache build`` makes one.

    Text since the last publication, of a minute at most, is in the log alone. O(n log n), in memory of the compressed
    text and a segment. Raises StoreUnavailable where nothing is published, CacheError and OSError.
    """
    layer, head = fetch(store, _EVERYTHING, layer=True), fetch(store, _EVERYTHING)
    if layer is None and head is None:
        raise StoreUnavailable(f"nothing is published of namespace {namespace}: is it the servers' --namespace?")
    num_tokens = num_sequences = 0
    with StaticWriter(directory, fingerprint=fingerprint, namespace=namespace) as writer:
        for fetched in (layer, head):
            for sequence in () if fetched is None else fetched.sequences(_ANY_ID):
                writer.append(sequence)
                num_tokens += len(sequence)
                num_sequences += 1
                if progress is not None:
                    progress(len(sequence))
    if head is not None and head.learned is not None:
        write_file(directory / LEARNED_NAME, [head.learned], durable=True)
    missing = sum(fetched.num_missing for fetched in (layer, head) if fetched is not None)
    return Pulled(num_tokens=num_tokens, num_sequences=num_sequences, num_missing=missing)


def find_fingerprints(redis_url: str | None, store_url: str | None, namespace: str) -> list[str]:
    """The tokenizers, by their fingerprints, of which there is something of a namespace. Raises as ``open_store``."""
    from ssd.retrieval.names import check_fingerprint
    from ssd.sharing.keys import namespace_key

    check_namespace(namespace)
    found: set[str] = set()
    if redis_url is not None:
        client = connect(redis_url)
        try:
            pattern = namespace_key("?" * 32, namespace)
            for key in client.scan_iter(match=pattern + "*", count=1000):
                found.add(key.partition(b"{")[2].partition(b":")[0].decode("ascii", "replace"))
        except Exception as error:
            reason = hide_password(f"{type(error).__name__}: {first_line(error)}", redis_url)
            raise StoreUnavailable(f"{address_of(redis_url)} cannot be looked at ({reason})") from None
        finally:
            client.close()
    if store_url is not None:
        place = open_place(store_url)
        try:
            paths = place.files.ls(place.path, detail=False)
        except OSError:
            paths = []
        found |= {name for path in paths if place.files.exists(f"{path}/{namespace}") and (name := _last(path))}

    def is_one(text: str) -> bool:
        try:
            return bool(check_fingerprint(text))
        except ConfigError:
            return False

    return sorted(filter(is_one, found))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
