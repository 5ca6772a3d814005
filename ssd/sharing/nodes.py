"""What differs between one server and a cluster for those who ask servers, not keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import redis


def is_cluster(client: redis.Redis) -> bool:
    """Whether a failure concerns some keys only, as others are on other nodes."""
    from ssd.sharing.cluster import ClusterClient

    return isinstance(client, ClusterClient)


def masters_of(client: redis.Redis) -> list[tuple[str, redis.Redis]]:
    """A client for each server that is written to, with its address in a cluster; not to be closed.

    Raises what the client raises where a cluster does not say what it is made of.
    """
    from ssd.sharing.cluster import ClusterClient

    if not isinstance(client, ClusterClient):
        return [("", client)]
    return [(f"{host}:{port}", node) for (host, port), node in client.masters()]


def server_of(client: redis.Redis, key: str) -> redis.Redis:
    """A client of the server that has ``key``, not to be closed."""
    from ssd.sharing.cluster import ClusterClient

    return client.node_of(key) if isinstance(client, ClusterClient) else client
