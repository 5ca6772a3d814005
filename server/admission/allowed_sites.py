"""The hosts and origins that may call a server without keys, as a browser sends requests for any page it shows."""

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
    """Rejects requests from pages of other sites, even if that site's name resolves to this server (DNS rebinding)."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        """Store the allowed names.

        Args:
            hosts: The server's names in addition to IP addresses and localhost.
            origins: The origins whose pages may call the server.
        """
        self._hosts = frozenset(map(_name, hosts))
        self._suffixes = tuple(host[1:] for host in self._hosts if host.startswith("*."))
        self._origins = frozenset(origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raise ApiError (403, 415) if another site may have caused the request with these headers."""
        host, origin, kind = headers.get("host", ""), headers.get("origin"), headers.get("content-type")
        if not self._knows(_name(host)):
            raise ApiError(
                403, f"this server has no API keys and does not know the host name {quote_value(_name(host))}: start "
                "it with --allowed-hosts and this name, or with API keys",
                code="host_not_allowed",
            )  # fmt: skip
        if origin is not None:
            is_foreign = origin.partition("://")[2] != host
        else:  # a link that leads here does no harm: the page that has it cannot read what comes
            is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
            is_foreign = headers.get("sec-fetch-site") == "cross-site" and not is_link
        if is_foreign and not self._origins & {origin, "*"}:
            raise ApiError(
                403, f"this server has no API keys and answers no page of {quote_value(origin or 'another site')}: "
                "start it with --allowed-origins and the site, or with API keys",
                code="origin_not_allowed",
            )  # fmt: skip
        if kind is not None and method not in _READS and kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                415, f"a server without API keys takes only JSON: send the header 'content-type: application/json', "
                f"not {quote_value(kind)}",
                code="unsupported_content_type",
            )  # fmt: skip

    def _knows(self, name: str) -> bool:
        if {name, "*"} & self._hosts or name in ("", "localhost") or name.endswith((".localhost", *self._suffixes)):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _name(host: str) -> str:
    """Return the name or address in a Host header, without the port."""
    found = _HOST.fullmatch(host)
    return (host if found is None else found[1] or found[2] or "").rstrip(".").lower()
