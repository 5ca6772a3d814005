"""The functions of a request, as far as reading a call needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Functions = Mapping[str, Mapping[str, Any]]
"""Names of the functions that may be called, each with the JSON schema of its parameters."""

_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})


def types_of(functions: Functions, name: str, parameter: str) -> frozenset[str]:
    """JSON types a parameter may have by its schema, ``anyOf`` and the like looked into once; empty: unknown."""
    properties = _mapping(functions.get(name)).get("properties")
    return frozenset(_types(_mapping(_mapping(properties).get(parameter)), 1))


def _types(schema: Mapping[str, Any], levels: int) -> set[str]:
    given = schema.get("type")
    found = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)} & _TYPES
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not found and isinstance(values, list):
        found |= {_type_of(value) for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if levels and isinstance(parts, list):
            for part in parts:
                found |= _types(_mapping(part), levels - 1)
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def is_json(text: str, *, strict: bool = True) -> bool:
    """Whether it is one value; without ``strict`` its strings may hold line ends and other control characters."""
    try:
        json.loads(text, strict=strict)
    except (ValueError, RecursionError):
        return False
    return True


def json_of(text: str, types: frozenset[str]) -> str:
    """A value that was written without quotation marks as JSON of one of ``types``; as a string where it is none.

    Where the type is unknown, lists and objects are taken for what they are and all else is a string.
    """
    value: Any
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    kind = "integer" if isinstance(value, int) and not isinstance(value, bool) else _type_of(value)
    allowed = types or {"object", "array"}
    fits = kind in allowed or (kind == "integer" and "number" in allowed)
    if value is text or not (fits or (types and "string" not in types)):
        return json_string(text)
    written = text.strip()
    return json.dumps(value) if written in {"True", "False", "None"} else written


def json_string(text: str) -> str:
    """``text`` as a JSON string."""
    return '"' + json_characters(text) + '"'


def json_characters(text: str) -> str:
    """``text`` as it stands between the quotation marks of JSON; halves of surrogate pairs are escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]
