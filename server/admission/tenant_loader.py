"""Create a server's tenants from the operator's API keys, files and secret, and reload them when a file changes."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from server.admission.registry import Generations, NamespaceNames, Tenants, summarize_names
from server.admission.tenant_config import (
    NO_FILE,
    SECRET_OPTION,
    SECRET_VARIABLE,
    RulesFile,
    Tenant,
    digest_of,
    read_private,
    read_rules,
)
from server.base.settings import ServerSettings
from ssd.errors import ConfigError
from ssd.retrieval.files import create_file, make_directory, open_file, write_file
from ssd.retrieval.owners import (
    MIN_SECRET_BYTES,
    SECRET_NAME,
    STATE_DIRECTORY,
    dump_secret,
    parse_secret,
    tenant_directories,
)

if TYPE_CHECKING:
    from ssd.replication.replication_log import RedisCounters

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 4096
_ADVICE: Final = "`openssl rand -hex 32` creates a secret"


def read_given_secret(path: Path | None, text: str | None) -> bytes | None:
    """Return the server's secret from the file at ``path``, else from ``text``, the value of ``$SSD_SECRET``.

    Returns None if neither is given. Raises ConfigError if the secret cannot be read or has a wrong length.
    """
    if path is not None:
        try:
            content = read_private(path, SECRET_OPTION)
        except ConfigError as error:
            raise ConfigError(f"{error}. {_ADVICE}; all replicas need the same file") from error
        return _check_secret_length(content.strip(), f"{SECRET_OPTION} {path}")
    return (
        _check_secret_length(text.encode("utf-8", "surrogateescape").strip(), f"${SECRET_VARIABLE}") if text else None
    )


def load_or_create_secret(cache_directory: Path | None) -> bytes:
    """Return the secret stored in the cache directory, and create it if missing.

    Without a cache directory, or if the secret cannot be stored, the secret is random and valid only until the next
    restart. Raises ConfigError if the stored secret is damaged, or if it is missing although tenants' caches exist.
    """
    if cache_directory is None:
        return secrets.token_bytes(32)
    path = cache_directory / STATE_DIRECTORY / SECRET_NAME
    advice = (
        f"Restore it from a copy, or give the secret that created the caches ({SECRET_OPTION}, "
        f"${SECRET_VARIABLE}); else remove the caches (`ssd-cache inspect {cache_directory}` lists them)"
    )
    try:
        make_directory(path.parent)
        if not path.exists():
            found = tenant_directories(cache_directory)
            if found and not path.exists():  # another process may have created both just now
                named = summarize_names([path.name for path in found])
                raise ConfigError(f"{path} is missing. Without this secret, {named} cannot be found. {advice}")
            create_file(path, [dump_secret(secrets.token_hex(32).encode())])
        content = read_private(path, SECRET_OPTION, open_file)
        try:
            kept, has_checksum = parse_secret(content)
        except ValueError as error:
            raise ConfigError(f"{path} is damaged ({error}). {advice} and {path}") from error
        secret = _check_secret_length(kept, str(path))
        if not has_checksum and len(checked := dump_secret(secret)) <= _MAX_BYTES:
            with suppress(OSError):  # without a checksum the file is still usable
                write_file(path, [checked], durable=True)
        return secret
    except OSError as error:
        log.warning(
            "%s cannot be created (%s), so tenants' caches are lost at the next restart: make the directory "
            "writable, or give %s or $%s",
            path,
            error.strerror,
            SECRET_OPTION,
            SECRET_VARIABLE,
        )
        return secrets.token_bytes(32)


def _check_secret_length(secret: bytes, source: str) -> bytes:
    if not MIN_SECRET_BYTES <= len(secret) <= _MAX_BYTES:
        raise ConfigError(f"the secret in {source} must have {MIN_SECRET_BYTES} to {_MAX_BYTES} bytes: {_ADVICE}")
    return secret


def open_tenants(
    settings: ServerSettings,
    secret: bytes,
    *,
    keys: tuple[str, ...] = (),
    read_keys: Callable[[], tuple[str, ...]] = tuple,
    path: Path | None = None,
    cache_directory: Path | None = None,
    counters: RedisCounters | None = None,
) -> Tenants:
    """Create the tenants from API keys and the tenants file at ``path``.

    ``keys`` are API keys that stay valid until the server stops. ``read_keys`` returns the API keys in the key file. It
    is called now and at each reload. ``counters`` exchange deletion counts of caches between replicas.

    Raises ConfigError if a file is invalid, or if two tenants have the same key or name.
    """
    names = NamespaceNames(secret)

    def read() -> tuple[Tenant, ...]:
        rules = NO_FILE if path is None else read_rules(path)
        of_keys = [
            replace(
                rules.defaults,
                name=f"key-{names.short_name(digest)}",
                seed=f"key:{digest}",
                digests=frozenset({digest}),
            )
            for digest in dict.fromkeys(map(digest_of, (*keys, *read_keys())))
        ]
        _require_one_owner(rules, of_keys)
        return (*rules.tenants, *of_keys)

    own_caches = None if settings.share_cache_across_keys else cache_directory
    kept_at = None if cache_directory is None else cache_directory / STATE_DIRECTORY / "generations.json"
    tenants = Tenants(
        read,
        names=names,
        generations=Generations(kept_at, counters),
        bases=settings.namespaces,
        share_cache=settings.share_cache_across_keys,
        directory=own_caches,
    )
    if own_caches is not None and tenants.is_closed:
        try:
            strangers = tenants.recover_counts()
        except OSError as error:
            raise ConfigError(f"the caches of tenants in {own_caches} cannot be read: {error}") from error
        if strangers:
            log.warning(
                "%s in %s were created with another secret or belong to former tenants. They are neither used nor "
                "deleted: restore the secret, or remove them (`ssd-cache inspect %s` lists them)",
                summarize_names(strangers),
                own_caches,
                own_caches,
            )
    if path is not None and not tenants.is_closed:
        raise ConfigError(f"--tenants {path} contains no tenant: add one, or omit the option")
    return tenants


def _require_one_owner(rules: RulesFile, of_keys: list[Tenant]) -> None:
    given = {digest for tenant in of_keys for digest in tenant.digests}
    for tenant in rules.tenants:
        if tenant.digests & given:
            raise ConfigError(
                f"a key of tenant {tenant.name!r} is also given outside the tenants file: remove the key from one "
                "of the two places"
            )
    taken = {tenant.name for tenant in of_keys}
    if (twice := next((tenant for tenant in rules.tenants if tenant.name in taken), None)) is not None:
        raise ConfigError(
            f"tenant {twice.name!r} has the same name as a key that is given outside the tenants file: rename "
            "the tenant"
        )


INTERVAL_S: Final = 1.0


class TenantReloader:
    """Background threads that reload API keys and quotas when a watched file changes, and finish deletions of caches.

    A file with an error is not used: the current keys and quotas stay valid.
    """

    def __init__(self, tenants: Tenants, paths: Iterable[Path], *, interval_s: float = INTERVAL_S) -> None:
        self._tenants, self._paths, self._interval_s = tenants, tuple(paths), interval_s
        self._seen = self._file_states()
        self._stopping = threading.Event()
        self._threads = [  # two threads: a deletion may wait for Redis, the revocation of a key must not
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._reload, "ssd-tenants"), (self._sweep, "ssd-sweep"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _reload(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                if (now := self._file_states()) != self._seen:
                    self._seen = now
                    log.info("API keys and quotas were reloaded: %d tenants", self._tenants.reload())
            except ConfigError as error:
                log.error("API keys and quotas were not reloaded: %s", error)
            except Exception:  # the thread must continue after any error
                log.exception("API keys and quotas were not reloaded")

    def _sweep(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._tenants.sweep()
            except Exception:
                log.exception("the files of deleted caches could not be removed completely: this is retried")

    def _file_states(self) -> list[tuple[int, ...] | None]:
        """Return the inode, size and change times of each watched file; None for a missing file."""
        found: list[tuple[int, ...] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
            except OSError:
                found.append(None)
        return found
