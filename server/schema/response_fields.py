"""Fields of /v1/responses outside its schema: which are refused, and which may be left unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.schema import fields

_AS_ELSEWHERE = frozenset(
    {
        "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "request_id", "session_id",
    }
)  # fmt: skip

IGNORED: Mapping[str, str] = {
    **{name: reason for name, reason in fields.IGNORED.items() if name in _AS_ELSEWHERE},
    "max_tool_calls": "it bounds the tools that a server runs, and here clients run them",
    "background_options": "nothing runs in the background",
    "access_programs": "they belong to OpenAI's accounts",
}
"""Fields that may be left unread, and why they are."""

_NOT_STORED = "this server stores no responses. Send the whole conversation as input, with the output of earlier ones"
_NOT_HERE = "nothing here does that"

REFUSED: fields.Refused = {
    "previous_response_id": ((), _NOT_STORED),
    "conversation": ((), _NOT_STORED),
    "background": ((False,), "a response that is made in the background is fetched later, but " + _NOT_STORED),
    "prompt": ((), "prompt templates are stored, and nothing is stored here. Send the text as instructions and input"),
    "truncation": (("disabled",), "the input is never shortened. Leave the oldest items out"),
    "context_management": (([],), "the input is never shortened. Leave the oldest items out"),
    "moderation": ((), _NOT_HERE),
    "image": ((), _NOT_HERE),
}
"""Fields that would change the output, or where it goes, each with values that mean "without it" and the reason."""


def honoured_response_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that the schema must understand: no nulls, nothing ignored.

    Raises RequestError for a field that cannot be honoured, with its reason.
    """
    honoured = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in REFUSED:
            fields.require_without(name, value, REFUSED)
        else:
            honoured[name] = value
    return honoured
