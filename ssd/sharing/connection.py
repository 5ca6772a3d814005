"""Connections that never keep a thread waiting for long and never show their password."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any
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
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 3.0


def connect(url: str) -> redis.Redis:
    """A client with a connection pool of its own. Nothing is sent yet.

    ``url`` : redis://, rediss:// or unix://, with user, password, database and options as redis-py reads them, but for
    the time-outs and the protocol. Raises ConfigError, without the URL's password. What is asked of the client may
    raise OversizedReplyError.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.connection import parse_url
        from redis.retry import Retry

        from ssd.sharing.bounded_parser import BoundedParser
    except ModuleNotFoundError:
        raise ConfigError("sharing through Redis needs the redis package: pip install 'ssd-serving[redis]'") from None
    try:
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except Exception:  # its message may quote the URL
        raise ConfigError(
            f"{hide_password(url)} is not a Redis URL: write redis://[user:password@]host:port/0, or rediss:// for "
            "TLS, and percent-encode special characters of the password"
        ) from None
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
    return redis.Redis.from_pool(redis.ConnectionPool(**options | settings))  # the URL's options do not win


def passwords_in(url: str) -> list[str]:
    """The secrets a URL carries, as written and decoded, longest first."""
    found = set(re.findall(r"[?&](?:password|ssl_password)=([^&#]*)", url))
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
        return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
    except ValueError:
        return "an unreadable URL"


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
