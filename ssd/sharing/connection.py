"""Connections that never keep a thread waiting for long and never show their password."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from ssd.errors import ConfigError

if TYPE_CHECKING:
    import redis

URL_VARIABLE = "SSD_REDIS_URL"
"""Where programs look for the address when their command line has none: others can read a command line."""

BLOCK_MS = 500
"""How long the server holds a read that finds nothing; well below the socket's time-out, which would end it first."""

_CONNECT_TIMEOUT_S = 1.0
_SOCKET_TIMEOUT_S = 2.0

_SENTINEL_PORT = 26379
_MOST_HOSTS = 64
_SECRETS = "password|ssl_password|sentinel_password"
_FORMS = (
    "redis://[user:password@]host:port/0, redis-sentinel://host,host,host/service/0 or redis-cluster://host,host "
    "(rediss for TLS), and percent-encode special characters of the password"
)

Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL says.

    ``hosts`` : the sentinels, or some nodes of the cluster; empty for one server. ``service`` : what the sentinels call
    the master. ``options`` : of a connection to a server, as redis-py takes them; ``sentinel_options`` : to a sentinel.
    """

    kind: Literal["server", "sentinel", "cluster"]
    hosts: tuple[Host, ...]
    service: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def read_url(url: str) -> Address:
    """The parts of a URL, needs redis-py. Raises ConfigError, without the URL's password."""
    try:
        return _read(url)
    except Exception:  # its message may quote the URL
        raise ConfigError(f"{hide_password(url)} is not a Redis URL: write {_FORMS}") from None


def passwords_in(url: str) -> list[str]:
    """The secrets a URL carries, as written and decoded, longest first."""
    found = set(re.findall(rf"[?&](?:{_SECRETS})=([^&#]*)", url))
    if match := re.match(r"[^/]*//[^:@/]*:(.*)@", url):
        found.add(match.group(1))
    return sorted({form for secret in found if secret for form in (secret, unquote(secret))}, key=len, reverse=True)


def hide_password(text: str, url: str | None = None) -> str:
    """``text`` with the password of ``url`` (or of itself, when it is one) replaced."""
    for secret in passwords_in(text if url is None else url):
        text = text.replace(secret, "***")
    return text


def address_of(url: str) -> str:
    """Where a URL leads, for logs: no user, no password, no options."""
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        if not re.fullmatch(r"[\w.:,\[\]%-]*", hosts):
            raise ValueError(hosts)
        return f"{parts.scheme}://{hosts}{parts.path}"
    except ValueError:
        return "an unreadable URL"


def _read(url: str) -> Address:
    from redis.connection import parse_url

    scheme, rest = url.split("://", 1)
    kind = scheme.replace("rediss-", "redis-")
    if kind not in ("redis-sentinel", "redis-cluster"):
        return Address("server", (), "", parse_url(url), {})  # type: ignore[no-untyped-call]
    is_cluster = kind == "redis-cluster"
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    user, at, names = authority.rpartition("@")
    service, _, database = ("", "", path) if is_cluster else path.partition("/")
    if (database not in ("", "0")) if is_cluster else not service:
        raise ValueError("a cluster has no databases, sentinels name a service")
    plain, number = scheme.partition("-")[0], int(database or 0)
    options: dict[str, Any] = parse_url(f"{plain}://{user}{at}host/{number}?{query}")  # type: ignore[no-untyped-call]
    hosts = tuple(_host(name, 6379 if is_cluster else _SENTINEL_PORT) for name in names.split(","))
    if len(hosts) > _MOST_HOSTS:
        raise ValueError("hosts")
    del options["host"]
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    sentinel_options = {name: value for name, value in options.items() if name not in ("username", "password", "db")}
    sentinel_options |= {name: value for name, value in own.items() if value is not None}
    return Address("cluster" if is_cluster else "sentinel", hosts, unquote(service), options, sentinel_options)


def _host(name: str, default_port: int) -> Host:
    parts = urlsplit(f"redis://{name}")
    if not parts.hostname or parts.path or parts.username is not None:
        raise ValueError(name)
    return parts.hostname, parts.port or default_port


def connect(url: str) -> redis.Redis:
    """A client with connections of its own. Nothing is sent yet.

    ``url`` : of one server, of sentinels or of a cluster, with user, password, database and options as redis-py reads
    them, but for the time-outs and the protocol. The client of a cluster takes commands and pipelines whose keys have
    one hash tag; ``masters_of`` and ``server_of`` lead to its nodes. Raises ConfigError, without the URL's password.
    What is asked of the client may raise OversizedReplyError.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from ssd.sharing.clients import BoundedParser, Cluster, sentinel_client
    except ModuleNotFoundError:
        raise ConfigError("sharing through Redis needs the redis package: pip install 'ssd-serving[redis]'") from None
    address = read_url(url)
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
    options = address.options | settings  # the URL's options do not win
    try:
        redis.ConnectionPool(**options).make_connection()  # not connected: whether it takes all options
        if address.kind == "sentinel":
            return sentinel_client(address.hosts, address.service, address.sentinel_options | settings, options)
        if address.kind == "cluster":
            return Cluster(address.hosts, options)  # type: ignore[return-value]
        return redis.Redis.from_pool(redis.ConnectionPool(**options))
    except (TypeError, ValueError) as error:
        reason = hide_password(str(error), url).rpartition("__init__() ")[2]
        raise ConfigError(
            f"{address_of(url)} has an option behind ? that is of no use ({reason}): correct it"
        ) from None


def masters_of(client: redis.Redis) -> list[tuple[str, redis.Redis]]:
    """A client for each server that is written to, with its address in a cluster; not to be closed.

    Raises what the client raises where a cluster does not say what it is made of.
    """
    from ssd.sharing.clients import Cluster

    return client.masters() if isinstance(client, Cluster) else [("", client)]


def server_of(client: redis.Redis, key: str) -> redis.Redis:
    """A client of the server that has ``key``, not to be closed."""
    from ssd.sharing.clients import Cluster

    return client.node_of(key) if isinstance(client, Cluster) else client
