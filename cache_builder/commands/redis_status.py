"""``ssd-cache redis-status``: the whole of a shared store as one report, for people and for programs.

Others write there: all is bounded, checked, and shown escaped.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from cache_builder.commands.options import add_redis_argument, redis_client, redis_url_of, shown
from cache_builder.commands.push import REPLICA_ID as PUSHED
from ssd.sharing.connection import address_of, masters_of, server_of
from ssd.sharing.entry import KEYS_VERSION, Entry, InvalidEntryError, num_tokens_of, stream_key, unpack_entry
from ssd.sharing.noise_root import KEY as NOISE
from ssd.sharing.redis_log import COUNTERS_KEY as GENERATIONS
from ssd.sharing.stream import BEGINNING, RawEntry, all_entries, entries_after, newest_entries, order, value_of

if TYPE_CHECKING:
    import redis

_DESCRIPTION = "Look at a Redis that servers share through: what is there, and whether they may do what they need."


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    add_redis_argument(command)
    command.add_argument("--exact", action="store_true", help="read all entries, not some, to count their tokens")
    command.add_argument("--json", action="store_true", help="print one JSON line")


def run(options: argparse.Namespace) -> int:
    status = read_status(redis_url_of(options), exact=options.exact)
    print(json.dumps(status.as_json()) if options.json else status.as_text())
    return 0


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

    def warnings(self) -> Iterator[str]:
        """What an operator should change, a sentence each."""
        where = f" at {self.address}" if self.address else ""
        if self.role == "slave":
            yield f"the server{where} is a replica, which refuses writes: name its master, or its sentinels"
        if self.max_memory_bytes and self.policy.startswith("allkeys"):
            yield (
                f"maxmemory-policy {self.policy}{where} may drop whole namespaces when memory is short: use noeviction "
                "or volatile-lru, our logs are bounded"
            )
        if self.max_memory_bytes and self.memory_bytes and self.memory_bytes > 0.9 * self.max_memory_bytes:
            yield f"the server{where} uses more than 90 % of its maxmemory: it is about to refuse, or to drop"

    def line(self) -> str:
        """For people."""
        where = f"{self.address}  " if self.address else ""
        if self.error:
            return f"{where}unknown: {self.error}"
        limit = _spelled_bytes(self.max_memory_bytes) if self.max_memory_bytes else "no limit"
        memory = f"memory {_spelled_bytes(self.memory_bytes)} of {limit}, {self.policy or 'policy unknown'}"
        return f"{where}{self.product} {self.version}, {self.role}, {memory}, persistence: {self.persistence}"


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
    error: str = ""

    def lines(self) -> Iterator[str]:
        """For people."""
        if self.error:
            yield f"cannot be read: {self.error}"
            return
        about = "" if self.is_exact else "about "
        yield f"log        {self.entries:,} entries, {about}{self.tokens:,} tokens, {_spelled_bytes(self.bytes)}"
        if self.entries:
            ages = f"oldest {_spelled_age(self.oldest_age_s)} ago, newest {_spelled_age(self.newest_age_s)} ago"
            yield f"           {ages}, last written by {self.last_writer or 'nobody known'}"
        if self.invalid_entries:
            yield f"           {self.invalid_entries:,} of the entries read are none of ours"


@dataclass(frozen=True, slots=True)
class Right:
    """``is_given`` : None where that cannot be told."""

    command: str
    needed_for: str
    is_given: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``generations`` : counted deletions, None where that cannot be read; ``has_noise_root`` : never its value."""

    address: str
    servers: list[ServerFacts]
    namespaces: list[NamespaceFacts]
    warnings: list[str]
    generations: int | None
    has_noise_root: bool | None
    user: str
    rights: list[Right]

    def as_json(self) -> dict[str, Any]:
        """All of it, to be printed on one line."""
        return {"report": "redis-status", **asdict(self)}

    def as_text(self) -> str:
        """A page of lines."""
        return "\n".join([self.address, *self._lines()])

    def _lines(self) -> Iterator[str]:
        for server in self.servers:
            yield f"  server     {server.line()}"
        for space in self.namespaces:
            yield f"  namespace  {space.namespace}  (tokenizer {space.fingerprint[:8]})"
            yield from (f"             {line}" for line in space.lines())
        if not self.namespaces:
            yield "  namespaces none"
        counted = "unknown" if self.generations is None else str(self.generations)
        noise = {True: "there", False: "none", None: "unknown"}[self.has_noise_root]
        yield f"  counters   deletions of {counted} caches counted; root of noise: {noise}"
        missing = [right for right in self.rights if right.is_given is False]
        unknown = [right for right in self.rights if right.is_given is None]
        yield f"  user       {self.user}: {'not all rights' if missing + unknown else 'may do all that is needed'}"
        for right in missing:
            yield f"    missing  +{right.command.lower()} for {right.needed_for}"
        if unknown:
            yield f"    unknown  {' '.join('+' + right.command.lower() for right in unknown)}"
        for warning in self.warnings:
            yield f"  warning    {warning}"


def read_status(url: str, *, exact: bool = False) -> Status:
    """What is at ``url``. Writes nothing. ``exact`` : read all entries for their tokens.

    Raises ConfigError, and StoreUnavailable where nothing answers, or nonsense.
    """
    with redis_client(url, lambda: "does not answer") as client:
        servers = [_server_facts(address, node) for address, node in masters_of(client)]
        user, rights = _rights_of(client)
        warnings = [warning for server in servers for warning in server.warnings()]
        listed = _told(lambda: _namespaces(client))
        if isinstance(listed, Exception):
            warnings.append(f"namespaces cannot be listed ({shown(listed)}): this needs +scan")
            listed = [], True
        names, is_all = listed
        if not is_all:
            warnings.append(f"more than {_MOST_KEYS:,} keys: the others were not looked at")
        noise = _number(_told(lambda: client.strlen(NOISE)))
        return Status(
            address=address_of(url),
            servers=servers,
            namespaces=[_namespace_facts(client, *each, exact=exact) for each in names],
            warnings=warnings,
            generations=_number(_told(lambda: client.hlen(GENERATIONS))),
            has_noise_root=None if noise is None else noise > 0,
            user=user,
            rights=rights,
        )


def _told(ask: Callable[[], Any]) -> Any:
    """What is answered, or the exception for want of rights, a key of another kind or nonsense.

    Raises a lost connection.
    """
    from redis.exceptions import RedisError, ResponseError

    try:
        return ask()
    except Exception as error:
        if isinstance(error, RedisError | OSError) and not isinstance(error, ResponseError):
            raise
        return error


def _server_facts(address: str, server: redis.Redis) -> ServerFacts:
    """What INFO says, whatever that is."""
    info = _told(server.info)
    if isinstance(info, Exception):
        return ServerFacts(address=address, error=shown(f"{type(info).__name__}: {info}"))
    said = {str(name): value for name, value in info.items()} if isinstance(info, dict) else {}
    persistence = "none seen" if "aof_enabled" in said else "unknown"
    if _number(said.get("aof_enabled")):
        persistence = "append-only file"
    elif _number(said.get("rdb_last_save_time")) and _number(said.get("rdb_saves")):
        persistence = "snapshots"
    is_valkey = "valkey_version" in said or said.get("server_name") == "valkey"
    return ServerFacts(
        address=address,
        product="Valkey" if is_valkey else "Redis" if "redis_version" in said else "unknown",
        version=shown(said.get("valkey_version" if is_valkey else "redis_version", "")),
        role=shown(said.get("role", "unknown")),
        memory_bytes=_number(said.get("used_memory")),
        max_memory_bytes=_number(said.get("maxmemory")),
        policy=shown(said.get("maxmemory_policy", "")),
        persistence=persistence,
    )


_KEY: Final = stream_key("0" * 32, "status")  # nobody's

_NEEDED: Final[dict[str, tuple[tuple[str | int, ...], ...]]] = {
    "sharing": (
        ("XADD", _KEY, "*", "e", ""),
        ("XREAD", "COUNT", 1, "STREAMS", _KEY, "0-0"),
        ("XRANGE", _KEY, "-", "+", "COUNT", 1),
        ("XTRIM", _KEY, "MAXLEN", 1),
        ("DEL", _KEY),
        ("UNWATCH",),
        ("PING",),
    ),
    "coupled noise": (("GETRANGE", _KEY, 0, 1), ("SET", _KEY, "")),
    "API keys": (("HMGET", _KEY, "a"), ("HINCRBY", _KEY, "a", 1), ("HGET", _KEY, "a"), ("HSET", _KEY, "a", "")),
    "pull, purge and this list": (("SCAN", 0), ("XREVRANGE", _KEY, "+", "-", "COUNT", 1)),
    "the delay in /metrics": (("TIME",),),
}


def _rights_of(client: redis.Redis) -> tuple[str, list[Right]]:
    """The user's name, and each right, of commands that none is given of. Raises a lost connection.

    A server checks rights when it queues a command of a transaction. So each is queued and the connection closed, which
    gives the transaction up.
    """
    from redis.exceptions import NoPermissionError

    server = server_of(client, _KEY)
    pool = server.connection_pool
    connection: Any = pool.get_connection()

    def answer(*command: str | int) -> Any:
        connection.send_command(*command)
        return _told(connection.read_response)

    def may(*command: str | int) -> bool:
        return not isinstance(answer(*command), NoPermissionError)

    try:
        user = answer("ACL", "WHOAMI")
        rights = [Right("WATCH", "sharing", may("WATCH", _KEY))]
        begun = answer("MULTI")
        rights.append(Right("MULTI", "sharing", not isinstance(begun, NoPermissionError)))
        rights.append(Right("EXEC", "sharing", _may_execute(server)))
        for purpose, commands in _NEEDED.items():
            for command in commands:
                is_given = None if isinstance(begun, Exception) else may(*command)
                rights.append(Right(str(command[0]), purpose, is_given))
        return "default" if isinstance(user, Exception) else shown(user), rights
    finally:
        connection.disconnect()
        pool.release(connection)


def _may_execute(server: redis.Redis) -> bool | None:
    """Of a transaction that only asks for a sign of life."""
    from redis.exceptions import NoPermissionError

    with server.pipeline() as pipeline:
        pipeline.ping()
        answer = _told(pipeline.execute)
    if not isinstance(answer, Exception):
        return True
    return False if isinstance(answer, NoPermissionError) and "'exec'" in str(answer).lower() else None


_MOST_KEYS: Final = 20_000
_NAME: Final = re.compile(rb"ssd:%d:\{([0-9a-f]{32}):([A-Za-z0-9_.-]{1,64})\}" % KEYS_VERSION)
_SAMPLE: Final = 64
_ANY_TOKEN: Final = 1 << 31


def _namespaces(client: redis.Redis) -> tuple[list[tuple[str, str]], bool]:
    """Fingerprint and name of every namespace that has a log, and whether these are all. O(keys)."""
    keys = (
        key for _, node in masters_of(client) for key in node.scan_iter(match=f"ssd:{KEYS_VERSION}:{{*", count=1000)
    )
    found = [key for key in islice(keys, _MOST_KEYS) if isinstance(key, bytes)]
    names = {(match[1].decode(), match[2].decode()) for key in found if (match := _NAME.fullmatch(key))}
    return sorted(names), next(keys, None) is None


def _namespace_facts(client: redis.Redis, fingerprint: str, namespace: str, *, exact: bool) -> NamespaceFacts:
    facts = _told(lambda: _read(client, stream_key(fingerprint, namespace), exact=exact))
    if isinstance(facts, Exception):
        facts = {"error": shown(f"{type(facts).__name__}: {facts}")}
    return NamespaceFacts(fingerprint=fingerprint, namespace=namespace, **facts)


def _read(client: redis.Redis, key: str, *, exact: bool) -> dict[str, Any]:
    """A few commands, and all entries where ``exact``."""
    num_entries = _number(client.xlen(key)) or 0
    newest = newest_entries(client, key, _SAMPLE)
    read: Iterable[RawEntry] = newest[::-1]
    if exact:
        read = all_entries(client, key)
    elif num_entries > _SAMPLE:
        read = entries_after(client, key, BEGINNING, _SAMPLE).entries + newest[::-1]
    num_tokens = num_invalid = num_read = 0
    oldest_id = None
    for raw in read:
        oldest_id = oldest_id or raw[0]
        num_read += 1
        num_tokens += num_tokens_of(value_of(raw))
        num_invalid += _entry(raw, key) is None
    is_exact = exact or num_read >= num_entries
    last = _entry(newest[0], key) if newest else None
    clock = _told(server_of(client, key).time)

    def age(entry_id: bytes | None) -> float | None:
        if entry_id is None or not isinstance(clock, tuple):
            return None
        return float(round(clock[0] + clock[1] / 1e6 - order(entry_id)[0] / 1000, 3))

    return {
        "entries": num_entries,
        "tokens": num_tokens if is_exact else round(num_tokens / max(num_read, 1) * num_entries),
        "is_exact": is_exact,
        "invalid_entries": num_invalid,
        "bytes": _number(_told(lambda: client.memory_usage(key))),
        "oldest_age_s": age(oldest_id),
        "newest_age_s": age(newest[0][0] if newest else None),
        "last_writer": "" if last is None else "ssd-cache push" if last.replica_id == PUSHED else last.replica_id.hex(),
    }


def _entry(raw: RawEntry, key: str) -> Entry | None:
    try:
        return unpack_entry(value_of(raw), key, vocab_size=_ANY_TOKEN)
    except InvalidEntryError:
        return None


def _number(value: object) -> int | None:
    """A number a server gave, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | bytes):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None


def _spelled_bytes(count: int | None) -> str:
    if count is None:
        return "unknown"
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _spelled_age(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for name, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {name}"
    return f"{max(seconds, 0.0):.1f} s"
