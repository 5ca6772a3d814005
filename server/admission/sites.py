"""The sites that may use a server without keys: a browser sends requests for every page that its user looks at."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers

from server.base.errors import ApiError
from ssd.errors import shown

_HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::[0-9]*)?")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class KnownSites:
    """Refuses requests that a page of another site makes, also if that page's name leads to this server."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        """``hosts`` : names of this server besides IP addresses and localhost. ``origins`` : sites that may call."""
        self._hosts = frozenset(map(_name, hosts))
        self._suffixes = tuple(host[1:] for host in self._hosts if host.startswith("*."))
        self._origins = frozenset(origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raise ApiError (403, 415) for the headers of a request that another site may have caused."""
        host, origin, kind = headers.get("host", ""), headers.get("origin"), headers.get("content-type")
        if not self._knows(_name(host)):
            raise ApiError(
                403, f"this server has no API keys and does not know the host name {shown(_name(host))}: start it with "
                "--allowed-hosts and this name, or with API keys",
                code="host_not_allowed",
            )  # fmt: skip
        if origin is not None:
            is_foreign = origin.partition("://")[2] != host
        else:  # a link that leads here does no harm: the page that has it cannot read what comes
            is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
            is_foreign = headers.get("sec-fetch-site") == "cross-site" and not is_link
        if is_foreign and not self._origins & {origin, "*"}:
            raise ApiError(
                403, f"this server has no API keys and answers no page of {shown(origin or 'another site')}: start it "
                "with --allowed-origins and the site, or with API keys",
                code="origin_not_allowed",
            )  # fmt: skip
        if kind is not None and method not in _READS and kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                415, f"a server without API keys takes only JSON: send the header 'content-type: application/json', "
                f"not {shown(kind)}",
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
    """The name or address in a Host header, without the port."""
    found = _HOST.fullmatch(host)
    return (host if found is None else found[1] or found[2] or "").rstrip(".").lower()
