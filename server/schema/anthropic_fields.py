"""Fields of /v1/messages outside its schema: which are refused, and which may be left unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.base.anthropic_errors import NO_THREADS
from server.base.errors import ApiError
from server.schema import fields

IGNORED: Mapping[str, str] = {
    "metadata": fields.IGNORED["metadata"],
    "service_tier": fields.IGNORED["service_tier"],
    "cache_control": fields.IGNORED["prompt_cache_key"] + ", here and in blocks and tools",
    "user_profile_id": fields.IGNORED["user"],
    "workspace_id": fields.IGNORED["user"],
    "diagnostics": "nothing is kept that a request could be compared with",
    "speed": "there is one",
}
"""Fields that may be left unread without changing the output, and why they are."""

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_NO_TOOLS = "the server runs no tools and reaches no network. Give the model tools, and run them yourself"

REFUSED: fields.Refused = {
    "container": ((), _NO_TOOLS),
    "mcp_servers": (([],), _NO_TOOLS),
    "context_management": (
        ({}, {"edits": []}, _KEEP_ALL), "a conversation is never shortened. Leave out what is not needed",
    ),
    "thread": ((), "no conversation is kept here. Send the whole of it with each request"),
    "inference_geo": (("global",), "the server does not know where it stands"),
}  # fmt: skip
"""Fields that would change the output, or where it is made, each with values that mean "without it" and the reason."""


def honoured_anthropic_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that the schema must understand: no nulls, nothing ignored, nothing neutral.

    Raises RequestError for a field that cannot be honoured, with its reason; ApiError for ``thread``, with the code by
    which Anthropic's client knows to do without.
    """
    honoured = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name == "thread":
            raise ApiError(400, f"thread is not supported: {REFUSED[name][1]}", param=name, code=NO_THREADS)
        if name in REFUSED:
            fields.require_without(name, value, REFUSED)
        else:
            honoured[name] = value
    return honoured
