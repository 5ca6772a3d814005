"""Parse the operator's TOML file of tenants and quotas. A file with any error is rejected as a whole."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ssd.errors import ConfigError, quote_value

log = logging.getLogger(__name__)


_MOST: Final = (1 << 31) - 1
_Count = Annotated[int | None, Field(ge=1, le=_MOST)]


class Quotas(BaseModel):
    """The limits of one tenant. None means that only the server's own limits apply."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    max_running: _Count = None
    """Maximum number of slots that the tenant's requests use at once; further requests wait."""
    max_waiting: Annotated[int | None, Field(ge=0, le=_MOST)] = None
    """Maximum number of the tenant's waiting requests; further requests are rejected with 429."""
    requests_per_minute: _Count = None
    """Maximum number of generation requests per minute; unused requests accumulate for up to a minute."""
    tokens_per_minute: _Count = None
    """Maximum number of prompt and output tokens per minute; unused tokens accumulate for up to a minute."""
    cache_tokens: Annotated[int | None, Field(ge=8192, le=_MOST)] = None
    """Capacity of the tenant's cache in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A client or a group of clients of a shared server, with its own API keys, quotas and cache.

    Attributes:
        seed: The text from which the name of the tenant's cache is derived; a tenant that is renamed keeps its cache.
        digests: The SHA-256 digests of the tenant's API keys, see `digest_of`.
        reads_shared: Whether drafts also come from the shared cache, which the operator fills.
        is_operator: Whether the tenant may manage other tenants, and its requests add their text to the shared cache.
    """

    name: str
    seed: str
    digests: frozenset[str]
    quotas: Quotas = field(default_factory=Quotas)
    reads_shared: bool = False
    is_operator: bool = False


EVERYBODY: Final = Tenant(name="", seed="", digests=frozenset())
"""The tenant that stands for all clients of a server without API keys."""


def digest_of(key: str) -> str:
    """Return the hexadecimal SHA-256 digest of an API key, which the tenants file may contain instead of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


KEY_OPTION: Final = "--api-key"
KEY_FILE_OPTION: Final = "--api-key-file"
KEY_VARIABLE: Final = "SSD_API_KEY"
"""The name of the environment variable with API keys, one per line."""
TENANTS_OPTION: Final = "--tenants"
SECRET_OPTION: Final = "--secret-file"
SECRET_VARIABLE: Final = "SSD_SECRET"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""Matches API keys that an HTTP header can transmit unchanged."""
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MAX_BYTES: Final = 1 << 20


class _Defaults(Quotas):
    reads_shared: bool = False


class _TenantTable(_Defaults):
    keys: list[str]
    operator: bool = False

    @field_validator("keys")
    @classmethod
    def _digests(cls, keys: list[str]) -> list[str]:
        found = []
        for number, key in enumerate(keys, 1):
            if digest := _DIGEST.fullmatch(key):
                found.append(digest.group(1).lower())
            elif key.startswith("sha256:"):
                raise ValueError(f"entry {number} must be sha256: followed by 64 hexadecimal digits")
            elif not _KEY.fullmatch(key):
                raise ValueError(f"entry {number} must be printable ASCII without spaces at its ends")
            else:
                found.append(digest_of(key))
        return found


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    defaults: _Defaults = Field(default_factory=_Defaults)
    tenants: dict[str, _TenantTable] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RulesFile:
    """The parsed tenants file.

    ``defaults`` holds the values that tenants in the file inherit if they do not set them. They also apply to API keys
    that are given outside the file.
    """

    defaults: Tenant
    tenants: tuple[Tenant, ...]


NO_FILE: Final = RulesFile(Tenant(name="defaults", seed="", digests=frozenset()), ())


def read_private(path: Path, option: str, opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb")) -> bytes:
    """Return the content of a file or pipe with secrets, and warn if other users of the machine can read the file.

    Raises ConfigError if it cannot be read or is too long. The message names the command line ``option``.
    """
    try:
        with opened(path) as file:
            content, mode = file.read(_MAX_BYTES + 1), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{option} {path} is longer than {_MAX_BYTES} bytes: check the path, or shorten the file")
    if stat.S_ISREG(mode) and mode & (stat.S_IWGRP | stat.S_IRWXO):
        log.warning("%s %s may be read by other users: run chmod 600 on it", option, path)
    return content


def check_keys(keys: Iterable[str], source: str) -> tuple[str, ...]:
    """Return the API keys if HTTP headers can transmit them; else raise ConfigError, whose message quotes no key."""
    found = tuple(keys)
    for number, key in enumerate(found, 1):
        if not _KEY.fullmatch(key):
            what = "must not be empty" if not key.strip() else "must be printable ASCII without spaces around it"
            raise ConfigError(f"{source}: key {number} {what}")
    return found


def read_key_file(path: Path) -> tuple[str, ...]:
    """Read API keys from a file with one key per line, and warn if other users can read the file.

    Raises ConfigError if the file cannot be read, contains no key, or contains a key that HTTP headers cannot transmit.
    """
    content = read_private(path, KEY_FILE_OPTION)
    try:
        lines = [line.strip() for line in content.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{KEY_FILE_OPTION} {path} is not a UTF-8 text file: write one key per line") from error
    keys = check_keys([line for line in lines if line and not line.startswith("#")], f"{KEY_FILE_OPTION} {path}")
    if not keys:
        raise ConfigError(f"{KEY_FILE_OPTION} {path} contains no key: write one key per line, or omit the option")
    return keys


def read_rules(path: Path) -> RulesFile:
    return parse_rules(read_private(path, TENANTS_OPTION), f"{TENANTS_OPTION} {path}")


def parse_rules(content: bytes, source: str) -> RulesFile:
    """Parse the bytes of a tenants file. ``source`` names the file in error messages.

    Raises ConfigError if the file is not valid TOML, has an invalid value, or gives one API key to two tenants.
    """
    try:
        file = _File.model_validate(tomllib.loads(content.decode()))
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(quote_value(part)[1:-1] if isinstance(part, str) else str(part) for part in first["loc"])
        raise ConfigError(f"{source}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
    except ValueError as error:  # invalid TOML or UTF-8; the message of the latter quotes bytes
        place = re.search(r"\(at [^)]*\)", str(error))
        raise ConfigError(f"{source} is not TOML{f' {place.group()}' if place else ''}") from None
    defaults = file.defaults.model_dump(exclude_unset=True)
    owners: dict[str, str] = {}
    for name, table in file.tenants.items():
        where = f"{source}: tenants.{quote_value(name)[1:-1]}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: its name must have 1 to 64 characters of A-Z a-z 0-9 _ . - and no leading dot")
        for digest in table.keys:
            if (owner := owners.setdefault(digest, name)) != name:
                raise ConfigError(
                    f"{where}: one of its keys already belongs to tenant {quote_value(owner)}: remove the key from one "
                    "of the tenants"
                )
    return RulesFile(
        _tenant("defaults", {**defaults, "keys": []}),
        tuple(_tenant(name, defaults | table.model_dump(exclude_unset=True)) for name, table in file.tenants.items()),
    )


def _tenant(name: str, table: Mapping[str, Any]) -> Tenant:
    return Tenant(
        name=name,
        seed=f"tenant:{name}",
        digests=frozenset(table["keys"]),
        quotas=Quotas(**{name: table[name] for name in Quotas.model_fields if name in table}),
        reads_shared=table.get("reads_shared", False),
        is_operator=table.get("operator", False),
    )
