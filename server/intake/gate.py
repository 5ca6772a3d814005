"""What every request passes first: its id, the key and whose it is, and the last resort for errors."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.base.errors import ApiError, error_response
from server.base.record import current_record
from server.intake.root_path import path_below_root

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN_PATHS = frozenset({"/live", "/health", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"})
"""Where there are keys, everything else needs one: an endpoint is closed until it is named here."""


class Gate:
    """ASGI middleware: ``x-request-id`` on every response, bearer keys, a JSON body for unforeseen errors.

    Where there are keys, ``scope["state"]["tenant"]`` tells the requests of one key from those of another. It is keyed
    with a secret of this process, so neither it nor its like from another process tells anything about the key.
    """

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...], open_paths: Collection[str] = ()) -> None:
        """``open_paths`` : what is open beside the paths that always are."""
        self._app = app
        self._open_paths = _OPEN_PATHS | set(open_paths)
        self._secret = secrets.token_bytes(32)
        self._tenants = [self._tenant_of(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else f"req_{uuid.uuid4().hex}"
        current_record().request_id = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        tenant = self._tenant(headers)
        if tenant is not None:
            scope.setdefault("state", {})["tenant"] = tenant
        elif self._needs_key(scope):
            refusal = ApiError(
                401, "missing or wrong API key: send the header 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
            await error_response(refusal)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # The request's content stays out of the log: the traceback shows code, not values.
            log.exception("unforeseen error in %s %s", scope["method"], scope["path"])
            if not started:
                await error_response(error)(scope, receive, send_with_id)

    def _needs_key(self, scope: Scope) -> bool:
        return bool(self._tenants) and scope["method"] != "OPTIONS" and path_below_root(scope) not in self._open_paths

    def _tenant(self, headers: Headers) -> str | None:
        """Whose key a request brings; None without a right one."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = self._tenant_of(key.strip())
        # All are compared, each in constant time: how long it takes tells nothing about the keys.
        matches = [hmac.compare_digest(given, tenant) for tenant in self._tenants]
        return given if scheme.lower() == "bearer" and any(matches) else None

    def _tenant_of(self, key: str) -> str:
        return hmac.new(self._secret, key.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def tenant_of(scope: Scope) -> str | None:
    """Whose key the request brought; None where there are no keys."""
    tenant: str | None = scope.get("state", {}).get("tenant")
    return tenant
