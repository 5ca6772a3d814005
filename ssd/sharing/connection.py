"""Connections that never keep a thread waiting for long and never show their password."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from ssd.errors import ConfigError
from ssd.sharing.addresses import Address, address_of, hide_password, passwords_in, read_url
from ssd.sharing.tls import check_tls

if TYPE_CHECKING:
    import redis

__all__ = ["BLOCK_MS", "URL_VARIABLE", "Backoff", "address_of", "connect", "hide_password", "passwords_in"]

URL_VARIABLE = "SSD_REDIS_URL"
"""Where programs look for the address when their command line has none: others can read a command line."""

BLOCK_MS = 500
"""How long the server holds a read that finds nothing; well below the socket's time-out, which would end it first."""

_CONNECT_TIMEOUT_S = 1.0
_SOCKET_TIMEOUT_S = 2.0
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 3.0


def connect(url: str) -> redis.Redis:
    """A client with connections of its own. Nothing is sent yet.

    ``url`` : of one server, of sentinels or of a cluster (``addresses``), with user, password, database and options as
    redis-py reads them, but for the time-outs and the protocol. The client of a cluster takes commands and pipelines
    whose keys have one hash tag; ``nodes`` says how to ask each node. Raises ConfigError, without the URL's password,
    also for certificates that cannot be used. What is asked of the client may raise OversizedReplyError.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from ssd.sharing.bounded_parser import BoundedParser
    except ModuleNotFoundError:
        raise ConfigError("sharing through Redis needs the redis package: pip install 'ssd-serving[redis]'") from None
    address = read_url(url)
    check_tls(address.options)
    settings: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _SOCKET_TIMEOUT_S,
        "decode_responses": False,
        "protocol": 2,
        "parser_class": BoundedParser,
        "retry": Retry(NoBackoff(), 0),  # our loops retry, and count it
    }
    if url.startswith("unix://"):
        del settings["socket_connect_timeout"]
    try:
        client = _client(redis, address, settings)
        client.connection_pool.make_connection()  # not connected: whether it takes all options
    except (TypeError, ValueError) as error:
        reason = hide_password(str(error), url).rpartition("__init__() ")[2]
        raise ConfigError(
            f"{address_of(url)} has an option behind ? that is of no use ({reason}): correct it"
        ) from None
    return client


def _client(redis: Any, address: Address, settings: dict[str, Any]) -> redis.Redis:
    from ssd.sharing.one_server import OneServer

    options = address.options | settings  # the URL's options do not win
    if address.kind == "sentinel":
        from ssd.sharing.sentinels import sentinel_pool

        pool = sentinel_pool(address.hosts, address.service, address.sentinel_options | settings, options)
        return OneServer.from_pool(pool)
    if address.kind == "cluster":
        from ssd.sharing.cluster import ClusterClient

        return ClusterClient(address.hosts, options)
    return OneServer.from_pool(redis.ConnectionPool(**options))


class Backoff:
    """Growing delays between attempts, from 0.1 to 3 seconds, spread so that replicas do not return all at once."""

    def __init__(self) -> None:
        self._delay_s = _FIRST_DELAY_S

    def reset(self) -> None:
        """The last attempt worked."""
        self._delay_s = _FIRST_DELAY_S

    def next_delay_s(self) -> float:
        """Seconds to wait before the next attempt."""
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s * random.uniform(0.75, 1.0)
