"""Compiles JSON schemas with numbers that 64-bit floats cannot represent to Lark rules with all digits of the numbers.

Only the path from the schema's root to such a number becomes rules. All other parts stay JSON schemas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from ssd.text.schema_tree import Schema, SchemaError, children, escape, is_beyond_exact, resolve, subschema_at, types_of

_BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
_CONSTRAINTS = _BOUNDS | {
    *("$ref", "allOf", "anyOf", "const", "enum", "format", "multipleOf", "oneOf", "pattern", "type"),
    *("additionalItems", "items", "maxItems", "maxLength", "minItems", "minLength", "prefixItems"),
    *("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "required"),
}


def has_inexact_constants(root: Schema, node: Schema, seen: set[int] | None = None) -> bool:
    """Return whether an enum or const in a JSON schema has a number of 2^53 or more.

    A 64-bit float may not represent such a number. ``root`` is the whole schema, in which references are resolved. Only
    the part ``node`` and everything that it refers to are searched. ``seen`` are the ids of parts that were searched
    already.
    """
    seen = set() if seen is None else seen
    if not isinstance(node, dict) or id(node) in seen:
        return False
    seen.add(id(node))
    if is_beyond_exact([node.get("enum"), node.get("const")]):
        return True
    parts = [part for part, pointer in children(node, "") if not pointer.startswith(("/$defs/", "/definitions/"))]
    return any(has_inexact_constants(root, part, seen) for part in [*parts, resolve(root, node.get("$ref"))])


class ExactRules:
    """Lark grammar rules that replace a JSON schema with numbers beyond 2^53. They contain all digits of these numbers.

    llguidance computes with 64-bit floats, so it cannot enforce such numbers in a JSON schema.

    Attributes:
        rules: The body of each rule, by the rule's name.
    """

    def __init__(self, root: dict[str, Any], prefix: str, options: Mapping[str, Any]) -> None:
        """Translate ``root``, the result of `prepare_schema`, to rules whose names begin with ``prefix``.

        The first rule is ``prefix`` + "0". ``options`` are llguidance's options for JSON, such as separators.
        """
        self._root, self._prefix, self._options = root, prefix, options
        self._comma, self._colon = (f"/{options[name]}/" for name in ("item_separator", "key_separator"))
        self._names: dict[int, str] = {}
        self.rules: dict[str, str] = {}
        self.rule(root, "")

    def rule(self, node: Schema, at: str) -> str:
        """Return the name of the Lark rule for a subschema. The rule is made at the first call.

        ``at`` is the JSON pointer of the subschema. Raises SchemaError if the large numbers are combined with keywords
        that Lark rules cannot express.
        """
        if id(node) not in self._names:
            name = self._names[id(node)] = f"{self._prefix}{len(self._names)}"
            self.rules[name] = self._body(node, at)
        return self._names[id(node)]

    def _body(self, node: Schema, at: str) -> str:
        if not has_inexact_constants(self._root, node):
            return "%json " + json.dumps({**subschema_at(self._root, at), "x-guidance": self._options})
        keys = {key for key in node if key in _CONSTRAINTS}
        if keys == {"$ref"} and (target := resolve(self._root, node["$ref"])) is not None:
            return self.rule(target, unquote(node["$ref"][1:]))
        values = node.get("enum", [node["const"]] if "const" in node else None)
        if isinstance(values, list) and keys <= {"enum", "const", "type", *_BOUNDS}:
            allowed = [value for value in values if _is_within(node, value)]
            if allowed:
                return " | ".join(map(self._literal, allowed))
            raise SchemaError(
                f"no value of the enum at {at or '/'} satisfies the other keywords of this schema: correct the enum "
                "or the keywords"
            )
        if keys <= {"anyOf"}:
            return " | ".join(self.rule(each, f"{at}/anyOf/{number}") for number, each in enumerate(node["anyOf"]))
        kind = types_of(node)
        if kind == {"object"} and keys <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(node, at)
        if kind == {"array"} and keys <= {"type", "items", "minItems", "maxItems"}:
            return self._array(node, at)
        names = ", ".join(sorted(keys - {"type"}))
        raise SchemaError(
            f"the schema at {at or '/'} has numbers beyond 2^53, which cannot be combined with {names}: omit "
            f"{names}, or use smaller numbers"
        )

    def _object(self, node: dict[str, Any], at: str) -> str:
        properties, required = node.get("properties", {}), node.get("required", [])
        extra = node.get("additionalProperties", False)
        if not properties and not required and extra is not False:
            name = "%json " + json.dumps({"type": "string", "x-guidance": self._options})
            item = f"{self._rule_of(name)} {self._colon} {self.rule(extra, f'{at}/additionalProperties')}"
            return f'"{{" ({item} ({self._comma} {item})*)? "}}"'
        if not {*required} <= properties.keys():
            raise SchemaError(
                f"required at {at}/required names keys that are not in properties: add them to properties"
            )
        items = [
            (f"{_quote(name)} {self._colon} {self.rule(schema, f'{at}/properties/{escape(name)}')}", name in required)
            for name, schema in properties.items()
            if schema is not False
        ]
        return f'"{{" {self._listed(items)} "}}"'

    def _listed(self, items: list[tuple[str, bool]]) -> str:
        first = next((number for number, (_, is_required) in enumerate(items) if is_required), None)
        if first is not None:
            before = [f"({item} {self._comma})?" for item, _ in items[:first]]
            return " ".join([*before, items[first][0], *self._following(items[first + 1 :])])
        starts = [" ".join([item, *self._following(items[number + 1 :])]) for number, (item, _) in enumerate(items)]
        return f"({' | '.join(starts)})?" if starts else ""

    def _following(self, items: list[tuple[str, bool]]) -> list[str]:
        return [f"({self._comma} {item}){'' if is_required else '?'}" for item, is_required in items]

    def _array(self, node: dict[str, Any], at: str) -> str:
        item, least, most = self.rule(node["items"], f"{at}/items"), node.get("minItems", 0), node.get("maxItems")
        if most is not None and most < max(least, 1):
            raise SchemaError(f"maxItems at {at}/maxItems must be at least 1, and at least minItems")
        times = f"{{{max(least, 1) - 1},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f"{item} ({self._comma} {item}){times}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _literal(self, value: Any) -> str:
        if isinstance(value, dict):
            items = [(f"{_quote(name)} {self._colon} {self._literal(each)}", True) for name, each in value.items()]
            return f'"{{" {self._listed(items)} "}}"'
        if isinstance(value, list):
            return f'"[" {self._listed([(self._literal(each), True) for each in value])} "]"'
        return _quote(value)

    def _rule_of(self, body: str) -> str:
        name = f"{self._prefix}{len(self._names)}"
        self._names[-len(self._names)] = name
        self.rules[name] = body
        return name


def _quote(value: Any) -> str:
    return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)


def _is_within(node: Mapping[str, Any], value: Any) -> bool:
    if not (types_of({"const": value}) or set()) <= (types_of(node) or set()):
        return False
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    if node.get("type") == "integer" and isinstance(value, float) and not value.is_integer():
        return False
    return (
        node.get("minimum", value) <= value <= node.get("maximum", value)
        and ("exclusiveMinimum" not in node or node["exclusiveMinimum"] < value)
        and ("exclusiveMaximum" not in node or value < node["exclusiveMaximum"])
    )
