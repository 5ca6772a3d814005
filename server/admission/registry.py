"""The registry of a server's tenants: lookup by API key, reloading, and the names and deletion of tenants' caches."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from server.admission.quotas import Account
from server.admission.tenant_config import EVERYBODY, Tenant, digest_of
from server.base.errors import ApiError
from ssd.errors import ConfigError, SSDError, quote_value
from ssd.retrieval.directory import remove_directory
from ssd.retrieval.files import (
    Owner,
    dump_checked_json,
    make_directory,
    open_file,
    open_lock,
    parse_checked_json,
    sync_directory,
    write_file,
)
from ssd.retrieval.namespace import DEFAULT_POLICY, NamespacePolicy
from ssd.retrieval.owners import keyed_digest, read_owner, secret_id, tenant_directories

if TYPE_CHECKING:
    from ssd.replication.replication_log import RedisCounters, ReplicationLog
    from ssd.retrieval.cache_manager import CacheManager

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamespaceNames:
    """Derives the names of tenants' caches by HMAC, so that nobody can guess a name without the server's ``secret``."""

    secret: bytes

    def tenant(self, base: str, seed: str, generation: int) -> str:
        """Return the namespace of a tenant's cache for a model. ``generation`` is the cache's deletion count."""
        return "t" + self._digest("tenant", base, seed, generation)

    def salted_namespace(self, namespace: str, salt: str) -> str:
        """Return the cache namespace for requests with a ``cache_salt``; ``namespace`` is the tenant's namespace."""
        return "s" + self._digest("salt", namespace, salt)

    def counter(self, base: str, seed: str) -> str:
        """Return the name under which the deletion count of a tenant's cache is stored.

        ``base`` is the namespace of the model, because a tenant has a cache for each model.
        """
        return self._digest("counter", base, seed)

    def owner(self, seed: str) -> Owner:
        """Return digests of the server's secret and of the tenant, which are stored with each cache of the tenant.

        They show to whom a cache directory with an unknown name belongs.
        """
        return Owner(secret_id(self.secret), self._digest("owner", seed))

    def short_name(self, digest: str) -> str:
        """Return the name of the tenant for an API key outside the tenants file: 8 digits of the key's HMAC.

        So few digits cannot verify a guessed key.
        """
        return self._digest("name", digest)[:8]

    def _digest(self, *parts: str | int) -> str:
        return keyed_digest(self.secret, *parts)


def summarize_names(names: list[str]) -> str:
    return f"{len(names)} cache(s) of tenants ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


_MAX_DELETIONS: Final = 1 << 53
_MAX_FILE_BYTES: Final = 1 << 22


class Generations:
    """Counts how often each tenant's cache was deleted.

    The count is part of the cache's name, so text of a deleted cache is never found again. Counts only increase and are
    written to a file before they are used. Replicas exchange counts through Redis. Thread-safe; methods may block.
    """

    def __init__(self, path: Path | None, shared: RedisCounters | None) -> None:
        self._path, self._shared = path, shared
        self._lock = threading.Lock()
        self._counting = threading.Lock()  # held while counts are exchanged with replicas
        self._numbers, is_checked = ({}, True) if path is None else _read(path)
        self._is_reached = True
        if not is_checked:
            with suppress(OSError):  # without a checksum the file is still usable
                self._set({})

    def get(self, name: str) -> int:
        return self._numbers.get(name, 0)

    def increment(self, name: str) -> tuple[int, bool]:
        """Increment the deletion count of a cache, and return the new count and whether replicas received it.

        Raises OSError if the count cannot be written to the file.
        """
        with self._counting:
            number, is_notified = self.get(name) + 1, self._shared is None
            if self._shared is not None:
                try:
                    number = max(number, self._record_count(name, self._shared.add(name, 1), number))
                    is_notified = True
                except Exception as error:  # `exchange` sends the count later
                    self._complain(error)
            self._set({name: number})
            return number, is_notified

    def restore(self, name: str, number: int) -> None:
        """Set the lost deletion count of a cache to ``number``, the count found in the name of the cache's directory.

        Raises OSError if the count cannot be written to the file.
        """
        with self._counting:
            self._set({name: number})

    def exchange(self, names: Iterable[str]) -> dict[str, int]:
        """Exchange deletion counts with the replicas.

        Returns the former count of each counter that a replica has increased; the name of the deleted cache is derived
        from the former count. The result is empty if Redis cannot be reached.
        """
        with self._counting:
            asked = list(names)
            if self._shared is None or not asked:
                return {}
            try:
                found = dict(zip(asked, self._shared.read(asked), strict=True))
                for name, number in found.items():
                    if number < self.get(name):
                        self._record_count(name, number, self.get(name))
                newer = {name: number for name, number in found.items() if self.get(name) < number < _MAX_DELETIONS}
                if newer:  # read twice, so that a corrupted reply deletes no cache
                    again = zip(newer, self._shared.read(list(newer)), strict=True)
                    newer = {name: newer[name] for name, number in again if number >= newer[name]}
            except Exception as error:
                self._complain(error)
                return {}
            self._is_reached = True
            former = {name: self.get(name) for name in newer}
            if newer:
                self._set(newer)
            return former

    def _record_count(self, name: str, counted: int, number: int) -> int:
        assert self._shared is not None
        return self._shared.raise_to(name, number) if counted < number else counted

    def _set(self, numbers: Mapping[str, int]) -> None:
        with self._lock:
            newer = {**self._numbers, **numbers}
            if self._path is not None:
                _write(self._path, newer)
            self._numbers = newer

    def _complain(self, error: Exception) -> None:
        if self._is_reached:
            log.warning(
                "replicas cannot be notified that a cache was deleted (%s): the notification is retried",
                type(error).__name__,
            )
        self._is_reached = False


def _write(path: Path, numbers: Mapping[str, int]) -> None:
    """Write deletion counts to a file, keeping counts of other servers that share it. Raises OSError."""
    make_directory(path.parent)
    with open_lock(path.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there, _ = _read(path)
        greatest = {name: max(number, there.get(name, 0)) for name, number in numbers.items()}
        write_file(path, [dump_checked_json("generations", {**there, **greatest})], durable=True)
        sync_directory(path.parent)


def _read(path: Path) -> tuple[dict[str, int], bool]:
    """Read deletion counts from a file (empty if missing or damaged), and return whether the file has a checksum."""
    try:
        with open_file(path) as file:
            content = file.read(_MAX_FILE_BYTES)
        is_checked = b'"xxh3"' in content or b'"generations"' in content
        numbers = parse_checked_json("generations", content) if is_checked else dict(json.loads(content))
    except FileNotFoundError:
        return {}, True
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.error(
            "%s is damaged (%s). It counts the deletions of tenants' caches: restore it from a backup. "
            "Otherwise, counts are recovered only from Redis and from the names of existing cache directories",
            path,
            error,
        )
        return {}, True
    found = {
        str(name): number for name, number in numbers.items() if type(number) is int and 0 <= number < _MAX_DELETIONS
    }
    return found, is_checked


SALTED_TOKENS: Final = 1 << 18
"""The maximum capacity in tokens of the cache for one ``cache_salt``."""

SALTS_AT_ONCE: Final = 8
"""The maximum number of caches for different ``cache_salt`` values that are open at the same time for one tenant and
model.
"""

_RETIRED_S: Final = 60.0
"""For this many seconds after a cache's deletion, text that running requests still add to it is deleted too."""
_MAX_RETIRED: Final = 1024
_NEAR: Final = 256
"""The number of deletion counts below and above the known count that are tried to find the owner of a cache directory.

A directory's name depends on the deletion count. If the file with the counts was lost, the known count is wrong.
"""


class CacheAccess(NamedTuple):
    """The cache namespace of a request (None: the request uses no cache), and the settings of the namespace."""

    namespace: str | None
    policy: NamespacePolicy


class Tenants:
    """All tenants of a server with their API keys and caches. Thread-safe; lookups never block.

    A server that starts without API keys never requires a key. A server that starts with API keys always requires a
    key, even if a reloaded file contains no keys.
    """

    def __init__(
        self,
        read: Callable[[], tuple[Tenant, ...]],
        *,
        names: NamespaceNames,
        generations: Generations,
        bases: tuple[str, ...],
        share_cache: bool,
        directory: Path | None = None,
    ) -> None:
        """Read the tenants.

        ``read`` returns the tenants in the operator's files, or raises ConfigError. ``bases`` are the cache namespaces
        of the served models. If ``directory`` is None, caches are in memory only.
        """
        self._read, self._directory, self._bases, self._share_cache = read, directory, bases, share_cache
        self._names, self._generations = names, generations
        self._process_secret = secrets.token_bytes(32)
        self._lock = threading.Lock()  # held while the tenants are replaced
        self._accounts: dict[str, Account] = {}
        self._by_key: dict[bytes, Account] = {}
        self._retired: list[tuple[float, str]] = []
        self._left_in_redis: set[str] = set()
        self.everybody = Account(EVERYBODY)
        """The account of all clients of a server without API keys."""
        self.caches: Callable[[], CacheManager | None] = lambda: None
        """A callback that returns the cache manager, or None while the caches are not open."""
        self.sharing: Callable[[], ReplicationLog | None] = lambda: None
        """A callback that returns the Redis log by which replicas share text, or None."""
        self._replace(read())
        self.is_closed: Final = bool(self._accounts)
        """Whether the server requires an API key. The value is set at the start and never changes."""

    def find(self, key: str) -> Account | None:
        """Return the account of an API key. A keyed digest is compared, so the duration reveals nothing about keys."""
        return self._by_key.get(self._hash_key(digest_of(key)))

    def accounts(self) -> list[Account]:
        return sorted(self._accounts.values(), key=lambda account: account.name)

    def cache_use(self, account: Account, base: str | None, salt: str | None) -> CacheAccess:
        """Return the cache for a request; ``base`` is the cache namespace of the model, ``salt`` the ``cache_salt``."""
        if base is None:
            return CacheAccess(None, DEFAULT_POLICY)
        main, terms = base, DEFAULT_POLICY
        tenant = account.tenant
        if not (self._share_cache or tenant is EVERYBODY or tenant.is_operator):
            main = self._namespace(tenant, base)
            terms = NamespacePolicy(
                capacity_tokens=tenant.quotas.cache_tokens,
                reads_shared=tenant.reads_shared,
                is_durable=True,
                owner=self._names.owner(tenant.seed),
            )
        if salt is None:
            return CacheAccess(main, terms)
        # Salted caches stay in memory, because clients may choose any number of salts.
        salted = NamespacePolicy(
            capacity_tokens=min(SALTED_TOKENS, terms.capacity_tokens or SALTED_TOKENS),
            reads_shared=terms.reads_shared,
            is_durable=False,
            group=main,
            max_in_group=SALTS_AT_ONCE,
        )
        return CacheAccess(self._names.salted_namespace(main, salt), salted)

    def labels(self) -> Mapping[str, str]:
        """Map the names of tenants' cache namespaces to the tenants' names, for labels of metrics. O(tenants)."""
        return {
            self._namespace(account.tenant, base): (
                name if base == self._bases[0] and name not in self._bases else f"{name}/{base}"
            )
            for name, account in self._accounts.items()
            for base in self._bases
            if not account.tenant.is_operator
        }

    def describe(self) -> list[dict[str, Any]]:
        """Return every tenant's quotas and current use as JSON objects, without API keys."""
        return [
            {
                "name": account.name,
                "operator": account.tenant.is_operator,
                "reads_shared": account.tenant.reads_shared,
                "num_keys": len(account.tenant.digests),
                "quotas": account.tenant.quotas.model_dump(),
                "namespaces": [self.cache_use(account, base, None).namespace for base in self._bases],
                "use": {
                    "in_flight": account.num_in_flight,
                    "requests": account.num_requests,
                    "prompt_tokens": account.num_prompt_tokens,
                    "output_tokens": account.num_output_tokens,
                    "refused": dict(account.num_refused),
                },
                "left": account.headers(),
            }
            for account in self.accounts()
        ]

    def reload(self) -> int:
        """Read the operator's files again and return the number of tenants. Raises ConfigError if a file is invalid."""
        tenants = self._read()
        if self.is_closed and not tenants:
            raise ConfigError("the files no longer contain an API key, so the current keys stay valid: add a key")
        if not self.is_closed and tenants:
            raise ConfigError(
                "the server was started without API keys and ignores new keys: restart the server to use the keys"
            )
        self._replace(tenants)
        return len(tenants)

    def _replace(self, tenants: tuple[Tenant, ...]) -> None:
        with self._lock:
            accounts = {}
            for tenant in tenants:
                if (account := self._accounts.get(tenant.name)) is None:
                    account = Account(tenant)
                else:
                    account.change(tenant)
                accounts[tenant.name] = account
            self._accounts = accounts
            # One assignment, so that lookups see either all old keys or all new keys. Requests in flight continue.
            self._by_key = {
                self._hash_key(digest): account for account in accounts.values() for digest in account.tenant.digests
            }

    def delete_cache(self, name: str) -> dict[str, Any]:
        """Delete a tenant's cache, immediately on this server and within seconds on its replicas.

        Raises ApiError if there is no such tenant (404), if the tenant has no cache of its own (409), or if text of the
        tenant could not be deleted (500).
        """
        account = self._accounts.get(name)
        if account is None:
            raise ApiError(404, f"there is no tenant {quote_value(name)}", code="tenant_not_found")
        if self._share_cache or account.tenant.is_operator:
            raise ApiError(
                409,
                f"{quote_value(name)} has no cache of its own: to remove the shared cache, stop the server and delete "
                "its cache directory",
                code="cache_is_shared",
            )
        old = [self._namespace(account.tenant, base) for base in self._bases]
        try:
            unknown = self._unknown_directories()
            counters = [self._names.counter(base, account.tenant.seed) for base in self._bases]
            notified = [self._generations.increment(counter)[1] for counter in counters]
        except OSError as error:
            raise ApiError(
                500, f"nothing was deleted, because the deletion cannot be recorded: {error}", kind="server_error"
            ) from error
        owner = self._names.owner(account.tenant.seed)
        near = {name for base in self._bases for name in self._possible_names(account.tenant, base)}
        failures = self._retire([*old, *(name for name, whose in unknown.items() if whose == owner or name in near)])
        if strangers := [name for name in self._foreign_directories(unknown) if name not in near]:
            failures.append(
                f"the known caches of tenant {name} are deleted, but {summarize_names(strangers)} in {self._directory} "
                "belong to another secret or to former tenants, and may contain text of this tenant: remove them "
                "by hand"
            )
        log.info("the cache of tenant %s was deleted%s", name, f", but {failures[0]}" if failures else "")
        if failures:
            raise ApiError(500, failures[0], kind="server_error", code="cache_left_over")
        return {"object": "cache", "tenant": name, "deleted": True, "replicas_notified": all(notified)}

    def recover_counts(self) -> list[str]:
        """Recover lost deletion counts from the names of cache directories, and remove directories of deleted caches.

        Returns the cache directories that belong to no known tenant or were created with another secret.
        O(directories). Raises OSError if the cache directory cannot be read or a recovered count cannot be written.
        """
        unknown = self._unknown_directories()
        owners = set(unknown.values())
        for tenant in [account.tenant for account in self.accounts()] if unknown else ():
            if owners.isdisjoint((None, self._names.owner(tenant.seed))):
                continue
            for base in self._bases:
                counter = self._names.counter(base, tenant.seed)
                found = {name: number for name, number in self._possible_names(tenant, base).items() if name in unknown}
                newest = max([self._generations.get(counter), *found.values()])
                if newest > self._generations.get(counter):
                    log.error(
                        "the number of cache deletions of tenant %s was lost, and was recovered from the name of the "
                        "tenant's cache directory (nothing to do)",
                        tenant.name,
                    )
                    self._generations.restore(counter, newest)
                assert self._directory is not None
                if (self._directory / self._names.tenant(base, tenant.seed, newest)).is_dir():
                    due = time.monotonic() + _RETIRED_S
                    self._retired += [(due, name) for name, number in found.items() if number < newest]
                elif found:
                    log.warning(
                        "tenant %s still has directories of deleted caches: %s (see generations.json). They are not "
                        "used. The next deletion of the tenant's cache removes these directories",
                        tenant.name,
                        ", ".join(found),
                    )
                for name in found:
                    del unknown[name]
        return self._foreign_directories(unknown)

    def _unknown_directories(self) -> dict[str, Owner | None]:
        """Return the tenants' cache directories that no current tenant uses, with their owners. Raises OSError."""
        if self._directory is None:
            return {}
        known = self.labels()
        return {path.name: read_owner(path) for path in tenant_directories(self._directory) if path.name not in known}

    def _foreign_directories(self, unknown: Mapping[str, Owner | None]) -> list[str]:
        ours = secret_id(self._names.secret)
        return [name for name, owner in unknown.items() if owner is None or owner.secret != ours]

    def _possible_names(self, tenant: Tenant, base: str) -> dict[str, int]:
        """Map possible names of a tenant's cache directory to deletion counts near the known count (see ``_NEAR``).

        The known count is too low if the file with the counts was lost.
        """
        number = self._generations.get(self._names.counter(base, tenant.seed))
        near = range(max(0, number - _NEAR), number + _NEAR)
        return {self._names.tenant(base, tenant.seed, other): other for other in near}

    def sweep(self) -> None:
        """Delete from this server every cache whose deletion was requested on another replica.

        Requests that were running when a cache was deleted may still add text to it, so this text is deleted too.
        """
        counted = {
            self._names.counter(base, account.tenant.seed): (account.tenant, base)
            for account in self.accounts()
            for base in self._bases
        }
        for counter, former in self._generations.exchange(counted).items():
            tenant, base = counted[counter]
            log.info("the cache of tenant %s was deleted by a replica", tenant.name)
            self._retire([self._names.tenant(base, tenant.seed, former)])
        with self._lock:
            now = time.monotonic()
            if self.caches() is None:  # the caches are still being opened, and are swept later
                self._retired = [(now + _RETIRED_S, name) for _, name in self._retired]
            self._left_in_redis &= {name for _, name in self._retired}
            self._retired = [each for each in self._retired if each[0] > now or each[1] in self._left_in_redis]
            due = [name for _, name in self._retired]
        for name in due:
            self._remove(name)

    def _retire(self, namespaces: list[str]) -> list[str]:
        with self._lock:
            self._retired += [(time.monotonic() + _RETIRED_S, name) for name in namespaces]
            del self._retired[:-_MAX_RETIRED]
        return [failure for name in namespaces if (failure := self._remove(name)) is not None]

    def _remove(self, namespace: str) -> str | None:
        """Delete a namespace's cache from memory, disk and Redis. Returns the error message if that failed."""
        failure = None
        caches, sharing = self.caches(), self.sharing()
        try:
            if caches is not None:
                caches.discard(namespace)
            elif self._directory is not None:  # no cache is open: the server is loading, or has no cache
                remove_directory(self._directory / namespace)
        except (SSDError, OSError) as error:
            failure = str(error)
        try:
            if sharing is not None:
                sharing.delete_stream(namespace)
            self._left_in_redis.discard(namespace)
        except Exception as error:  # Redis is unreachable: later sweeps retry
            self._left_in_redis.add(namespace)
            log.debug("namespace %s is still in Redis: %s", namespace, type(error).__name__)
        return failure

    def _namespace(self, tenant: Tenant, base: str) -> str:
        if tenant.is_operator or self._share_cache:
            return base
        generation = self._generations.get(self._names.counter(base, tenant.seed))
        return self._names.tenant(base, tenant.seed, generation)

    def _hash_key(self, digest: str) -> bytes:
        return hmac.new(self._process_secret, digest.encode(), hashlib.sha256).digest()
