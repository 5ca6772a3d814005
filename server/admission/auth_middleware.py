"""ASGI middleware that handles every HTTP request first: admission, request id, API key, and unexpected errors."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.admission.allowed_sites import KnownSites
from server.admission.connections import TOO_MANY
from server.admission.quotas import Account
from server.admission.registry import Tenants
from server.base.errors import ApiError, ServerNotReady, error_response, uses_anthropic_api
from server.base.request_record import current_record
from ssd.errors import QueueFull, RequestError, quote_value


def path_below_root(scope: Scope) -> str:
    """Return the URL path of a request without the path prefix of a reverse proxy (ASGI's ``root_path``)."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ALWAYS = frozenset({"/live", "/health", "/ping", "/version", "/metrics"})
"""URL paths that are answered even while the server shuts down, so that monitoring can observe it."""
OPEN_PATHS = frozenset({*_ALWAYS, "/openapi.json"})
"""URL paths that can be requested without an API key."""


@dataclass(slots=True)
class AuthMiddleware:
    """ASGI middleware that checks API keys, sets ``x-request-id``, and answers unexpected exceptions with JSON errors.

    The account of an admitted request is stored in ``scope["state"]["account"]``. Responses under /v1 report the
    account's rate limits in their headers. A server that is full or shutting down rejects requests and closes their
    connections.
    """

    app: ASGIApp
    tenants: Tenants = field(kw_only=True)
    sites: KnownSites = field(kw_only=True)
    open_paths: Collection[str] = field(default=(), kw_only=True)
    """Further URL paths that can be requested without an API key."""
    admit: Callable[[], AbstractContextManager[object]] = field(default=nullcontext, kw_only=True)
    """Returns a context in which an HTTP request is handled; raises ServerNotReady while the server shuts down."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
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
                if uses_anthropic_api(scope):
                    answer["request-id"] = request_id
                if account is not None and path_below_root(scope).startswith("/v1/"):
                    answer.update(account.headers())
            await send(message)

        account = self._account(headers)
        if account is not None:
            scope.setdefault("state", {})["account"] = account
            current_record().tenant = account.payer
        try:
            if not self.tenants.is_closed:
                self.sites.check(scope["method"], headers)
            elif (
                account is None
                and scope["method"] != "OPTIONS"
                and path_below_root(scope) not in (*OPEN_PATHS, *self.open_paths)
            ):
                raise ApiError(
                    401,
                    "missing or wrong API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                    code="invalid_api_key",
                )
            await self._admit(scope, receive, send_with_id)
        except Exception as error:
            answer = error_response(error, scope)  # which logs it
            if not started:
                await answer(scope, receive, send_with_id)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if path_below_root(scope) in _ALWAYS:
            await self.app(scope, receive, send)
            return
        with ExitStack() as inside:
            try:
                if scope.get("state", {}).get(TOO_MANY):
                    raise QueueFull("too many connections are open: try again later")
                inside.enter_context(self.admit())
            except (QueueFull, ServerNotReady) as error:
                response = error_response(error, scope)
                response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
            await self.app(scope, receive, send)

    def _account(self, headers: Headers) -> Account | None:
        """Return the account of the request's API key; None if a key is required and the request has no valid key."""
        if not self.tenants.is_closed:
            return self.tenants.everybody
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        found = self.tenants.find(bearer.strip()) if scheme.lower() == "bearer" else None
        return found if found is not None else self.tenants.find(headers.get("x-api-key", "").strip())


def account_of(scope: Scope) -> Account:
    account: Account = scope["state"]["account"]
    return account


CACHE_CONTROL_HEADER = "x-ssd-cache-control"


def allows_caching(headers: Headers) -> bool:
    """Return False if the header ``x-ssd-cache-control`` of a request is "no-store", so that its text is not cached."""
    value = headers.get(CACHE_CONTROL_HEADER, "").strip().lower()
    if value not in ("", "no-store"):
        raise RequestError(
            f"{CACHE_CONTROL_HEADER} must be no-store, got {quote_value(value)}", param=CACHE_CONTROL_HEADER
        )
    return not value
