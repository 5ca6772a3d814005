"""Errors as Anthropic's clients read them: ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is for a path of Anthropic's API."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_form(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    """The body of an error with this status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
