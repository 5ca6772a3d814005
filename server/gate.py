"""What every request passes first: its id, the key, and the last resort for errors."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_response

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_LOCKED = frozenset({"/v1", "/tokenize", "/detokenize"})
"""What needs a key beside all under /v1: tokenising is work."""


class Gate:
    """ASGI middleware: ``x-request-id`` on every response, bearer keys, a JSON body for unforeseen errors."""

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else f"req_{uuid.uuid4().hex}"
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if not self._allows(scope, headers):
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

    def _allows(self, scope: Scope, headers: Headers) -> bool:
        path: str = scope["path"]
        if not self._digests or scope["method"] == "OPTIONS" or not (path in _LOCKED or path.startswith("/v1/")):
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # All are compared, each in constant time: how long it takes tells nothing about the keys.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
