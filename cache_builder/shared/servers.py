"""What a Redis server says of itself, and what of that matters for sharing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache_builder.shared.text import number_of, shown

if TYPE_CHECKING:
    import redis


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
