"""Names of tool calls."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from typing import Any

_CHARACTERS = string.ascii_letters + string.digits
_SHORT = 9
_IS_SHORT = re.compile(rf"[A-Za-z0-9]{{{_SHORT}}}")


def call_id() -> str:
    """A name that no other call has, as OpenAI's are."""
    return "call_" + _drawn(24)


def short_call_id() -> str:
    """The same as Mistral's chat templates take them, and no others: nine letters and digits."""
    return _drawn(_SHORT)


def _drawn(length: int) -> str:
    return "".join(secrets.choice(_CHARACTERS) for _ in range(length))


def with_short_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with every call's name made short, the same name always alike; what is malformed stays."""
    return [_shortened(message) for message in messages]


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])} if isinstance(call, dict) and isinstance(call.get("id"), str) else call
            for call in calls
        ]
    return changed


def _short(name: str) -> str:
    if _IS_SHORT.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).digest()
    return "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in digest[:_SHORT])
