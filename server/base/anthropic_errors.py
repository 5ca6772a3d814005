"""Errors as Anthropic's clients read them: ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
NO_THREADS = "thread_unsupported_request"
"""The code of a refusal to keep a conversation; agents then send all of it with each request."""


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is for a path of Anthropic's API."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_form(status: int, message: str, code: str | None, request_id: str | None) -> dict[str, Any]:
    """The body of an error with this status. ``code`` : ours; of these only `NO_THREADS` is Anthropic's, too."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code == NO_THREADS:
        error["details"] = {"error_code": code, "unsupported": []}
    return {"type": "error", "error": error, "request_id": request_id}
