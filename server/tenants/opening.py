"""A server's tenants from what its operator gave: keys, files, a secret."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.base.settings import ServerSettings
from server.tenants.generations import Generations, SharedCounters
from server.tenants.namespace_names import NamespaceNames
from server.tenants.registry import Tenants
from server.tenants.rules import Tenant, digest_of, tenants_of_keys
from server.tenants.rules_file import NO_FILE, RulesFile, read_rules
from server.tenants.secret import STATE_DIRECTORY
from ssd.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSources:
    """Where tenants come from. ``keys`` : given once. ``read_keys`` : a file's, as it is now. ``path`` : rules."""

    keys: tuple[str, ...] = ()
    read_keys: Callable[[], tuple[str, ...]] = tuple
    path: Path | None = None

    def read(self, names: NamespaceNames) -> tuple[Tenant, ...]:
        """All tenants there are now. Raises ConfigError."""
        rules = NO_FILE if self.path is None else read_rules(self.path)
        keys = (*self.keys, *self.read_keys())
        digests = map(digest_of, keys)
        of_keys = tenants_of_keys(keys, rules.defaults, {digest: f"key-{names.short(digest)}" for digest in digests})
        _require_one_owner(rules, of_keys)
        return (*rules.tenants, *of_keys)


def open_tenants(
    sources: TenantSources,
    settings: ServerSettings,
    secret: bytes,
    *,
    cache_directory: Path | None = None,
    counters: SharedCounters | None = None,
) -> Tenants:
    """The tenants of a server. ``counters`` : what replicas count deletions with. Raises ConfigError."""
    names = NamespaceNames(secret)
    path = None if cache_directory is None else cache_directory / STATE_DIRECTORY / "generations.json"
    tenants = Tenants(
        lambda: sources.read(names),
        names=names,
        generations=Generations(path, counters),
        bases=settings.namespaces,
        share_cache=settings.share_cache_across_keys,
    )
    if sources.path is not None and not tenants.is_closed:
        raise ConfigError(f"--tenants {sources.path} names no tenant: write one, or leave the option out")
    return tenants


def _require_one_owner(rules: RulesFile, of_keys: list[Tenant]) -> None:
    given = {digest for tenant in of_keys for digest in tenant.digests}
    for tenant in rules.tenants:
        if tenant.digests & given:
            raise ConfigError(f"a key of tenant {tenant.name!r} is given as a key of its own as well: take one out")
    taken = {tenant.name for tenant in of_keys}
    if (twice := next((tenant for tenant in rules.tenants if tenant.name in taken), None)) is not None:
        raise ConfigError(f"tenant {twice.name!r} has the name of a key that is given by itself: take another")


def tenants_of(settings: ServerSettings) -> Tenants:
    """Each key of the settings a tenant of its own, with a secret of this process. Raises ConfigError."""
    return open_tenants(TenantSources(keys=settings.api_keys), settings, secrets.token_bytes(32))
