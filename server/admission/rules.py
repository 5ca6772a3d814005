"""Who the tenants are and what each may use: an operator's TOML, read whole, and refused whole in one line."""

from __future__ import annotations

import hashlib
import logging
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from ssd.errors import ConfigError, shown

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """What one tenant may use; None leaves it to the server's own limits."""

    max_running: int | None = None
    """Slots that its requests hold at once; further ones wait for their turn."""

    max_waiting: int | None = None
    """Requests beyond its slots; more are answered 429."""

    requests_per_minute: int | None = None
    """HTTP requests for text; unused ones are kept for a minute."""

    tokens_per_minute: int | None = None
    """Prompt and output tokens; unused ones are kept for a minute."""

    cache_tokens: int | None = None
    """Capacity of its cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One of those that share a server.

    ``name`` : what logs and metrics call it. ``digests`` : of its keys, see ``digest_of``. ``seed`` : what the name of
    its cache is derived from; as long as it stays the same, so does the cache. ``reads_shared`` : its drafts come from
    the shared namespace too. ``is_operator`` : its requests teach the shared namespace, and it may manage the others.
    """

    name: str
    seed: str
    digests: frozenset[str]
    quotas: Quotas = field(default_factory=Quotas)
    reads_shared: bool = False
    is_operator: bool = False


EVERYBODY: Final = Tenant(name="", seed="", digests=frozenset())
"""Whoever comes in where there are no keys."""


def digest_of(key: str) -> str:
    """SHA-256 of a key, 64 hexadecimal characters: what a file may hold in place of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def tenants_of_keys(keys: Iterable[str], defaults: Tenant, name_of: dict[str, str]) -> list[Tenant]:
    """Each key a tenant of its own. ``defaults`` : what all of them may; ``name_of`` : names by digest."""
    return [
        Tenant(
            name=name_of[digest],
            seed=f"key:{digest}",
            digests=frozenset({digest}),
            quotas=defaults.quotas,
            reads_shared=defaults.reads_shared,
        )
        for digest in dict.fromkeys(map(digest_of, keys))
    ]


TENANTS_OPTION: Final = "--tenants"
SECRET_OPTION: Final = "--secret-file"
SECRET_VARIABLE: Final = "SSD_SECRET"
_DEFAULTS: Final = "defaults"
_TENANTS: Final = "tenants"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MOST_BYTES: Final = 1 << 20
_MOST: Final = (1 << 31) - 1
_QUOTAS: Final = tuple(field.name for field in fields(Quotas))
_LEAST: Final = {"max_waiting": 0, "cache_tokens": 4096}
_FLAGS: Final = ("reads_shared", "operator")


@dataclass(frozen=True, slots=True)
class RulesFile:
    """What a file says. ``defaults`` : of its tenants, and of keys that are given elsewhere."""

    defaults: Tenant
    tenants: tuple[Tenant, ...]


NO_FILE: Final = RulesFile(Tenant(name=_DEFAULTS, seed="", digests=frozenset()), ())


def read_rules(path: Path) -> RulesFile:
    """The rules of a file. Warns where others than its owner may read it.

    Raises ConfigError, which never shows a key.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
            status = path.stat()
    except OSError as error:
        raise ConfigError(f"{TENANTS_OPTION} {path} cannot be read: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{TENANTS_OPTION} {path} is longer than {_MOST_BYTES} bytes")
    rules = parse_rules(content, f"{TENANTS_OPTION} {path}")
    if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        log.warning("%s %s may be read by other users: chmod 600 it", TENANTS_OPTION, path)
    return rules


def parse_rules(content: bytes, source: str) -> RulesFile:
    """The rules of a file's bytes; ``source`` : what it is called in errors. Raises ConfigError."""
    try:
        table = tomllib.loads(content.decode())
    except RecursionError:
        raise ConfigError(f"{source} is nested too deep") from None
    except ValueError as error:  # of TOML, or of UTF-8, whose message quotes bytes
        place = re.search(r"\(at [^)]*\)", str(error))
        raise ConfigError(f"{source} is not TOML{f' {place.group()}' if place else ''}") from None
    _refuse_unknown(table, (_DEFAULTS, _TENANTS), source)
    defaults = _table(table.get(_DEFAULTS, {}), f"{source}: {_DEFAULTS}")
    _refuse_unknown(defaults, (*_QUOTAS, "reads_shared"), f"{source}: {_DEFAULTS}")
    base = _tenant(_DEFAULTS, {**defaults, "keys": []}, f"{source}: {_DEFAULTS}", NO_FILE.defaults)
    named = _table(table.get(_TENANTS, {}), f"{source}: {_TENANTS}")
    found: list[Tenant] = []
    owners: dict[str, str] = {}
    for name, fields_of_it in named.items():
        where = f"{source}: tenant {shown(name)}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: take 1 to 64 characters of A-Z a-z 0-9 _ . - and no leading dot for its name")
        found.append(tenant := _tenant(name, _table(fields_of_it, where), where, base))
        for digest in tenant.digests:
            if (owner := owners.setdefault(digest, name)) != name:
                raise ConfigError(f"{where}: keys: one of them is a key of tenant {shown(owner)} already")
    return RulesFile(base, tuple(found))


def _tenant(name: str, table: Mapping[str, Any], where: str, base: Tenant) -> Tenant:
    _refuse_unknown(table, ("keys", *_FLAGS, *_QUOTAS), where)
    quotas = {quota: _number(table, quota, where, getattr(base.quotas, quota)) for quota in _QUOTAS}
    flags = {flag: table.get(flag, False) for flag in _FLAGS}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {flag} must be true or false, got {shown(value)}")
    return Tenant(
        name=name,
        seed=f"tenant:{name}",
        digests=_digests(table, where),
        quotas=Quotas(**quotas),
        reads_shared=flags["reads_shared"] if "reads_shared" in table else base.reads_shared,
        is_operator=flags["operator"],
    )


def _digests(table: Mapping[str, Any], where: str) -> frozenset[str]:
    keys = table.get("keys")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f'{where}: keys must be a list of strings, keys or "sha256:" and their digest')
    found = set()
    for number, key in enumerate(keys, 1):
        if digest := _DIGEST.fullmatch(key):
            found.add(digest.group(1).lower())
        elif key.startswith("sha256:"):
            raise ConfigError(f"{where}: keys: entry {number} must be sha256: and 64 hexadecimal digits")
        elif _KEY.fullmatch(key):
            found.add(digest_of(key))
        else:
            raise ConfigError(f"{where}: keys: entry {number} must be printable ASCII without spaces around it")
    return frozenset(found)


def _number(table: Mapping[str, Any], name: str, where: str, default: int | None) -> int | None:
    value, least = table.get(name, default), _LEAST.get(name, 1)
    if name in table and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST):
        raise ConfigError(f"{where}: {name} must be a whole number within {least}..{_MOST}, got {shown(value)}")
    number: int | None = value
    return number


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a table")
    return value


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"{where}: {shown(name)} is not known: take {', '.join(known)}")
