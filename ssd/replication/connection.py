"""Connections to Redis with short time-outs. Passwords in Redis URLs never appear in messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from ssd.errors import ConfigError

if TYPE_CHECKING:
    import redis

URL_VARIABLE = "SSD_REDIS_URL"
"""The environment variable for the Redis URL. It is the place for a URL with a password, because other users of the
machine can read command lines.
"""

BLOCK_MS = 500  # far less than the socket's time-out

_CONNECT_TIMEOUT_S = 1.0
_SOCKET_TIMEOUT_S = 2.0

_SENTINEL_PORT = 26379
_MAX_HOSTS = 64
_SECRETS = "password|ssl_password|sentinel_password"
_FORMS = (
    "redis://[user:password@]host:port/0, redis-sentinel://host,host,host/service/0 or redis-cluster://host,host "
    "(rediss for TLS), and percent-encode special characters of the password"
)

Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class RedisAddress:
    kind: Literal["server", "sentinel", "cluster"]
    hosts: tuple[Host, ...]  # the sentinels, or some nodes of the cluster; empty for a single server
    service: str  # the name of the master for the sentinels
    options: dict[str, Any]  # redis-py's options for connections to a server
    sentinel_options: dict[str, Any]  # redis-py's options for connections to a sentinel


def parse_redis_url(url: str) -> RedisAddress:
    """Parse a Redis URL; raise ConfigError if it is invalid. The error message does not contain the password."""
    try:
        return _parse(url)
    except Exception:  # its message may contain the URL
        raise ConfigError(f"{redact_password(url)} is not a Redis URL: use {_FORMS}") from None


def passwords_in(url: str) -> list[str]:
    """Return the passwords in a Redis URL, both as written and percent-decoded, the longest first."""
    found = set(re.findall(rf"[?&](?:{_SECRETS})=([^&#]*)", url))
    if match := re.match(r"[^/]*//[^:@/]*:(.*)@", url):
        found.add(match.group(1))
    return sorted({form for secret in found if secret for form in (secret, unquote(secret))}, key=len, reverse=True)


def redact_password(text: str, url: str | None = None) -> str:
    """Replace the passwords of a Redis URL in a text by ``***``; without ``url``, the text itself is the URL."""
    for secret in passwords_in(text if url is None else url):
        text = text.replace(secret, "***")
    return text


def redacted_address(url: str) -> str:
    """Return a Redis URL without user, password and options, for log messages."""
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        if not re.fullmatch(r"[\w.:,\[\]%-]*", hosts):
            raise ValueError(hosts)
        return f"{parts.scheme}://{hosts}{parts.path}"
    except ValueError:
        return "an unreadable URL"


def _parse(url: str) -> RedisAddress:
    from redis.connection import parse_url

    scheme, rest = url.split("://", 1)
    kind = scheme.replace("rediss-", "redis-")
    if kind not in ("redis-sentinel", "redis-cluster"):
        return RedisAddress("server", (), "", parse_url(url), {})  # type: ignore[no-untyped-call]
    is_cluster = kind == "redis-cluster"
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    user, at, names = authority.rpartition("@")
    service, _, database = ("", "", path) if is_cluster else path.partition("/")
    if (database not in ("", "0")) if is_cluster else not service:
        raise ValueError("a URL of a cluster must not name a database, and a URL of sentinels must name a service")
    plain, number = scheme.partition("-")[0], int(database or 0)
    options: dict[str, Any] = parse_url(f"{plain}://{user}{at}host/{number}?{query}")  # type: ignore[no-untyped-call]
    hosts = tuple(_host(name, 6379 if is_cluster else _SENTINEL_PORT) for name in names.split(","))
    if len(hosts) > _MAX_HOSTS:
        raise ValueError("hosts")
    del options["host"]
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    sentinel_options = {name: value for name, value in options.items() if name not in ("username", "password", "db")}
    sentinel_options |= {name: value for name, value in own.items() if value is not None}
    return RedisAddress("cluster" if is_cluster else "sentinel", hosts, unquote(service), options, sentinel_options)


def _host(name: str, default_port: int) -> Host:
    parts = urlsplit(f"redis://{name}")
    if not parts.hostname or parts.path or parts.username is not None:
        raise ValueError(name)
    return parts.hostname, parts.port or default_port


def connect(url: str) -> redis.Redis:
    """Return a Redis client that connects at its first command and limits the size of replies.

    ``url`` is in redis-py's syntax and names a server, sentinels or a cluster; time-outs and protocol in it have no
    effect. In a cluster, the keys of a pipeline must have the same hash tag; ``masters_of`` and ``server_of`` return
    clients of single nodes.

    Raises ConfigError, without the password, if the URL is invalid. Commands raise OversizedReplyError if a reply is
    larger than MAX_REPLY_BYTES.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from ssd.replication.clients import BoundedParser, LazyCluster, sentinel_client
    except ModuleNotFoundError:
        raise ConfigError("sharing through Redis needs the redis package: pip install 'ssd-serving[redis]'") from None
    address = parse_redis_url(url)
    settings: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _SOCKET_TIMEOUT_S,
        "decode_responses": False,
        "protocol": 2,
        "parser_class": BoundedParser,
        "retry": Retry(NoBackoff(), 0),  # our loops retry and count failures
    }
    if url.startswith("unix://"):
        del settings["socket_connect_timeout"]
    options = address.options | settings  # our settings override the URL's options
    try:
        redis.ConnectionPool(**options).make_connection()  # validates the options, without connecting
        if address.kind == "sentinel":
            return sentinel_client(address.hosts, address.service, address.sentinel_options | settings, options)
        if address.kind == "cluster":
            return LazyCluster(address.hosts, options)  # type: ignore[return-value]
        return redis.Redis.from_pool(redis.ConnectionPool(**options))
    except (TypeError, ValueError) as error:
        reason = redact_password(str(error), url).rpartition("__init__() ")[2]
        raise ConfigError(f"{redacted_address(url)} has an invalid option after ? ({reason}): correct it") from None


def masters_of(client: redis.Redis) -> list[tuple[str, redis.Redis]]:
    """Return a pair (address, client) for each primary node of a cluster; without a cluster, [("", client)].

    The caller must not close the clients. Raises the client's errors if a cluster does not answer.
    """
    from ssd.replication.clients import LazyCluster

    return client.masters() if isinstance(client, LazyCluster) else [("", client)]


def server_of(client: redis.Redis, key: str) -> redis.Redis:
    """Return a client of the Redis server that stores ``key``. The caller must not close the client."""
    from ssd.replication.clients import LazyCluster

    return client.node_for(key) if isinstance(client, LazyCluster) else client
