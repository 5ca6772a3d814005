"""URLs of one server, of a service that sentinels watch over, and of a cluster; and what of them may be shown.

::

    redis://[user:password@]host:port/0                          one server; unix:///path for a socket
    redis-sentinel://[user:password@]h1:26379,h2,h3/service/0    the master of ``service``, by these sentinels
    redis-cluster://[user:password@]h1:6379,h2                   a cluster, by some of its nodes

``rediss`` in place of ``redis`` means TLS, to sentinels and nodes as well. Options follow behind ``?``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from ssd.errors import ConfigError

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
    kind = {"redis-sentinel": "sentinel", "redis-cluster": "cluster"}.get(scheme.replace("rediss-", "redis-"))
    if kind is None:
        return Address("server", (), "", parse_url(url), {})  # type: ignore[no-untyped-call]
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    user, at, names = authority.rpartition("@")
    service, database = _service(path) if kind == "sentinel" else ("", _no_database(path))
    plain = scheme.partition("-")[0]
    options: dict[str, Any] = parse_url(f"{plain}://{user}{at}host/{database}?{query}")  # type: ignore[no-untyped-call]
    hosts = tuple(_host(name, _SENTINEL_PORT if kind == "sentinel" else 6379) for name in names.split(","))
    if not 1 <= len(hosts) <= _MOST_HOSTS:
        raise ValueError("hosts")
    del options["host"]
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    about_nodes = {"username", "password", "db"}
    sentinel_options = {name: value for name, value in options.items() if name not in about_nodes}
    sentinel_options |= {name: value for name, value in own.items() if value is not None}
    return Address("sentinel" if kind == "sentinel" else "cluster", hosts, service, options, sentinel_options)


def _service(path: str) -> tuple[str, int]:
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("service")
    return unquote(service), int(database or 0)


def _no_database(path: str) -> int:
    if path not in ("", "0"):
        raise ValueError("a cluster has no databases")
    return 0


def _host(name: str, default_port: int) -> Host:
    parts = urlsplit(f"redis://{name}")
    if not parts.hostname or parts.path or parts.username is not None:
        raise ValueError(name)
    return parts.hostname, parts.port or default_port
