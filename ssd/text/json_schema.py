"""What JSON that a grammar holds a model to looks like: on one line, and without keys that nobody asked for."""

from __future__ import annotations

from typing import Any

# At most one space behind a comma or a colon, as `json.dumps` and most training data have it: where white space was
# free, small models wrote a 15-token object in 51 to 137 tokens.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"}

_ONE = ("additionalProperties", "contains", "items", "propertyNames", "unevaluatedItems")
_LISTS = ("anyOf", "items", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
# A schema with these says of one object in several places: none of them knows all of its keys.
_SEVERAL = frozenset({
    "allOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then", "unevaluatedProperties",
})  # fmt: skip
_BESIDE = ("$ref", "$dynamicRef", "anyOf", "patternProperties")


def closed(schema: Any) -> Any:
    """The schema without keys beyond those it names, where it does not say whether there may be others.

    JSON made by it is JSON of the schema as it was, in which a weak model wrote keys of its own, one of them five
    times. Objects that name no keys stay open, and so does a whole schema whose parts speak of one object together, or
    that is nested beyond Python's own bound: what was given is returned. O(schema).
    """
    try:
        return _closed(schema)
    except (_SeveralError, RecursionError):
        return schema


class _SeveralError(Exception):
    pass


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if not _SEVERAL.isdisjoint(schema) or (properties and any(key in schema for key in _BESIDE)):
        raise _SeveralError
    made = dict(schema)
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            made[key] = _closed(schema[key])
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            made[key] = [_closed(each) for each in schema[key]]
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            made[key] = {name: _closed(each) for name, each in schema[key].items()}
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or "minProperties" in schema:
        return made
    if properties and {*map(str, required)} <= properties.keys():
        made.setdefault("additionalProperties", False)
    return made
