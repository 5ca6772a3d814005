"""Who is let in: nobody new once the server is told to stop, nor on more connections than it holds."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from server.base.errors import ServerNotReady, error_response
from server.base.limits import SMALL_BODY_BYTES
from server.intake.connections import TOO_MANY
from server.running.engine_thread import Worker
from ssd.errors import QueueFull

_ALWAYS = frozenset({"/live", "/health", "/ping", "/version", "/metrics"})
"""Whoever supervises the server is answered to the end."""
_DISCARD_S = 1.0
"""A client that is refused may send its body for this long before it has the answer."""


class Admission:
    """ASGI middleware: a refusal closes its connection, and who is let in is counted until it has its answer."""

    def __init__(self, app: ASGIApp, *, worker: Worker) -> None:
        self._app = app
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in _ALWAYS:
            await self._app(scope, receive, send)
        elif scope.get("state", {}).get(TOO_MANY):
            await _refuse(QueueFull("too many connections are open: try again later"), scope, receive, send)
        else:
            try:
                self._worker.let_in()
            except ServerNotReady as error:
                await _refuse(error, scope, receive, send)
                return
            try:
                await self._app(scope, receive, send)
            finally:
                self._worker.let_out()


async def _refuse(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, once a small body has come: a client that is still sending may not see it."""
    num_bytes = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while num_bytes <= SMALL_BODY_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    response = error_response(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)
