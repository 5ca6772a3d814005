"""The master of a service that sentinels watch over. Needs redis-py, so only ``connect`` imports it.

A sentinel is asked anew for each connection, so that after a failover the next one leads to the new master: the old one
is gone, or closes its connections when it is made a replica, or refuses to be written to, which redis-py takes for a
lost connection. Several are asked in turn; one that is away, refuses or talks nonsense is passed.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from ssd.sharing.addresses import Host

_LONGEST_NAME = 253


class Sentinels(Sentinel):
    """redis-py's, but that no answer of a sentinel is trusted to have its form, and no connection is kept."""

    def discover_master(self, service_name: str) -> Host:
        """Where the master is. Raises MasterNotFoundError, a connection error; at most 3 s for each sentinel."""
        reason = ""
        for number, sentinel in enumerate(self.sentinels):
            try:
                answer: Any = sentinel.execute_command(  # type: ignore[no-untyped-call]
                    "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service_name
                )
                host = None if answer is None else read_host(answer[0], answer[1])
            except Exception as error:  # nonsense raises whatever it likes
                reason = f": {type(error).__name__}: {error}"
                continue
            finally:
                sentinel.connection_pool.disconnect()
            if host is not None:
                self.sentinels.insert(0, self.sentinels.pop(number))
                return host
        raise MasterNotFoundError(f"no sentinel of {len(self.sentinels)} names a master of {service_name!r}{reason}")


def sentinel_pool(
    hosts: tuple[Host, ...], service: str, sentinel_options: dict[str, Any], options: dict[str, Any]
) -> SentinelConnectionPool:
    """Connections to the master of ``service``. Nothing is sent yet."""
    import redis

    kind = options.pop("connection_class", None)
    sentinels = Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = [
        redis.Redis.from_pool(redis.ConnectionPool(**sentinel_options | {"host": host, "port": port}))
        for host, port in hosts
    ]
    managed = SentinelManagedConnection if kind is None else SentinelManagedSSLConnection
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        service, sentinels, connection_class=managed, **options
    )


def read_host(name: object, port: object) -> Host:
    """A host as servers name it, checked. Raises ConnectionError."""
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else ""
    number = int(port) if isinstance(port, int) or (isinstance(port, bytes) and port.isdigit()) else 0
    if not 0 < len(text) <= _LONGEST_NAME or not text.isprintable() or " " in text or not 0 < number < 1 << 16:
        raise RedisConnectionError("a server named an address that is none")
    return text, number
