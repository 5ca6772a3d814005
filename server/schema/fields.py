"""Request fields outside the schema: which are refused, and which may be left unread without changing the output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ssd.errors import RequestError

IGNORED: Mapping[str, str] = {
    "metadata": "nothing is stored that it could be kept with",
    "user": "tenants are told apart by their keys",
    "safety_identifier": "tenants are told apart by their keys",
    "service_tier": "there is one",
    "verbosity": "OpenAI's own models honour it",
    "prompt_cache_key": "the prefix cache needs no hint",
    "prompt_cache_options": "the prefix cache needs no hint",
    "prompt_cache_retention": "the prefix cache needs no hint",
    "request_id": "the header x-request-id names a request",
    "session_id": "no session is kept",
    "spaces_between_special_tokens": "tokenizers that are read here put none",
}
"""Fields that may be left unread without changing the output, and why they are."""

ELSEWHERE = {
    "cache_prompt", "detokenize", "do_sample", "enable_thinking", "grammar", "kv_transfer_params", "max_new_tokens",
    "mirostat", "n_predict", "options", "provider", "reasoning", "repeat_last_n", "repeat_penalty", "slot_id",
    "thinking", "top_a", "transforms", "typical_p", "usage", "vllm_xargs",
}  # fmt: skip
"""Fields that other servers know and this one does not: an operator's log may name them."""

Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that would change the output and cannot be honoured: values that mean "without it", and the reason."""

REFUSED: Refused = {
    "suffix": (("",), "text is continued here, not filled in"),
    "use_beam_search": ((False,), "drafts are verified against one continuation, not several at a time"),
    "length_penalty": ((1.0, 1), "it ranks the beams of a beam search, and there is none"),
    "modalities": ((["text"],), "the model reads and writes text alone"),
    "audio": ((), "the model reads and writes text alone"),
    "web_search_options": ((), "the server reaches no network. Give the model a tool that does"),
    "truncate_prompt_tokens": ((), "a prompt is never shortened. Send the part that counts"),
}
"""Those of completions and chat completions. Where a schema has a field of the name, that counts."""

BEST_OF = "choices are returned, not ranked. Send it equal to n, or leave it out"


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
        elif name in REFUSED:
            require_without(name, value, REFUSED)
        elif name == "best_of":
            _require_best_of(value, body.get("n"))
        else:
            honoured[name] = value
    return honoured


def require_without(name: str, value: Any, refused: Refused) -> None:
    """Raise RequestError, with the reason, unless ``value`` means that the field is not used."""
    values, reason = refused[name]
    # By type too: to Python, 0 equals False, and ``logprobs: 0`` asks for the chosen token's.
    if not any(type(value) is type(neutral) and value == neutral for neutral in values):
        raise RequestError(f"{name} is not supported: {reason}", param=name)


def _require_best_of(best_of: Any, n: Any) -> None:
    if type(best_of) is not int or best_of != (1 if n is None else n):
        raise RequestError(f"best_of is not supported: {BEST_OF}", param="best_of")
