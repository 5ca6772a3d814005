"""Reading of API responses as gateways store them: streams are joined into one body, and error pages recognized."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_STREAM: Final = re.compile(r"\s*(?:(?::|event:|id:|retry:)[^\n]*\n\s*)*data: ?[\[{]")
_ERROR_PAGE: Final = re.compile(
    r"\s*(?:upstream (?:connect error|request timeout|prematurely closed|timed out)|no healthy upstream"
    r"|error code: [45]\d\d"
    r"|<(?:!doctype )?html\b.{0,2000}?<title>[^<]*(?:\b[45]\d\d\b|error|unavailable|time-?out)"
    r"|(?:[45]\d\d[ :-]*)?(?:too many requests|internal server error|bad gateway|service (?:temporarily )?unavailable"
    r"|gateway time-?out|stream timeout)\W*\Z"
    r"|[45]\d\d[ :-]+(?:page )?(?:bad request|unauthorized|forbidden|not found)\W*\Z)",
    re.IGNORECASE | re.DOTALL,
)
"""Matches error pages of Envoy, nginx, Cloudflare and other gateways."""
_ERROR_KEYS: Final = frozenset(
    "error detail message code status status_code type param object request_id path timestamp success".split()
)
STATUSES: Final = tuple(
    "status status_code statusCode response_status responseStatus http_status http_status_code".split()
)
_FAILED: Final = re.compile("[45][0-9][0-9]")
_GROWING: Final = ("content", "text", "arguments", "reasoning_content", "reasoning", "response", "thinking", "refusal")


def is_error(response: Any) -> bool:
    """Return whether a recorded response is an error page, an error body, or has a status of 400 or more."""
    if isinstance(response, str):
        return _ERROR_PAGE.match(response) is not None
    if not isinstance(response, Mapping):
        return False
    statuses = [response[key] for key in STATUSES if key in response]
    if any(_FAILED.fullmatch(str(each)) for each in statuses) or "error" in (
        response.get("object"),
        response.get("type"),
    ):
        return True
    if not response.keys() <= _ERROR_KEYS:
        return False
    says_more = isinstance(response.get("message"), str) and len(response) > 1
    return bool(response.get("error") or response.get("detail") or says_more)


def find_chunks(value: Any) -> list[Mapping[str, Any]] | None:
    """Return the chunks of a streamed API response, from its text or from a list; None if it is not a stream."""
    if isinstance(value, str):
        if not _STREAM.match(value):
            is_json = value[:1] == "{" and "\n{" in value  # one chunk per line
            return find_chunks([_parse_or_none(line) for line in value.splitlines() if line]) if is_json else None
        data = (line[5:].strip() for line in value.splitlines() if line.startswith("data:"))
        return [chunk for chunk in map(_parse_or_none, data) if isinstance(chunk, dict)]
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(each, str) for each in value):
        return find_chunks("\n".join(value))
    return value if all(isinstance(each, dict) for each in value) and any(map(_is_chunk, value)) else None


def _parse_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_chunk(value: Mapping[str, Any]) -> bool:
    kind, choices = value.get("type"), value.get("choices")
    return (
        (isinstance(choices, list) and any(isinstance(each, dict) and "delta" in each for each in choices))
        or (isinstance(kind, str) and kind.startswith(("response.", "message_", "content_block_")))
        or value.get("done") is False
    )


def join_chunks(chunks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Merge the chunks of a streamed response into the equivalent non-streaming response body. O(characters)."""
    body: dict[str, Any] = {}
    for chunk in chunks:
        kind, index = chunk.get("type"), chunk.get("index")
        if isinstance(whole := chunk.get("response"), dict) and kind in ("response.completed", "response.incomplete"):
            return whole
        if kind == "response.output_text.delta":
            _merge_chunk(body, {"text": chunk.get("delta")})
        elif kind == "content_block_start":
            _merge_chunk(body, {"content": [{"index": index, **as_mapping(chunk.get("content_block")), "input": ""}]})
        elif kind == "content_block_delta":
            delta = as_mapping(chunk.get("delta"))
            more = {"text": delta.get("text"), "thinking": delta.get("thinking"), "input": delta.get("partial_json")}
            _merge_chunk(body, {"content": [{"index": index, **more}]})
        elif not isinstance(kind, str) or not kind.startswith(("message_", "response.")):
            _merge_chunk(body, {key: chunk[key] for key in ("choices", "message", "response") if key in chunk})
    body = _join_pieces(body)
    for choice in body.get("choices", ()):
        if "delta" in choice:
            choice["message"] = {**choice["delta"], "role": "assistant"}
    return body


def _merge_chunk(whole: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Merge a chunk of a streamed response into the body: append its texts, and merge list elements by index."""
    for key, value in more.items():
        if isinstance(value, Mapping):
            _merge_chunk(_get_or_create(whole, key), value)
        elif isinstance(value, list):
            for number, each in enumerate(value):
                if isinstance(each, Mapping):
                    _merge_chunk(_get_or_create(_get_or_create(whole, key, _Elements), each.get("index", number)), each)
        elif isinstance(value, str) and (key in _GROWING or key == "input"):
            whole.setdefault(key, _Pieces())
            if isinstance(whole[key], _Pieces):
                whole[key].append(value)
        elif value is not None:
            whole[key] = value


class _Pieces(list[str]): ...


class _Elements(dict[Any, Any]): ...


def _get_or_create(whole: dict[Any, Any], key: Any, kind: type[dict[Any, Any]] = dict) -> dict[Any, Any]:
    if not isinstance(whole.get(key), kind):
        whole[key] = kind()
    found: dict[Any, Any] = whole[key]
    return found


def _join_pieces(value: Any) -> Any:
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, _Elements):
        return [_join_pieces(each) for each in value.values()]
    return {key: _join_pieces(each) for key, each in value.items()} if isinstance(value, dict) else value


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
