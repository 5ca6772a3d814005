"""What the shared store holds of each namespace. Others write there: all is bounded, checked, and shown escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cache_builder.shared.text import number_of, shown
from ssd.sharing.append import FIELD
from ssd.sharing.entry import Entry, InvalidEntryError, num_tokens_of, unpack_entry
from ssd.sharing.keys import KEYS_VERSION, head_key, layer_key, lease_key, stream_key
from ssd.sharing.nodes import masters_of
from ssd.sharing.pages import BEGINNING, RawEntry, entries_after, entries_before, order
from ssd.sharing.published.chunk import owner_of
from ssd.sharing.published.head import MAX_HEAD_BYTES, Head, InvalidHeadError

if TYPE_CHECKING:
    import redis

MOST_KEYS = 20_000
_NAME = re.compile(rf"ssd:{KEYS_VERSION}:\{{([0-9a-f]{{32}}):([A-Za-z0-9_.-]{{1,64}})\}}(?::[a-z]+)?")
_SAMPLE = 64
_PAGE = 256
_ANY_TOKEN = 1 << 31
_PUSHED = b"ssd-push"


class HeadFacts(NamedTuple):
    """``about`` : what its writer says of itself."""

    tokens: int
    bytes: int
    chunks: int
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFacts:
    """``error`` : why the rest is not known. Ages in seconds by the server's clock."""

    fingerprint: str
    namespace: str
    entries: int = 0
    tokens: int = 0
    is_exact: bool = True
    """Whether all entries were read for ``tokens``, not some of the oldest and newest."""
    invalid_entries: int = 0
    """Of the entries read."""
    bytes: int | None = None
    oldest_age_s: float | None = None
    newest_age_s: float | None = None
    last_writer: str = ""
    """Its replica id, another one for each opening; pushed text has none."""
    published: HeadFacts | None = None
    pushed: HeadFacts | None = None
    lease_ms: int | None = None
    """For how long somebody holds the right to publish."""
    error: str = ""


def namespaces_in(client: redis.Redis, *, exact: bool) -> tuple[list[NamespaceFacts], bool]:
    """Every namespace with keys, and whether these are all. Raises what the scan is answered with.

    ``exact`` : read all entries. O(keys), and a few commands for each namespace.
    """
    found: set[tuple[str, str]] = set()
    num_keys = 0
    for key in _keys(client):
        num_keys += 1
        if match := _NAME.fullmatch(key.decode("utf-8", "replace") if isinstance(key, bytes) else ""):
            found.add((match[1], match[2]))
        if num_keys >= MOST_KEYS:
            break
    return [_facts(client, *names, exact=exact) for names in sorted(found)], num_keys < MOST_KEYS


def _keys(client: redis.Redis) -> Iterator[Any]:
    for _, node in masters_of(client):
        yield from node.scan_iter(match=f"ssd:{KEYS_VERSION}:{{*", count=1000)


def _facts(client: redis.Redis, fingerprint: str, namespace: str, *, exact: bool) -> NamespaceFacts:
    from redis.exceptions import ConnectionError, TimeoutError

    try:
        return _read(client, fingerprint, namespace, exact=exact)
    except (ConnectionError, TimeoutError, OSError):
        raise
    except Exception as error:  # no rights, a key of another kind, nonsense
        reason = shown(f"{type(error).__name__}: {error}")
        return NamespaceFacts(fingerprint=fingerprint, namespace=namespace, error=reason)


def _read(client: redis.Redis, fingerprint: str, namespace: str, *, exact: bool) -> NamespaceFacts:
    key = stream_key(fingerprint, namespace)
    num_entries = number_of(client.xlen(key)) or 0
    newest = entries_before(client, key, None, _SAMPLE).entries
    read: Iterable[RawEntry] = newest[::-1]
    if exact:
        read = _all_entries(client, key)
    elif num_entries > _SAMPLE:
        read = entries_after(client, key, BEGINNING, _SAMPLE).entries + newest[::-1]
    num_tokens = num_invalid = num_read = 0
    oldest_id = None
    for raw in read:
        oldest_id = oldest_id or raw[0]
        num_read += 1
        num_tokens += num_tokens_of(_data(raw))
        num_invalid += _entry(raw, key) is None
    is_exact = exact or num_read >= num_entries
    last = _entry(newest[0], key) if newest else None
    now = _now(client, key)
    return NamespaceFacts(
        fingerprint=fingerprint,
        namespace=namespace,
        entries=num_entries,
        tokens=num_tokens if is_exact else round(num_tokens / max(num_read, 1) * num_entries),
        is_exact=is_exact,
        invalid_entries=num_invalid,
        bytes=_weight(client, key),
        oldest_age_s=_age(now, oldest_id),
        newest_age_s=_age(now, newest[0][0] if newest else None),
        last_writer="" if last is None else "ssd-cache push" if last.replica_id == _PUSHED else last.replica_id.hex(),
        published=_head(client, head_key(fingerprint, namespace), owner_of(fingerprint, namespace)),
        pushed=_head(client, layer_key(fingerprint, namespace), owner_of(fingerprint, namespace)),
        lease_ms=_lease(client, lease_key(fingerprint, namespace)),
    )


def _all_entries(client: redis.Redis, key: str) -> Iterator[RawEntry]:
    last, count = BEGINNING, _PAGE
    while True:
        page = entries_after(client, key, last, count)
        entries = page.entries
        yield from entries
        if page.is_last or not entries:
            return
        last, count = entries[-1][0], 1 if page.was_cut else _PAGE


def _data(raw: RawEntry) -> bytes:
    return (raw[1] or {}).get(FIELD, b"")


def _entry(raw: RawEntry, key: str) -> Entry | None:
    try:
        return unpack_entry(_data(raw), key, vocab_size=_ANY_TOKEN)
    except InvalidEntryError:
        return None


def _now(client: redis.Redis, key: str) -> float | None:
    from redis.exceptions import ResponseError

    from ssd.sharing.nodes import server_of

    try:
        answer: Any = server_of(client, key).time()
        return int(answer[0]) + int(answer[1]) / 1e6
    except (ResponseError, TypeError, ValueError, IndexError):
        return None


def _age(now: float | None, entry_id: bytes | None) -> float | None:
    return None if now is None or entry_id is None else round(now - order(entry_id)[0] / 1000, 3)


def _weight(client: redis.Redis, key: str) -> int | None:
    from redis.exceptions import ResponseError

    try:
        return number_of(client.memory_usage(key))
    except ResponseError:
        return None


def _head(client: redis.Redis, key: str, owner: bytes) -> HeadFacts | None:
    data: Any = client.getrange(key, 0, MAX_HEAD_BYTES)
    if not isinstance(data, bytes) or not data:
        return None
    try:
        head = Head.from_bytes(data, owner=owner)
    except InvalidHeadError as error:
        return HeadFacts(0, 0, 0, f"damaged: {error}")
    about = ", ".join(f"{shown(name)} {shown(value)}" for name, value in list(head.about.items())[:8])
    return HeadFacts(head.num_tokens, head.num_bytes, len(head.chunks), about)


def _lease(client: redis.Redis, key: str) -> int | None:
    left = number_of(client.pttl(key))
    return left if left is not None and left > 0 else None
