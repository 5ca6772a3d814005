"""``ssd-cache redis-status``: the whole of a shared store as one report, for people and for programs.

Others write there: all is bounded, checked, and shown escaped.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cache_builder.commands.options import add_redis_argument, redis_url_of
from cache_builder.commands.push import REPLICA_ID as PUSHED
from ssd.errors import StoreUnavailable
from ssd.sharing.connection import address_of, connect, hide_password, masters_of, server_of
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
            yield f"  server     {_server_line(server)}"
        for space in self.namespaces:
            yield f"  namespace  {space.namespace}  (tokenizer {space.fingerprint[:8]})"
            yield from (f"             {line}" for line in _namespace_lines(space))
        if not self.namespaces:
            yield "  namespaces none"
        counted = "unknown" if self.generations is None else str(self.generations)
        noise = {True: "there", False: "none", None: "unknown"}[self.has_noise_root]
        yield f"  counters   deletions of {counted} caches counted; root of noise: {noise}"
        missing = [right for right in self.rights if right.is_given is False]
        unknown = [right for right in self.rights if right.is_given is None]
        yield f"  user       {self.user}: " + (
            "may do all that is needed" if not missing + unknown else "not all rights"
        )
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
    client = connect(url)
    try:
        servers = [server_facts(address, node) for address, node in masters_of(client)]
        user, rights = rights_of(client)
        warnings = [warning for server in servers for warning in server.warnings()]
        try:
            namespaces, is_all = namespaces_in(client, exact=exact)
            if not is_all:
                warnings.append(f"more than {MOST_KEYS:,} keys: the others were not looked at")
        except Exception as error:
            if _is_lost(error):
                raise
            namespaces = []
            warnings.append(f"namespaces cannot be listed ({shown(error)}): this needs +scan")
        return Status(
            address=address_of(url),
            servers=servers,
            namespaces=namespaces,
            warnings=warnings,
            generations=_count(lambda: client.hlen(GENERATIONS)),
            has_noise_root=None if (length := _count(lambda: client.strlen(NOISE))) is None else length > 0,
            user=user,
            rights=rights,
        )
    except Exception as error:  # a server that talks nonsense raises whatever it likes
        reason = shown(hide_password(f"{type(error).__name__}: {error}", url))
        raise StoreUnavailable(
            f"{address_of(url)} does not answer ({reason}): check the address and the user"
        ) from None
    finally:
        client.close()


def _count(ask: Any) -> int | None:
    try:
        return number_of(ask())
    except Exception as error:
        if _is_lost(error):
            raise
        return None


def _is_lost(error: Exception) -> bool:
    from redis.exceptions import RedisError, ResponseError

    return isinstance(error, RedisError | OSError) and not isinstance(error, ResponseError)


def _server_line(server: ServerFacts) -> str:
    where = f"{server.address}  " if server.address else ""
    if server.error:
        return f"{where}unknown: {server.error}"
    limit = spelled_bytes(server.max_memory_bytes) if server.max_memory_bytes else "no limit"
    memory = f"memory {spelled_bytes(server.memory_bytes)} of {limit}, {server.policy or 'policy unknown'}"
    return f"{where}{server.product} {server.version}, {server.role}, {memory}, persistence: {server.persistence}"


def _namespace_lines(space: NamespaceFacts) -> Iterator[str]:
    if space.error:
        yield f"cannot be read: {space.error}"
        return
    about = "" if space.is_exact else "about "
    yield f"log        {space.entries:,} entries, {about}{space.tokens:,} tokens, {spelled_bytes(space.bytes)}"
    if space.entries:
        ages = f"oldest {spelled_age(space.oldest_age_s)} ago, newest {spelled_age(space.newest_age_s)} ago"
        yield f"           {ages}, last written by {space.last_writer or 'nobody known'}"
    if space.invalid_entries:
        yield f"           {space.invalid_entries:,} of the entries read are none of ours"


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


_KEY = stream_key("0" * 32, "status")  # nobody's


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
    ("coupled noise", (("GETRANGE", _KEY, 0, 1), ("SET", _KEY, ""))),
    (
        "API keys",
        (("HMGET", _KEY, "a"), ("HINCRBY", _KEY, "a", 1), ("HGET", _KEY, "a"), ("HSET", _KEY, "a", "")),
    ),
    ("pull, purge and this list", (("SCAN", 0), ("XREVRANGE", _KEY, "+", "-", "COUNT", 1))),
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
_NAME = re.compile(rf"ssd:{KEYS_VERSION}:\{{([0-9a-f]{{32}}):([A-Za-z0-9_.-]{{1,64}})\}}")
_SAMPLE = 64
_ANY_TOKEN = 1 << 31


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
        last_writer="" if last is None else "ssd-cache push" if last.replica_id == PUSHED else last.replica_id.hex(),
    )


def _entry(raw: RawEntry, key: str) -> Entry | None:
    try:
        return unpack_entry(value_of(raw), key, vocab_size=_ANY_TOKEN)
    except InvalidEntryError:
        return None


def _now(client: redis.Redis, key: str) -> float | None:
    from redis.exceptions import ResponseError

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
