"""``ssd-cache redis-status``: the whole of a shared store as one report, for people and for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cache_builder.commands.options import add_redis_argument, redis_url_of
from cache_builder.shared import (
    MOST_KEYS,
    NamespaceFacts,
    Right,
    ServerFacts,
    namespaces_in,
    number_of,
    rights_of,
    server_facts,
    shown,
    spelled_age,
    spelled_bytes,
)
from ssd.errors import StoreUnavailable
from ssd.sharing.connection import address_of, connect, hide_password, masters_of
from ssd.sharing.noise_root import KEY as NOISE
from ssd.sharing.redis_log import COUNTERS_KEY as GENERATIONS

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
    for name, head in (("published", space.published), ("pushed", space.pushed)):
        if head is not None:
            size = f"{head.tokens:,} tokens, {head.chunks:,} chunks, {spelled_bytes(head.bytes)}"
            yield f"{name:<10} {size}" + (f"; {head.about}" if head.about else "")
    if space.servers:
        yield f"servers    {space.servers} have it open"
    if space.is_being_purged:
        yield "purge      demanded: servers that have it open forget it"
    if space.lease_ms is not None:
        yield f"lease      held, for {space.lease_ms / 1000:.1f} s unless it is renewed"
