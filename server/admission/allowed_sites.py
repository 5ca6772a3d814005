"""Protection of servers without API keys against requests that foreign web pages send through a user's browser."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers

from server.base.errors import ApiError
from ssd.errors import quote_value

_HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::[0-9]*)?")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class KnownSites:
    """Rejects HTTP requests that a web page of a foreign site sent through a user's browser.

    The Host header is checked too, because the foreign site's name may resolve to this server (DNS rebinding). Any IP
    address and localhost are allowed as hosts.
    """

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._hosts = frozenset(map(_name, hosts))
        self._suffixes = tuple(host[1:] for host in self._hosts if host.startswith("*."))
        self._origins = frozenset(origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raise ApiError with status 403 or 415 if a foreign web page may have sent the request with these headers."""
        host, origin, kind = headers.get("host", ""), headers.get("origin"), headers.get("content-type")
        if not self._knows(_name(host)):
            raise ApiError(
                403,
                f"this server has no API keys and does not know the host name {quote_value(_name(host))}: start the "
                "server with --allowed-hosts and this name, or with API keys",
                code="host_not_allowed",
            )
        if origin is not None:
            is_foreign = origin.partition("://")[2] != host
        else:  # following a link is harmless: the page with the link cannot read the response
            is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
            is_foreign = headers.get("sec-fetch-site") == "cross-site" and not is_link
        if is_foreign and not self._origins & {origin, "*"}:
            raise ApiError(
                403,
                f"this server has no API keys and rejects pages of {quote_value(origin or 'another site')}: "
                "start the server with --allowed-origins and this site, or with API keys",
                code="origin_not_allowed",
            )
        if kind is not None and method not in _READS and kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                415,
                f"a server without API keys accepts only JSON: send the header 'content-type: application/json', "
                f"not {quote_value(kind)}",
                code="unsupported_content_type",
            )

    def _knows(self, name: str) -> bool:
        if {name, "*"} & self._hosts or name in ("", "localhost") or name.endswith((".localhost", *self._suffixes)):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _name(host: str) -> str:
    found = _HOST.fullmatch(host)
    return (host if found is None else found[1] or found[2] or "").rstrip(".").lower()
