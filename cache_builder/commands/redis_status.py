"""``ssd-cache redis-status``: report the state of the Redis server through which replicas share text.

The contents come from other programs, so all reads are bounded and checked, and all output is escaped.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from cache_builder.commands.options import add_redis_argument, escape_value, redis_client, redis_url_from_options
from cache_builder.commands.push import REPLICA_ID as PUSHED
from ssd.replication.connection import masters_of, redacted_address, server_of
from ssd.replication.entry import (
    KEYS_VERSION,
    Entry,
    InvalidEntryError,
    stream_key,
    unpack_entry,
    unverified_num_tokens,
)
from ssd.replication.redis_stream import BEGINNING, RawEntry, entries_after, id_key, newest_entries, value_of
from ssd.replication.replication_log import COUNTERS_KEY as GENERATIONS

if TYPE_CHECKING:
    import redis

_DESCRIPTION = "Show the text that replicas share through Redis, its age, and Redis settings that should be changed."
_MAX_KEYS: Final = 20_000
_NAME: Final = re.compile(rb"ssd:%d:\{([0-9a-f]{32}):([A-Za-z0-9_.-]{1,64})\}" % KEYS_VERSION)
_SAMPLE: Final = 64
_ANY_TOKEN: Final = 1 << 31

Facts = dict[str, Any]


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    add_redis_argument(command)
    command.add_argument("--json", action="store_true", help="Print one JSON line")


def run(options: argparse.Namespace) -> int:
    status = read_status(redis_url_from_options(options))
    print(json.dumps(status) if options.json else as_text(status))
    return 0


def read_status(url: str) -> Facts:
    """Read the state of a Redis server without writing to it, and return the object that ``--json`` prints.

    A value that could not be read is None or contains an "error". Ages are in seconds by the Redis server's clock.
    "generations" counts deletions of caches. Raises ConfigError for an invalid URL, and StoreUnavailable if the server
    does not answer.
    """
    with redis_client(url, lambda: "does not answer") as client:
        servers = [_server_facts(address, node) for address, node in masters_of(client)]
        warnings = [warning for server in servers for warning in _warnings(server)]
        names = _reply_or_error(lambda: _namespaces(client))
        if isinstance(names, Exception):
            warnings.append(f"namespaces cannot be listed ({escape_value(names)}): give the Redis user the right +scan")
            names = []
        return {
            "report": "redis-status",
            "address": redacted_address(url),
            "servers": servers,
            "namespaces": [_namespace_facts(client, *name) for name in names],
            "warnings": warnings,
            "generations": _number(_reply_or_error(lambda: client.hlen(GENERATIONS))),
        }


def as_text(status: Facts) -> str:
    lines = [status["address"]]
    for server in status["servers"]:
        said = server.get("error") and f"unknown: {server['error']}"
        if not said:
            limit = _format_in_units(server["max_memory_bytes"], _BYTES) if server["max_memory_bytes"] else "no limit"
            said = (
                f"{server['product']} {server['version']}, {server['role']}, memory "
                f"{_format_in_units(server['memory_bytes'], _BYTES)} of {limit}, {server['policy'] or 'policy unknown'}"
            )
        lines.append(f"  server     {server['address']}  {said}".rstrip())
    for space in status["namespaces"]:
        lines.append(f"  namespace  {space['namespace']}  (tokenizer {space['fingerprint'][:8]})")
        if "error" in space:
            lines.append(f"             cannot be read: {space['error']}")
            continue
        lines.append(
            f"             {space['entries']:,} entries, about {space['tokens']:,} tokens, "
            f"{_format_in_units(space['bytes'], _BYTES)}"
        )
        if space["entries"]:
            oldest, newest = (_format_in_units(space[key], _SECONDS) for key in ("oldest_age_s", "newest_age_s"))
            lines.append(
                f"             oldest {oldest} ago, newest {newest} ago, last written by "
                f"{', '.join(space['writers']) or 'nobody known'}"
            )
        if space["invalid_entries"]:
            lines.append(f"             {space['invalid_entries']:,} of the entries read were not written by SSD")
    if not status["namespaces"]:
        lines.append("  namespaces none")
    counted = "unknown" if status["generations"] is None else str(status["generations"])
    lines.append(f"  counters   deletions of {counted} caches counted")
    return "\n".join([*lines, *(f"  warning    {warning}" for warning in status["warnings"])])


def _reply_or_error(ask: Callable[[], Any]) -> Any:
    """Run a Redis command; return its reply, or the exception if Redis rejected it. Other errors are raised."""
    from redis.exceptions import RedisError, ResponseError

    try:
        return ask()
    except Exception as error:
        if isinstance(error, RedisError | OSError) and not isinstance(error, ResponseError):
            raise
        return error


def _server_facts(address: str, server: redis.Redis) -> Facts:
    """Return version, memory and settings from the INFO reply of a Redis server."""
    info = _reply_or_error(server.info)
    if isinstance(info, Exception):
        return {"address": address, "error": escape_value(f"{type(info).__name__}: {info}")}
    said = {str(name): value for name, value in info.items()} if isinstance(info, dict) else {}
    is_valkey = "valkey_version" in said or said.get("server_name") == "valkey"
    return {
        "address": address,
        "product": "Valkey" if is_valkey else "Redis" if "redis_version" in said else "unknown",
        "version": escape_value(said.get("valkey_version" if is_valkey else "redis_version", "")),
        "role": escape_value(said.get("role", "unknown")),
        "memory_bytes": _number(said.get("used_memory")),
        "max_memory_bytes": _number(said.get("maxmemory")),
        "policy": escape_value(said.get("maxmemory_policy", "")),
    }


def _warnings(server: Facts) -> Iterator[str]:
    """Yield one sentence for each problem of the Redis server that an operator should correct."""
    where = f" at {server['address']}" if server["address"] else ""
    if server.get("role") == "slave":
        yield f"the server{where} is a replica, which rejects writes: use the URL of its master or sentinels"
    most = server.get("max_memory_bytes")
    if most and server["policy"].startswith("allkeys"):
        yield (
            f"maxmemory-policy {server['policy']}{where} may evict whole namespaces if memory is short: use "
            "noeviction or volatile-lru, because the streams have a maximum size anyway"
        )
    if most and (server["memory_bytes"] or 0) > 0.9 * most:
        yield f"the server{where} uses more than 90 % of its maxmemory: it will soon reject writes, or evict keys"


def _namespaces(client: redis.Redis) -> list[tuple[str, str]]:
    """Return the pair of tokenizer fingerprint and name of each namespace in Redis.

    At most 20,000 keys are read, so the result may be incomplete if Redis contains more keys.
    """
    keys = (
        key for _, node in masters_of(client) for key in node.scan_iter(match=f"ssd:{KEYS_VERSION}:{{*", count=1000)
    )
    found = [_NAME.fullmatch(key) for key in islice(keys, _MAX_KEYS) if isinstance(key, bytes)]
    return sorted({(match[1].decode(), match[2].decode()) for match in found if match})


def _namespace_facts(client: redis.Redis, fingerprint: str, namespace: str) -> Facts:
    facts = _reply_or_error(lambda: _sample_stream(client, stream_key(fingerprint, namespace)))
    if isinstance(facts, Exception):
        facts = {"error": escape_value(f"{type(facts).__name__}: {facts}")}
    return {"fingerprint": fingerprint, "namespace": namespace, **facts}


def _sample_stream(client: redis.Redis, key: str) -> Facts:
    """Read the oldest and newest entries of a Redis stream, and estimate the stream's contents from these entries."""
    num_entries = _number(client.xlen(key)) or 0
    newest = newest_entries(client, key, _SAMPLE)
    oldest = entries_after(client, key, BEGINNING, _SAMPLE).entries if num_entries > _SAMPLE else []
    read = [*oldest, *newest[::-1]]
    entries = [decode_any_entry(raw, key) for raw in read]
    writers = {entry.replica_id for entry in entries[len(oldest) :] if entry is not None}
    clock = _reply_or_error(server_of(client, key).time)

    def age(raw: RawEntry) -> float | None:
        if not isinstance(clock, tuple):
            return None
        return float(round(clock[0] + clock[1] / 1e6 - id_key(raw[0])[0] / 1000, 3))

    return {
        "entries": num_entries,
        "tokens": round(sum(unverified_num_tokens(value_of(raw)) for raw in read) / max(len(read), 1) * num_entries),
        "invalid_entries": entries.count(None),
        "bytes": _number(_reply_or_error(lambda: client.memory_usage(key))),
        "oldest_age_s": age(read[0]) if read else None,
        "newest_age_s": age(read[-1]) if read else None,
        "writers": sorted("ssd-cache push" if each == PUSHED else each.hex() for each in writers),
    }


def decode_any_entry(raw: RawEntry, key: str) -> Entry | None:
    """Decode an entry of a Redis stream, whatever tokenizer its text has; None if SSD did not write the entry."""
    try:
        return unpack_entry(value_of(raw), key, vocab_size=_ANY_TOKEN)
    except InvalidEntryError:
        return None


def _number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str | bytes):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None


_BYTES: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_SECONDS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def _format_in_units(value: float | None, units: tuple[tuple[float, str], ...]) -> str:
    if value is None:
        return "unknown"
    size, name = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{max(value, 0) / size:.1f} {name}"
