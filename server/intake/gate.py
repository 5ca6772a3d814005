"""What every request passes first: its id, the key and whose it is, and the last resort for errors."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.base.anthropic_errors import speaks_anthropic
from server.base.errors import ApiError, error_response
from server.base.record import current_record
from server.intake.root_path import path_below_root
from server.tenants.account import Account
from server.tenants.registry import Tenants

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_OPEN_PATHS = frozenset({"/live", "/health", "/ping", "/version", "/metrics", "/openapi.json"})
"""Where there are keys, everything else needs one: an endpoint is closed until it is named here."""


class Gate:
    """ASGI middleware: ``x-request-id`` on every response, keys, a JSON body for unforeseen errors.

    Where there are keys, ``scope["state"]["tenant"]`` is the account of the tenant whose key a request brings, and
    answers under /v1 say what is left of its rates.
    """

    def __init__(self, app: ASGIApp, *, tenants: Tenants, open_paths: Collection[str] = ()) -> None:
        """``open_paths`` : what is open beside the paths that always are."""
        self._app = app
        self._tenants = tenants
        self._open_paths = _OPEN_PATHS | set(open_paths)

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
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = request_id
                if speaks_anthropic(scope):
                    answer["request-id"] = request_id
                if tenant is not None and path_below_root(scope).startswith("/v1/"):
                    answer.update(tenant.headers())
            await send(message)

        tenant = self._tenant(headers) if self._tenants.is_closed else None
        if tenant is not None:
            scope.setdefault("state", {})["tenant"] = tenant
            current_record().tenant = tenant.name
        elif self._needs_key(scope):
            refusal = ApiError(
                401,
                "missing or wrong API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
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
        if not self._tenants.is_closed or scope["method"] == "OPTIONS":
            return False
        return path_below_root(scope) not in self._open_paths

    def _tenant(self, headers: Headers) -> Account | None:
        """Whose key a request brings; None without a right one."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        found = self._tenants.find(bearer.strip()) if scheme.lower() == "bearer" else None
        return found if found is not None else self._tenants.find(headers.get("x-api-key", "").strip())


def tenant_of(scope: Scope) -> Account | None:
    """Whose key the request brought; None where there are no keys."""
    tenant: Account | None = scope.get("state", {}).get("tenant")
    return tenant
