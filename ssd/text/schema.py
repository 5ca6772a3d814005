"""Rewrites JSON schemas for llguidance, so that every text that llguidance then accepts is valid under the schema.

Every schema passes through `prepare_schema` before it becomes a grammar. llguidance computes with 64-bit floats, treats
some exclusive bounds as inclusive, and refuses formats and keywords without naming their location. The preparation
normalizes a schema (draft 4, OpenAPI 3.0), rewrites the constraints that llguidance would not enforce, removes
annotations, and refuses all other constraints with an error that names the keyword and its JSON pointer.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Final
from urllib.parse import quote, unquote

from ssd.errors import quote_value
from ssd.text.schema_patterns import FORMATS, PROBES, for_python, names_matched_by, pattern_complaint
from ssd.text.schema_tree import (
    BESIDE_PROPERTIES,
    MAX_EXACT,
    NAMED_SUBSCHEMAS,
    SEVERAL_PARTS,
    Schema,
    SchemaError,
    children,
    close_objects,
    escape,
    listed_values,
    resolve,
    types_of,
)

_MAX_PAIRS = 1 << 16  # llguidance compares the branches of a list with each other: 1,500 took 17 to 50 s
_MAX_MULTIPLE = 10_000  # llguidance counts up to the digits of a multiple: 999983 took 22 s and 350 MB
_MAX_LOOKED_AT = 10_000  # subschemas visited to check that a schema has a finite value

# Larger bounds are moved inwards to a multiple of this number: such integers below 2^63 are exact as floats, and so are
# their shortest decimal forms, of which llguidance makes its expressions.
_STEP: Final = 2**11 * 5**4
_MAX_BOUND: Final = (2**63 - 1) // _STEP * _STEP
_OPEN_BOUND: Final = 10**17  # above it, llguidance needs both bounds of a range
_LEAST_GAP: Final = 1e-12  # between an integral exclusive bound and the inclusive bound that replaces it


UNSUPPORTED: Final = tuple(
    "$dynamicRef $recursiveRef contains dependencies dependentRequired dependentSchemas else if maxContains "
    "minContains not propertyNames then unevaluatedItems unevaluatedProperties uniqueItems".split()
)
"""The JSON schema keywords that llguidance does not support.

A schema with such a keyword is refused, unless the keyword has no effect or can be expressed by other keywords.
"""

_INSTEAD = {
    "propertyNames": ", or, in an object without properties, use only enum, const, pattern or a length",
    "uniqueItems": ", or allow at most one item by maxItems",
}

_ANNOTATIONS = frozenset(
    ("$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly")
)
_TYPE_OF_KEYWORD = {
    **dict.fromkeys(("format", "pattern"), "string"),
    **dict.fromkeys(("contains", "maxContains", "minContains", "unevaluatedItems", "uniqueItems"), "array"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas", "maxProperties"), "object"),
    **dict.fromkeys(("minProperties", "propertyNames", "unevaluatedProperties"), "object"),
}
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_VALUES: Final[Mapping[str, tuple[str, type | tuple[type, ...]]]] = {
    **dict.fromkeys(NAMED_SUBSCHEMAS, ("an object", dict)),
    **dict.fromkeys(("allOf", "anyOf", "enum", "oneOf", "prefixItems", "required"), ("an array", list)),
    **dict.fromkeys(("$ref", "format", "pattern"), ("a string", str)),
    **dict.fromkeys((*_BOUNDS, "multipleOf"), ("a number", (int, float))),
    **dict.fromkeys(
        ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), ("an integer", int)
    ),
}
"""The type that the value of each JSON schema keyword must have: in words for error messages, and as Python types."""


def prepare_schema(schema: Schema, *, strict: bool = True) -> dict[str, Any]:
    """Rewrite a JSON schema so that llguidance enforces it exactly; return the new schema.

    Every value that the new schema allows is valid under ``schema``. If ``schema`` does not say whether an object may
    have additional keys, the new schema forbids them, see `close_objects`. Preparing a prepared schema changes nothing.
    O(schema).

    Args:
        schema: The client's schema.
        strict: Whether a constraint that cannot be enforced raises SchemaError. If False, the constraint is removed.
    """
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        made: Any = json.loads(text.encode())
        if made is False:
            raise SchemaError("no value satisfies the schema false: give an object, or true")
        if made is True:
            made = {}
        preparation = _Preparation(made, strict)
        preparation.prepare(made, "")
        preparation.finish()
        closed: dict[str, Any] = close_objects(made)
        return closed
    except RecursionError:
        raise SchemaError("the schema is nested too deeply: use fewer levels") from None
    except SchemaError:
        raise
    except UnicodeEncodeError:
        raise SchemaError("the schema contains half of a surrogate pair, which is not a character: remove it") from None
    except ValueError:
        raise SchemaError("the schema has a number that is not finite (NaN or infinity): use finite numbers") from None


def _accepts_all(schema: Schema) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


class _Preparation:
    """Does the work of `prepare_schema`. The JSON schema is changed in place, so that references into it stay valid."""

    def __init__(self, root: dict[str, Any], strict: bool) -> None:
        self._root = root
        self._strict = strict
        self._seen: set[int] = set()
        self._progressing: set[int] = set()
        self._references: list[tuple[dict[str, Any], str]] = []
        self._with_branches: list[dict[str, Any]] = []
        self._ending: set[int] = set()
        self._num_looked_at = 0
        self._num_pairs = 0
        self._multiples: set[Decimal] = set()

    def prepare(self, node: Schema, at: str) -> None:
        """Rewrite the subschema at the JSON pointer ``at``, and everything to which it refers, for llguidance."""
        if isinstance(node, bool) or id(node) in self._seen:
            return
        if not isinstance(node, dict):
            raise SchemaError(f"the schema at {at or '/'} must be an object or a boolean, got {quote_value(node)}")
        self._seen.add(id(node))
        self._check_values(node, at)
        self._leave_out_unsupported(node, at)
        self._list_names(node, at)
        self._list_patterns(node, at)
        for child, pointer in list(children(node, at)):
            self.prepare(child, pointer)
        if (target := resolve(self._root, node.get("$ref"))) is not None:
            self._references.append((node, at))
            self.prepare(target, unquote(node["$ref"][1:]))
        self._count_properties(node, at)
        self._prepare_string(node, at)
        self._prepare_number(node, at)
        self._with_branches.append(node)

    def finish(self) -> None:
        """Check endless references and rewrite ``oneOf``, after `prepare` has rewritten all parts of the schema."""
        for node, at in self._references:
            self._require_progress(node, at, frozenset())
            self._num_looked_at = 0
            if self._never_ends(node, frozenset()):
                raise SchemaError(f"$ref at {at}/$ref leads back to itself without an end: no finite value is valid")
        for node in self._with_branches:
            self._prepare_branches(node)

    def _refuse(self, node: dict[str, Any], key: str, at: str, reason: str, keyword: str | None = None) -> None:
        """Raise SchemaError for a keyword that cannot be enforced; remove the keyword instead if not strict."""
        if self._strict:
            raise SchemaError(f"{keyword or key} at {at}/{escape(key)} {reason}")
        del node[key]

    def _resolved(self, node: Schema) -> Schema:
        """Return the last schema in a chain of ``$ref``; other constraints next to ``$ref`` end the chain."""
        seen = set()
        while isinstance(node, dict) and "$ref" in node and node.keys() - {"$ref"} <= _ANNOTATIONS:
            target = resolve(self._root, node["$ref"])
            if target is None or id(target) in seen:
                break
            seen.add(id(target))
            node = target
        return node

    def _require_progress(self, node: Schema, at: str, begun: frozenset[int]) -> None:
        """Raise SchemaError if a schema refers to itself for the same value, e.g. ``{"$ref": "#"}``.

        No value is valid under such a schema.
        """
        if not isinstance(node, dict) or id(node) in self._progressing:
            return
        if id(node) in begun:
            raise SchemaError(f"$ref at {at}/$ref leads back to itself: no value satisfies it")
        parts = [each for key in ("allOf", "anyOf", "oneOf") for each in node.get(key, [])]
        for part in [*parts, resolve(self._root, node.get("$ref"))]:
            self._require_progress(part, at, begun | {id(node)})
        self._progressing.add(id(node))

    def _never_ends(self, node: Schema, begun: frozenset[int]) -> bool:
        """Return whether every value of a schema must contain another value of the same schema, and so on without end.

        ``begun`` are the ids of the schemas around ``node``.
        """
        if not isinstance(node, dict) or id(node) in self._ending or self._num_looked_at > _MAX_LOOKED_AT:
            return False
        if id(node) in begun:
            return True
        self._num_looked_at += 1
        needed = [*node.get("allOf", []), resolve(self._root, node.get("$ref"))]
        if types_of(node) == {"object"}:
            needed += [node.get("properties", {}).get(name) for name in map(str, node.get("required", []))]
        if types_of(node) == {"array"} and node.get("minItems", 0) > 0:
            needed += node["prefixItems"][: node["minItems"]] if "prefixItems" in node else [node.get("items")]
        choices = [node[key] for key in ("anyOf", "oneOf") if node.get(key)]
        begun |= {id(node)}
        if any(self._never_ends(part, begun) for part in needed):
            return True
        if any(all(self._never_ends(part, begun) for part in parts) for parts in choices):
            return True
        self._ending.add(id(node))
        return False

    def _check_values(self, node: dict[str, Any], at: str) -> None:
        """Check the types of keyword values; remove keywords that apply only to types that the schema forbids."""
        for bound, exclusive in (_BOUNDS[:2], _BOUNDS[2:]):
            if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and bound in node:  # draft 4
                node[exclusive] = node.pop(bound)
        for key, (words, kind) in _VALUES.items():
            value = node.get(key)
            if kind is int and isinstance(value, float) and value.is_integer():  # 3.0 is an integer in JSON Schema
                node[key] = int(value)
            elif key in node and (isinstance(value, bool) or not isinstance(value, kind)):
                raise SchemaError(f"{key} at {at}/{key} must be {words}, got {quote_value(value)}")
        types = types_of(node)
        for key, needed in _TYPE_OF_KEYWORD.items():
            if types is not None and needed not in types:
                node.pop(key, None)

    def _leave_out_unsupported(self, node: dict[str, Any], at: str) -> None:
        for key, instead in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in node and node.keys().isdisjoint({"allOf", "anyOf", "oneOf", "$ref", *UNSUPPORTED} - {key}):
                node.setdefault(instead, node.pop(key))
        for key in [key for key in UNSUPPORTED if key in node and _says_nothing(node, key)]:
            del node[key]
        for key in [key for key in UNSUPPORTED if key in node and key != "propertyNames"]:
            self._refuse(node, key, at, "is not supported: leave it out" + _INSTEAD.get(key, ""))

    # -- objects

    def _list_names(self, node: dict[str, Any], at: str) -> None:
        """Replace ``propertyNames``, which llguidance does not support, by ``properties`` or ``patternProperties``."""
        if "propertyNames" not in node:
            return
        self.prepare(node["propertyNames"], f"{at}/propertyNames")
        names = self._resolved(node["propertyNames"])
        keys = names.keys() - _ANNOTATIONS - {"type"} if isinstance(names, dict) else set()
        values = node.get("additionalProperties", True)
        if not keys or node.get("properties") or node.get("patternProperties"):
            keys = set()
        elif keys in ({"enum"}, {"const"}):
            listed = names.get("enum", [names.get("const")])
            self._add_names(node, at, [name for name in listed if isinstance(name, str)], values)
        elif keys == {"pattern"}:
            node["patternProperties"] = {names["pattern"]: values}
        elif keys <= {"minLength", "maxLength"}:
            times = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            node["patternProperties"] = {rf"^[\s\S]{{{times}}}$": values}
        else:
            keys = set()
        if keys:
            node["additionalProperties"] = False
            del node["propertyNames"]
        else:
            self._refuse(node, "propertyNames", at, "is not supported: leave it out" + _INSTEAD["propertyNames"])

    def _add_names(self, node: dict[str, Any], at: str, names: Iterable[str], schema: Schema) -> None:
        """Require in ``properties`` that the value of each key in ``names`` is valid under ``schema``.

        If ``properties`` has a schema for the key already, both schemas apply.
        """
        properties = node.setdefault("properties", {})
        for name in names:
            known = properties.get(name, True)
            if known is True or schema is False:
                properties[name] = schema
                if isinstance(schema, dict) and len(schema) > 1:  # the schema is written once
                    schema = {"$ref": "#" + quote(f"{at}/properties/{escape(name)}")}
            elif isinstance(known, dict) and schema is not True:
                self.prepare(known, f"{at}/properties/{escape(name)}")
                known["allOf"] = [*known.get("allOf", []), schema]

    def _list_patterns(self, node: dict[str, Any], at: str) -> None:
        """Replace each pattern in ``patternProperties`` that matches few keys by these keys in ``properties``.

        llguidance lets a key that only matches a pattern occur twice in an object.
        """
        patterns = node.get("patternProperties", {})
        for pattern in list(patterns):
            if complaint := pattern_complaint(pattern):
                self._refuse(patterns, pattern, f"{at}/patternProperties", complaint, "patternProperties")
            elif (names := names_matched_by(pattern)) is not None:
                self._add_names(node, at, names, patterns.pop(pattern))
        if not patterns:
            node.pop("patternProperties", None)
        elif all(any(re.search(pattern, probe) for pattern in map(for_python, patterns)) for probe in PROBES):
            node["additionalProperties"] = False  # no other key is left, and a comma would lead to a dead end

    def _count_properties(self, node: dict[str, Any], at: str) -> None:
        if "minProperties" not in node and "maxProperties" not in node:
            return
        properties = node.get("properties", {})
        num_required = len(set(map(str, node.get("required", []))))
        if properties and SEVERAL_PARTS.isdisjoint(node) and not any(key in node for key in BESIDE_PROPERTIES):
            node.setdefault("additionalProperties", False)
        is_closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        num_names = sum(schema is not False for schema in properties.values())
        if (least := node.get("minProperties")) is not None:
            if least <= num_required:
                del node["minProperties"]
            elif is_closed and least == num_names:
                node["required"] = [name for name, schema in properties.items() if schema is not False]
                del node["minProperties"]
            elif not is_closed and least > num_required + 1:
                reason = f"{least} cannot be enforced, because keys outside properties may repeat: list all keys there"
                self._refuse(node, "minProperties", at, reason)
        if is_closed and node.get("maxProperties", -1) >= num_names:
            del node["maxProperties"]

    # -- strings

    def _prepare_string(self, node: dict[str, Any], at: str) -> None:
        if "pattern" in node and (complaint := pattern_complaint(node["pattern"])):
            self._refuse(node, "pattern", at, complaint)
        if "format" not in node:
            return
        name: str = node["format"]
        pattern = FORMATS.get(name)
        if pattern is not None or name not in FORMATS:
            del node["format"]
        if pattern is not None and "pattern" in node:
            node["allOf"] = [*node.get("allOf", []), {"pattern": pattern}]
        elif pattern is not None:
            node["pattern"] = pattern

    # -- numbers

    def _prepare_number(self, node: dict[str, Any], at: str) -> None:
        sent = dict(node)
        self._move_bound(node, "minimum", "exclusiveMinimum", max, 1)
        self._move_bound(node, "maximum", "exclusiveMaximum", min, -1)
        self._require_range(node, sent, at)
        if (multiple := node.get("multipleOf")) is not None:
            if multiple <= 0:
                self._refuse(node, "multipleOf", at, f"must be a number above 0, got {quote_value(multiple)}")
            elif _digits(multiple) > _MAX_MULTIPLE:
                reason = f"{quote_value(multiple)} has too many digits to be enforced: leave it out"
                self._refuse(node, "multipleOf", at, reason)
            else:
                self._multiples.add(Decimal(repr(multiple)))
                scale = 10 ** -min(0, *(int(each.normalize().as_tuple().exponent) for each in self._multiples), 0)
                largest = sorted(each * scale for each in self._multiples)[-2:]
                if len(largest) == 2 and largest[0] * largest[1] >= 2**32:  # llguidance multiplies them
                    reason = f"{quote_value(multiple)} has too many digits in combination with another multipleOf"
                    self._refuse(node, "multipleOf", at, reason)

    def _move_bound(
        self, node: dict[str, Any], bound: str, exclusive: str, tighter: Callable[..., Any], inwards: int
    ) -> None:
        """Move a numeric bound that llguidance cannot enforce exactly to the closest stricter bound it can enforce.

        llguidance cannot enforce bounds beyond 2^53 exactly, nor exclusive bounds that are integers.
        """
        if exclusive in node and _is_whole(node[exclusive]):
            limit = int(node.pop(exclusive))
            if node.get("type") == "integer" or abs(limit) >= MAX_EXACT:
                moved: float = limit + inwards
            else:
                moved = limit + inwards * max(_LEAST_GAP, math.ulp(limit))
            node[bound] = tighter(node[bound], moved) if bound in node else moved
        if bound in node and abs(node[bound]) > MAX_EXACT:
            number = int(node[bound])
            moved = inwards * -(-inwards * number // _STEP) * _STEP
            node[bound] = tighter(moved, -inwards * _MAX_BOUND)

    def _require_range(self, node: dict[str, Any], sent: Mapping[str, Any], at: str) -> None:
        """Raise SchemaError if bounds beyond 2^53 leave no valid number once `_move_bound` has moved them.

        If not strict, the bounds are removed instead. If a bound is so large that llguidance needs both bounds of the
        range, the missing one is added.
        """
        if node.get("minimum", 0) >= _OPEN_BOUND:
            node.setdefault("maximum", _MAX_BOUND)
        if node.get("maximum", 0) <= -_OPEN_BOUND:
            node.setdefault("minimum", -_MAX_BOUND)
        if node.get("minimum", -math.inf) <= node.get("maximum", math.inf):
            return
        if beyond := [key for key in _BOUNDS if abs(sent.get(key, 0)) > MAX_EXACT]:
            if self._strict:
                reason = f"is {sent[beyond[0]]}: beyond 2^53 only wide ranges below 2^63 can be enforced exactly"
                raise SchemaError(f"{beyond[0]} at {at}/{beyond[0]} {reason}")
            for key in _BOUNDS:
                node.pop(key, None)

    # -- branches

    def _prepare_branches(self, node: dict[str, Any]) -> None:
        """Turn ``oneOf`` into ``anyOf`` if no value is valid under two of its branches, or if not strict.

        Branches with the key of an OpenAPI discriminator must require this key. Raises SchemaError for too many
        branches.
        """
        self._num_pairs += sum(len(node.get(key, [])) ** 2 for key in ("anyOf", "oneOf"))
        if self._num_pairs > _MAX_PAIRS:
            raise SchemaError(
                "the schema has too many branches in anyOf and oneOf: use at most 256 branches in a single list, "
                "and fewer if there are several lists"
            )
        if "oneOf" not in node or "anyOf" in node:
            return
        branches = list(map(self._resolved, node["oneOf"]))
        discriminator = node.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        for branch in branches:
            if isinstance(branch, dict) and isinstance(name, str) and name in branch.get("properties", {}):
                branch["required"] = [*dict.fromkeys([*branch.get("required", []), name])]
        if not self._strict or all(itertools.starmap(self._exclude, itertools.combinations(branches, 2))):
            node["anyOf"] = node.pop("oneOf")

    def _exclude(self, one: Schema, other: Schema, depth: int = 4) -> bool:
        """Return whether the types and constants of two schemas show that no value is valid under both schemas."""
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth == 0:
            return False
        types = types_of(one), types_of(other)
        if types[0] is not None and types[1] is not None and types[0].isdisjoint(types[1]):
            return True
        values = listed_values(one), listed_values(other)
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        if types[0] != {"object"} or types[1] != {"object"}:
            return False
        required = {*map(str, one.get("required", [])), *map(str, other.get("required", []))}
        properties = one.get("properties", {}), other.get("properties", {})
        return any(
            self._exclude(properties[0][name], properties[1][name], depth - 1)
            for name in required
            if name in properties[0] and name in properties[1]
        )


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or value.is_integer()


def _says_nothing(node: Mapping[str, Any], key: str) -> bool:
    """Return whether an unsupported JSON schema keyword has no effect in this schema, so that it can be removed."""
    value = node[key]
    if key == "uniqueItems":
        most = len(node.get("prefixItems", [])) if node.get("items") is False else node.get("maxItems", 2)
        return value is False or most <= 1
    if key in ("then", "else"):
        return "if" not in node
    if key in ("minContains", "maxContains"):
        return "contains" not in node or (key == "minContains" and value == 1)
    return {
        "if": "then" not in node and "else" not in node,
        "not": value is False,
        "contains": node.get("minContains") == 0 and "maxContains" not in node,
        "propertyNames": _accepts_all(value) or (isinstance(value, dict) and _only_says_string(value)),
    }.get(key, _accepts_all(value))


def _only_says_string(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and schema.keys() - {"type"} <= _ANNOTATIONS


def _digits(number: int | float) -> int:
    """Return the significant decimal digits of a number as an integer, e.g. 12 for 1200 and for 0.012."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)) or 0)
