"""What ``ssd-cache`` does with a store: text into it and out of it, and all of a namespace removed."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import CacheError, ConfigError, SSDError, StoreUnavailable, first_line
from ssd.retrieval.directory import LEARNED_NAME, remove_directory
from ssd.retrieval.files import check_namespace, write_file
from ssd.retrieval.prefixes import split_sequence
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.segment import Segment, Tokens
from ssd.retrieval.static import StaticWriter, load_static_directory
from ssd.sharing.connection import address_of, connect, hide_password
from ssd.sharing.entry import (
    LEAD_IN_TOKENS,
    MAX_ENTRY_TOKENS,
    Entry,
    all_keys,
    heartbeat_key,
    namespace_key,
    pack_entry,
    purge_key,
    stream_key,
)
from ssd.sharing.published.format import MAX_CHUNKS, ChunkRef, Head, cut, name_of, newest_within, pack_chunk, parts_of
from ssd.sharing.published.joiner import MAX_LAYER_TOKENS, fetch
from ssd.sharing.published.published import HEARTBEAT_MS, TOKEN_CHARACTERS, Answer
from ssd.sharing.published.store import Place, Store, open_place, store_at
from ssd.sharing.redis_log import DEFAULT_MAX_TOKENS, max_entries_of
from ssd.sharing.stream import append

if TYPE_CHECKING:
    import redis


_ANY_ID: Final = 1 << 31
_EVERYTHING: Final = 1 << 26  # more than servers publish or search

ANSWER_S: Final = HEARTBEAT_MS / 1000 + 10
"""By then a server has answered, or is gone and its key with it."""

_LOOK_S: Final = 0.5
DEMAND_S: Final = 600
"""A server that was just being started again hears of a demand as well."""

_MOST_MEMBERS: Final = 1 << 14
_ROUNDS: Final = 3  # what was on its way when all was removed

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
            if client is None and place is None:
                raise ConfigError("no store is named: give --redis URL or --store URL")
            yield store_at(client, place, fingerprint, namespace)
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
        store.replace_layer(head.to_bytes())
        if head.names <= store.names():  # none was taken for one that nobody names, before somebody did
            break
        progress = None
    if former is not None:
        store.remove(former.names - head.names - (published.names if published else frozenset()))
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
    there = store.names()
    sizes: dict[bytes, int] = {}
    chunks: list[ChunkRef] = []
    num_sequences = num_sent = 0
    for sequences in cut(parts_of(segments)):
        name = name_of(store.owner, sequences)
        if name not in sizes:
            data = pack_chunk(store.owner, sequences)
            sizes[name] = len(data)
            if name not in there:
                store.put(name, data)
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
    from ssd.retrieval.files import check_fingerprint
    from ssd.sharing.entry import namespace_key

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """``num_removed`` : keys, objects and files. ``left`` : what is there still, a line each."""

    num_removed: int
    num_servers: int
    left: tuple[str, ...]


def purge_redis(client: redis.Redis, fingerprint: str, namespace: str, *, wait_s: float = ANSWER_S) -> Purged:
    """Have servers forget a namespace, then remove its keys. Waits ``wait_s`` at most; raises what redis-py raises."""
    token = demand(client, fingerprint, namespace)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if all(answer.token == token for answer in answers(client, fingerprint, namespace)):
            break
        time.sleep(_LOOK_S)
    said = answers(client, fingerprint, namespace)
    num_removed = 0
    for _ in range(_ROUNDS):
        num_removed += sum(_delete(client, key) for key in all_keys(fingerprint, namespace))
        time.sleep(_LOOK_S)
    known = {purge_key(fingerprint, namespace).encode()}
    members = namespace_key(fingerprint, namespace).encode() + b":member:"
    left = [
        f"key {key.decode('utf-8', 'replace')}"
        for key in client.scan_iter(match=namespace_key(fingerprint, namespace) + "*", count=1000)
        if key not in known and not key.startswith(members)
    ]
    return Purged(num_removed=num_removed, num_servers=len(said), left=(*_unmoved(said, token), *left))


def purge_store(place: Place, fingerprint: str, namespace: str) -> Purged:
    """Remove the objects of a namespace. Raises what the store raises."""
    store = store_at(None, place, fingerprint, namespace)
    num_removed = store.clear()
    try:
        left = place.files.find(f"{place.path}/{fingerprint}/{namespace}")
    except FileNotFoundError:
        left = []
    return Purged(num_removed=num_removed, num_servers=0, left=tuple(f"object {path}" for path in left))


def purge_directories(directories: Sequence[Path], namespace: str) -> Purged:
    """Remove a namespace from cache directories; one that a server writes is left and said to be. Never raises."""
    num_removed, left = 0, []
    for directory in directories:
        path = directory / namespace
        num_before = _num_files(path)
        try:
            remove_directory(path)
        except (OSError, CacheError) as error:
            left.append(f"{path}: {error}")
        found = _num_files(path)
        num_removed += num_before - found
        if found and not (left and left[-1].startswith(f"{path}:")):
            left.append(f"{path}: {found} files that are not ours")
    return Purged(num_removed=num_removed, num_servers=0, left=tuple(left))


def _unmoved(said: Sequence[Answer], token: bytes) -> list[str]:
    silent = sum(answer.token != token for answer in said)
    kept = sum(answer.token == token and not answer.is_gone for answer in said)
    lines = []
    if silent:
        lines.append(f"{silent} servers have it open and have not answered")
    if kept:
        lines.append(f"{kept} servers keep it, as it is their --namespace: stop them, then purge again")
    return lines


def _delete(client: redis.Redis, key: str) -> int:
    count: Any = client.delete(key)
    return int(count)


def _num_files(path: Path) -> int:
    return sum(1 for _ in path.iterdir()) if path.is_dir() else 0


_BATCH = 64
_REPLICA_ID = b"ssd-push"  # never a running replica's, which are random


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What was written, and what the log's bound left out."""

    num_sequences: int
    num_tokens: int
    num_entries: int
    num_left_out_sequences: int
    num_left_out_tokens: int


def push_segments(
    directory: Path,
    url: str,
    namespace: str,
    *,
    fingerprint: str,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> PushResult:
    """Write the sequences of ``directory`` to the stream of ``namespace``, the newest ones if not all fit.

    ``fingerprint`` : the tokenizer's, as the directory's manifest has it. ``max_tokens`` : the log's bound, the same as
    the replicas'. ``progress`` : called with the tokens of each batch. An entry's sequence id is a hash of its place
    and its tokens, so a replica that still knows a push stores nothing when it is repeated. O(tokens), in memory of a
    few blocks and the longest sequence.

    Raises CacheError: SegmentCorrupt, FormatVersion, TokenizerMismatch, and StoreUnavailable for both ends.
    """
    check_namespace(namespace)
    if max_tokens < MAX_ENTRY_TOKENS:
        raise ConfigError(f"max_tokens must be at least {MAX_ENTRY_TOKENS}, one full entry, got {max_tokens}")
    segments = load_static_directory(directory, fingerprint=fingerprint)
    lengths = np.fromiter(map(len, sequences_of(segments)), np.int64)
    first = _first_that_fits(lengths, max_tokens)
    client = connect(url)
    key = stream_key(fingerprint, namespace)
    num_entries = num_written = 0
    try:
        batch: list[bytes] = []
        num_batch_tokens = 0
        for sequence in itertools.islice(sequences_of(segments), first, None):
            for part in split_sequence(sequence, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS):
                batch.append(pack_entry(Entry(_REPLICA_ID, _sequence_id(num_entries, part), part), key))
                num_batch_tokens += len(part)
                num_entries += 1
                if len(batch) == _BATCH:
                    _write(client, key, batch, max_tokens)
                    num_written = num_entries
                    if progress is not None:
                        progress(num_batch_tokens)
                    batch, num_batch_tokens = [], 0
        _write(client, key, batch, max_tokens)
        if progress is not None:
            progress(num_batch_tokens)
    except Exception as error:
        from redis.exceptions import RedisError

        if not isinstance(error, RedisError | OSError):
            raise
        reason = hide_password(f"{type(error).__name__}: {error}", url)
        raise StoreUnavailable(
            f"{address_of(url)} did not take the push: {_extent(num_written)} ({reason}). Check the address, the "
            "user's rights (+xadd +watch +multi +exec +del) and maxmemory, then push again: what is there already "
            "is not stored twice"
        ) from None
    finally:
        client.close()
    return PushResult(
        num_sequences=len(lengths) - first,
        num_tokens=int(lengths[first:].sum()),
        num_entries=num_entries,
        num_left_out_sequences=first,
        num_left_out_tokens=int(lengths[:first].sum()),
    )


def _first_that_fits(lengths: npt.NDArray[np.int64], max_tokens: int) -> int:
    """Index of the first sequence so that it and all later ones hold at most ``max_tokens`` tokens."""
    return len(lengths) - int(np.searchsorted(np.cumsum(lengths[::-1]), max_tokens, side="right"))


def _extent(num_written: int) -> str:
    """What is known to be there; of the entries that were on their way when it failed any may be."""
    return f"it failed after {num_written} entries" if num_written else "it failed at the first entries"


def _sequence_id(number: int, tokens: Tokens) -> bytes:
    return xxhash.xxh3_128_digest(tokens.tobytes(), seed=number)


def _write(client: redis.Redis, key: str, batch: list[bytes], max_tokens: int) -> None:
    if batch:
        for refusal in append(client, key, batch, max_entries=max_entries_of(max_tokens)):
            if refusal is not None:
                raise refusal


def demand(client: redis.Redis, fingerprint: str, namespace: str) -> bytes:
    """Have all servers that have a namespace open forget it; the token of the demand."""
    token = secrets.token_hex(TOKEN_CHARACTERS // 2).encode()
    client.set(purge_key(fingerprint, namespace), token, ex=DEMAND_S)
    return token


def answers(client: redis.Redis, fingerprint: str, namespace: str) -> list[Answer]:
    """What each server said last that has the namespace open, or had it half a minute ago."""
    found: list[Answer] = []
    for key in client.scan_iter(match=heartbeat_key(fingerprint, namespace, "*"), count=1000):
        value: Any = client.getrange(key, 0, TOKEN_CHARACTERS + 8)
        if value and len(found) < _MOST_MEMBERS:
            token, _, state = value.partition(b" ")
            found.append(Answer(token, state == b"gone"))
    return found
