"""JSON schemas as trees: finds subschemas and references, and closes objects to additional keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

Schema = Any
"""A parsed JSON schema: a dict or a bool."""

MAX_EXACT: Final = 2**53  # up to it, 64-bit floats represent all integers

ONE_SUBSCHEMA: Final = ("additionalItems", "additionalProperties", "items")
SUBSCHEMA_LISTS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
NAMED_SUBSCHEMAS: Final = ("$defs", "definitions", "patternProperties", "properties")
"""The keywords whose value is a subschema, a list of subschemas, or an object of named subschemas."""

# A schema with these keywords constrains one object in several places, none of which lists all of its keys.
SEVERAL_PARTS: Final = frozenset({"allOf", "oneOf"})
BESIDE_PROPERTIES: Final = ("$ref", "anyOf", "patternProperties")


class SchemaError(ValueError):
    """Raised if a JSON schema cannot be enforced. The message names the keyword at fault and its JSON pointer."""


def children(node: Mapping[str, Any], at: str) -> Iterator[tuple[Schema, str]]:
    """Yield the direct subschemas of a JSON schema with their JSON pointers; ``at`` is the pointer of ``node``."""
    for key in ONE_SUBSCHEMA:
        if isinstance(node.get(key), (dict, bool)):
            yield node[key], f"{at}/{key}"
    for key in SUBSCHEMA_LISTS:
        if isinstance(node.get(key), list):
            yield from ((each, f"{at}/{key}/{number}") for number, each in enumerate(node[key]))
    for key in NAMED_SUBSCHEMAS:
        if isinstance(node.get(key), dict):
            yield from ((each, f"{at}/{key}/{escape(name)}") for name, each in node[key].items())


def resolve(root: Schema, reference: object) -> Schema | None:
    """Return the subschema to which a ``$ref`` within the schema ``root`` points; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    found = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and re.fullmatch("[0-9]{1,9}", name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def subschema_at(root: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return the subschema at a JSON pointer as a schema of its own, with everything to which it refers. O(schema)."""

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, dict):
            return value
        made = {key: moved(each) for key, each in value.items()}
        if resolve(root, made.get("$ref")) is not None:
            made["$ref"] = "#/root" + made["$ref"][1:]
        return made

    part = resolve(root, "#" + quote(at))
    if '"$ref"' not in json.dumps(part):
        return part if isinstance(part, dict) else {"allOf": [part]}
    return {"$ref": "#/root" + quote(at), "root": moved(root)}


def is_beyond_exact(value: Any) -> bool:
    """Return whether a JSON value contains a number of 2^53 or more, which 64-bit floats may not represent."""
    if isinstance(value, dict):
        return any(map(is_beyond_exact, value.values()))
    if isinstance(value, list):
        return any(map(is_beyond_exact, value))
    return not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) >= MAX_EXACT


def escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}


def types_of(node: Mapping[str, Any]) -> set[str] | None:
    """Return the types that the keywords type, const and enum allow (integers as "number"); None if all are allowed."""
    given = node.get("type")
    found: set[str] | None = None
    if isinstance(given, (str, list)):
        named = [given] if isinstance(given, str) else given
        found = {"number" if name == "integer" else name for name in named if isinstance(name, str)}
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if values is not None:
        kinds = {_KINDS.get(type(value), "null") for value in values}
        found = kinds if found is None else found & kinds
    return found


def listed_values(node: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the values of the keyword const or enum as JSON text (1.0 is written as 1); None if there is neither."""
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if values is None:
        return None
    return frozenset(
        str(int(value)) if isinstance(value, float) and value.is_integer() else json.dumps(value, sort_keys=True)
        for value in values
    )


def close_objects(schema: Schema) -> Schema:
    """Set additionalProperties to false for each object whose schema does not say whether additional keys are allowed.

    Otherwise a weak model may invent keys; one model wrote the same key five times. All values that the result allows
    are also valid under the original schema. Objects without named keys stay open. The schema is returned unchanged if
    several of its parts constrain one object together (e.g. allOf), because none of them lists all keys, or if it is
    nested too deeply for Python. O(schema).
    """
    try:
        return _closed(schema)
    except (_SeveralError, RecursionError):
        return schema


class _SeveralError(Exception):
    pass


def _closed(schema: Schema) -> Schema:
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if not SEVERAL_PARTS.isdisjoint(_without_patterns(schema)) or (
        properties and any(key in schema for key in BESIDE_PROPERTIES)
    ):
        raise _SeveralError
    made = dict(schema)
    for key in ONE_SUBSCHEMA:
        if isinstance(schema.get(key), dict):
            made[key] = _closed(schema[key])
    for key in SUBSCHEMA_LISTS:
        if isinstance(schema.get(key), list):
            made[key] = [_closed(each) for each in schema[key]]
    for key in NAMED_SUBSCHEMAS:
        if isinstance(schema.get(key), dict):
            made[key] = {name: _closed(each) for name, each in schema[key].items()}
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or "minProperties" in schema:
        return made
    if properties and {*map(str, required)} <= properties.keys():
        made.setdefault("additionalProperties", False)
    return made


def _without_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    parts = schema.get("allOf")
    if isinstance(parts, list) and all(isinstance(part, dict) and part.keys() == {"pattern"} for part in parts):
        return {key: value for key, value in schema.items() if key != "allOf"}
    return schema
