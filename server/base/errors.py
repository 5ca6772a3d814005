"""HTTP errors in OpenAI's form, ``{"error": {"message", "type", "param", "code"}}``.

For Anthropic's API: ``{"type": "error", "error": {"type", "message"}, "request_id"}``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from server.base.request_record import current_record, rejection_reason
from ssd.errors import ContextTooLong, EngineError, EngineStopped, QueueFull, RequestError, quote_value

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
NO_THREADS = "thread_unsupported_request"
"""The error code for requests that use a stored conversation, because the server stores no conversations. Clients that
know the code then send the whole conversation with each request.
"""


def uses_anthropic_api(scope: Scope) -> bool:
    """Return whether an HTTP request uses Anthropic's API.

    The path decides. /v1/models exists in both APIs, so there the header ``anthropic-version`` decides.
    """
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    if path.startswith("/v1/models"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path == "/v1/messages" or path.startswith("/v1/messages/")


RETRY_AFTER_S = 1
_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},  # the rest of the request's body is not read
    503: {"retry-after": str(RETRY_AFTER_S)},
}


class ServerNotReady(EngineError):
    """The model is being loaded or the service is shutting down; the client should retry."""


class EngineFailed(EngineError):
    """The engine's thread ended with an error; all requests fail until the server is restarted."""


class RequestFailed(EngineError):
    """A request failed inside the engine, which continues to serve others."""


class ApiError(Exception):
    """An error with an HTTP status code, e.g. for a wrong API key.

    Engine failures and invalid parameters have exceptions of their own, see `as_api_error`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create an error. ``kind`` becomes the JSON field "type"; ``headers`` replace the status's default headers."""
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = _HEADERS.get(status, {}) if headers is None else headers


def model_not_found(name: str, served: str) -> ApiError:
    message = f"The model {quote_value(name)} does not exist; this server has {served!r}."
    return ApiError(404, message, param="model", code="model_not_found")


_OURS: Mapping[type[Exception], tuple[int, str]] = {
    QueueFull: (503, "queue_full"),
    ServerNotReady: (503, "not_ready"),
    EngineStopped: (503, "not_ready"),
    RequestFailed: (500, "request_failed"),
    EngineFailed: (500, "engine_failed"),
}


def as_api_error(error: Exception) -> ApiError:
    """Convert any exception to an `ApiError`. Unknown exceptions are logged and become a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
        return ApiError(400, str(error), param=error.param, code=code)
    for kind, (status, code_of_it) in _OURS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), kind="server_error", code=code_of_it)
    # The request's content stays out of the log: the traceback shows code, not values.
    log.error("unexpected error in request %s", current_record().request_id, exc_info=error)
    return ApiError(500, "internal error; see the server's log", kind="server_error")


def error_body(error: Exception) -> dict[str, Any]:
    found = _record_rejection(error)
    return {"error": {"message": str(found), "type": found.kind, "param": found.param, "code": found.code}}


def anthropic_error_body(error: Exception) -> dict[str, Any]:
    """Return the JSON body of an error in Anthropic's form; it has no error code, except `NO_THREADS`."""
    found = _record_rejection(error)
    kind = _TYPES.get(found.status, "invalid_request_error" if found.status < 500 else "api_error")
    body: dict[str, Any] = {"type": kind, "message": str(found)}
    if found.code == NO_THREADS:
        body["details"] = {"error_code": found.code, "unsupported": []}
    return {"type": "error", "error": body, "request_id": current_record().request_id}


def _record_rejection(error: Exception) -> ApiError:
    found = as_api_error(error)
    record = current_record()
    record.refusal, record.param = rejection_reason(found.status, found.code) or "failed", found.param
    return found


def error_response(error: Exception, scope: Scope) -> JSONResponse:
    found = as_api_error(error)
    body = anthropic_error_body(found) if uses_anthropic_api(scope) else error_body(found)
    return JSONResponse(body, found.status, found.headers)


async def answer_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "there is no such endpoint: /docs lists all endpoints" if error.status_code == 404 else error.detail
    message = f"{what}: {request.method} {request.url.path:.200}"
    response = error_response(ApiError(error.status_code, message), request.scope)
    response.headers.update(error.headers or {})
    return response
