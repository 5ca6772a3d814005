"""Who the tenants are and what each may use, as an operator wrote it: frozen, replaced as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field


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
