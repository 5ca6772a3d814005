"""Request fields outside the schema: which are refused, and which may be left unread without changing the output."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ssd.errors import RequestError

IGNORED = frozenset(
    {
        "metadata", "user", "service_tier", "safety_identifier", "verbosity", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "request_id", "session_id",
        "spaces_between_special_tokens",
    }
)  # fmt: skip
"""They concern billing, routing, scheduling, features that are refused anyway, or tokenizers of another kind."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "truncate_prompt_tokens": (),
    "length_penalty": (1.0, 1),
}
"""Fields that would change the output and cannot be honoured, each with the values that mean "without it". Where a
schema has a field of the name, that counts."""


def honoured_fields(body: dict[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a request that the schema must understand: no nulls, nothing ignored, nothing neutral.

    ``known`` : names that the schema has, which stay.
    Raises RequestError for a field that would change the output and cannot be honoured.
    """
    honoured = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            honoured[name] = value
        elif name in IGNORED:
            continue
        elif name in NEUTRAL:
            _require_neutral(name, value)
        elif name == "best_of":
            _require_best_of(value, body.get("n"))
        else:
            honoured[name] = value
    return honoured


def _require_neutral(name: str, value: Any) -> None:
    # By type too: to Python, 0 equals False, and ``logprobs: 0`` asks for the chosen token's.
    if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[name]):
        allowed = " or ".join(["leave it out", *(f"send {neutral!r}" for neutral in NEUTRAL[name])])
        raise RequestError(f"{name} is not supported by this server: {allowed}", param=name)


def _require_best_of(best_of: Any, n: Any) -> None:
    if type(best_of) is not int or best_of != (1 if n is None else n):
        raise RequestError("best_of is not supported by this server unless it equals n", param="best_of")
