"""What a shared store holds. Others write there: all is bounded, checked, and shown escaped."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssd.sharing.connection import masters_of, server_of
from ssd.sharing.entry import (
    KEYS_VERSION,
    Entry,
    InvalidEntryError,
    head_key,
    layer_key,
    lease_key,
    namespace_key,
    num_tokens_of,
    stream_key,
    unpack_entry,
)
from ssd.sharing.published.format import MAX_HEAD_BYTES, Head, InvalidHeadError, owner_of
from ssd.sharing.stream import BEGINNING, FIELD, RawEntry, entries_after, entries_before, order

if TYPE_CHECKING:
    import redis


_LONGEST = 120


def shown(value: object) -> str:
    """At most 120 printable characters on one line; what cannot be printed is escaped."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text[: 2 * _LONGEST])
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def number_of(value: object) -> int | None:
    """A number a server gave, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | bytes):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None


def spelled_bytes(count: int | None) -> str:
    """A size for people."""
    if count is None:
        return "unknown"
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def spelled_age(seconds: float | None) -> str:
    """A time that has passed, for people."""
    if seconds is None:
        return "unknown"
    for name, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {name}"
    return f"{max(seconds, 0.0):.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """``error`` : why nothing is known, empty where something is."""

    address: str
    product: str = "unknown"
    version: str = ""
    role: str = "unknown"
    memory_bytes: int | None = None
    max_memory_bytes: int | None = None
    """None or 0: no bound of its own."""
    policy: str = ""
    """What it does when it is full."""
    persistence: str = "unknown"
    error: str = ""

    def warnings(self) -> list[str]:
        """What an operator should change, a sentence each."""
        found = []
        where = f" at {self.address}" if self.address else ""
        if self.role == "slave":
            found.append(f"the server{where} is a replica, which refuses writes: name its master, or its sentinels")
        if self.max_memory_bytes and self.policy.startswith("allkeys"):
            found.append(
                f"maxmemory-policy {self.policy}{where} may drop whole namespaces when memory is short: use noeviction "
                "or volatile-lru, our logs are bounded"
            )
        if self.max_memory_bytes and self.memory_bytes and self.memory_bytes > 0.9 * self.max_memory_bytes:
            found.append(f"the server{where} uses more than 90 % of its maxmemory: it is about to refuse, or to drop")
        return found


def server_facts(address: str, server: redis.Redis) -> ServerFacts:
    """What INFO says, whatever that is; never raises but for a lost connection."""
    from redis.exceptions import ConnectionError, TimeoutError

    try:
        info: Any = server.info()
        said = {str(name): value for name, value in info.items()} if isinstance(info, dict) else {}
    except (ConnectionError, TimeoutError, OSError):
        raise
    except Exception as error:  # no rights, or nonsense
        return ServerFacts(address=address, error=shown(f"{type(error).__name__}: {error}"))
    is_valkey = "valkey_version" in said or said.get("server_name") == "valkey"
    return ServerFacts(
        address=address,
        product="Valkey" if is_valkey else "Redis" if "redis_version" in said else "unknown",
        version=shown(said.get("valkey_version" if is_valkey else "redis_version", "")),
        role=shown(said.get("role", "unknown")),
        memory_bytes=number_of(said.get("used_memory")),
        max_memory_bytes=number_of(said.get("maxmemory")),
        policy=shown(said.get("maxmemory_policy", "")),
        persistence=_persistence(said),
    )


def _persistence(said: dict[str, Any]) -> str:
    if number_of(said.get("aof_enabled")):
        return "append-only file"
    if number_of(said.get("rdb_last_save_time")) and number_of(said.get("rdb_saves")):
        return "snapshots"
    return "none seen" if "aof_enabled" in said else "unknown"


_KEY = namespace_key("0" * 32, "status")  # nobody's


@dataclass(frozen=True, slots=True)
class Right:
    """``is_given`` : None where that cannot be told."""

    command: str
    needed_for: str
    is_given: bool | None


_NEEDED: tuple[tuple[str, tuple[tuple[str | int, ...], ...]], ...] = (
    (
        "sharing",
        (
            ("XADD", _KEY, "*", "e", ""),
            ("XREAD", "COUNT", 1, "STREAMS", _KEY, "0-0"),
            ("XRANGE", _KEY, "-", "+", "COUNT", 1),
            ("XTRIM", _KEY, "MAXLEN", 1),
            ("DEL", _KEY),
            ("UNWATCH",),
            ("PING",),
        ),
    ),
    (
        "joining warm, push and pull",
        (
            ("GET", _KEY),
            ("GETRANGE", _KEY, 0, 1),
            ("SET", _KEY, ""),
            ("PEXPIRE", _KEY, 1),
            ("HGET", _KEY, "a"),
            ("HSET", _KEY, "a", ""),
            ("HDEL", _KEY, "a"),
            ("HKEYS", _KEY),
            ("HLEN", _KEY),
        ),
    ),
    (
        "API keys",
        (("HMGET", _KEY, "a"), ("HINCRBY", _KEY, "a", 1), ("HGET", _KEY, "a"), ("HSET", _KEY, "a", "")),
    ),
    ("purge and this list", (("SCAN", 0), ("XREVRANGE", _KEY, "+", "-", "COUNT", 1))),
    ("the delay in /metrics", (("TIME",),)),
)


def rights_of(client: redis.Redis) -> tuple[str, list[Right]]:
    """The user's name, and each right, of commands that none is given of. Raises a lost connection.

    A server checks rights when it queues a command of a transaction. So each is queued and the connection closed, which
    gives the transaction up.
    """
    from redis.exceptions import NoPermissionError, ResponseError

    server = server_of(client, _KEY)
    pool = server.connection_pool
    connection = pool.get_connection()
    try:
        user = _answer(connection, "ACL", "WHOAMI")
        name = "default" if isinstance(user, ResponseError) else shown(user)
        watching = _answer(connection, "WATCH", _KEY)
        begun = _answer(connection, "MULTI")
        has_begun = not isinstance(begun, Exception)
        rights = [
            Right("WATCH", "sharing", not isinstance(watching, NoPermissionError)),
            Right("MULTI", "sharing", not isinstance(begun, NoPermissionError)),
        ]
        for purpose, commands in _NEEDED:
            for command in commands:
                answer = _answer(connection, *command) if has_begun else None
                is_given = None if not has_begun else not isinstance(answer, NoPermissionError)
                rights.append(Right(str(command[0]), purpose, is_given))
        rights.insert(2, Right("EXEC", "sharing", _may_execute(server)))
        return name, rights
    finally:
        connection.disconnect()  # type: ignore[no-untyped-call]
        pool.release(connection)


def _may_execute(server: redis.Redis) -> bool | None:
    """Of a transaction that only asks for a sign of life."""
    from redis.exceptions import NoPermissionError, ResponseError

    try:
        with server.pipeline() as pipeline:
            pipeline.ping()
            pipeline.execute()
        return True
    except NoPermissionError as error:
        return False if "'exec'" in str(error).lower() else None
    except ResponseError:
        return None


def _answer(connection: Any, *command: str | int) -> Any:
    from redis.exceptions import ResponseError

    connection.send_command(*command)
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


MOST_KEYS = 20_000
_NAME = re.compile(rf"ssd:{KEYS_VERSION}:\{{([0-9a-f]{{32}}):([A-Za-z0-9_.-]{{1,64}})\}}(:[a-z0-9:]{{1,80}})?")
_SAMPLE = 64
_PAGE = 256
_ANY_TOKEN = 1 << 31
_PUSHED = b"ssd-push"


@dataclass(frozen=True, slots=True)
class HeadFacts:
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
    servers: int = 0
    """Servers that said within half a minute that they have it open, as far as they take part in purging."""
    is_being_purged: bool = False
    """Whether a demand to forget it stands."""
    error: str = ""


def namespaces_in(client: redis.Redis, *, exact: bool) -> tuple[list[NamespaceFacts], bool]:
    """Every namespace with keys, and whether these are all. Raises what the scan is answered with.

    ``exact`` : read all entries. O(keys), and a few commands for each namespace.
    """
    found: dict[tuple[str, str], list[str]] = {}
    num_keys = 0
    for key in _keys(client):
        num_keys += 1
        if match := _NAME.fullmatch(key.decode("utf-8", "replace") if isinstance(key, bytes) else ""):
            found.setdefault((match[1], match[2]), []).append(match[3] or "")
        if num_keys >= MOST_KEYS:
            break
    facts = [
        dataclasses.replace(
            _facts(client, *names, exact=exact),
            servers=sum(suffix.startswith(":member:") for suffix in suffixes),
            is_being_purged=":purge" in suffixes,
        )
        for names, suffixes in sorted(found.items())
    ]
    return facts, num_keys < MOST_KEYS


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

    from ssd.sharing.connection import server_of

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
