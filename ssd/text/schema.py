"""Rewrites JSON schemas for llguidance, so that every text that llguidance then accepts is valid under the schema.

Every schema passes through `prepare_schema` before it becomes a grammar. llguidance computes with 64-bit floats, treats
some exclusive bounds as inclusive, and refuses formats and keywords without naming their location. The preparation
normalizes a schema (draft 4, OpenAPI 3.0), rewrites the constraints that llguidance would not enforce, removes
annotations, and refuses all other constraints with an error that names the keyword and its JSON pointer.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final
from urllib.parse import quote, unquote

from ssd.errors import quote_value

Schema = Any
"""A parsed JSON schema: a dict or a bool."""

MAX_EXACT: Final = 2**53  # up to it, 64-bit floats represent all integers

_MAX_PAIRS = 1 << 16  # llguidance compares the branches of a list with each other: 1,500 took 17 to 50 s
_MAX_MULTIPLE = 10_000  # llguidance counts up to the digits of a multiple: 999983 took 22 s and 350 MB
_MAX_LOOKED_AT = 10_000  # subschemas visited to check that a schema has a finite value
_MAX_NAMES = 64  # property names that may replace a pattern

# Larger bounds are moved inwards to a multiple of this number: such integers below 2^63 are exact as floats, and so are
# their shortest decimal forms, of which llguidance makes its expressions.
_STEP: Final = 2**11 * 5**4
_MAX_BOUND: Final = (2**63 - 1) // _STEP * _STEP
_OPEN_BOUND: Final = 10**17  # above it, llguidance needs both bounds of a range
_LEAST_GAP: Final = 1e-12  # between an integral exclusive bound and the inclusive bound that replaces it


class SchemaError(ValueError):
    """Raised if a JSON schema cannot be enforced. The message names the keyword at fault and its JSON pointer."""


_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_N = "[0-9]{1,4}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_SECONDS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"

FORMATS: Final[Mapping[str, str | None]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(?:{_DAYS}(?:{_SECONDS})?|{_SECONDS}|{_N}W)$",
    **dict.fromkeys(("email", "hostname", "ipv4", "ipv6", "uri", "uuid")),
}
"""The JSON schema string formats that are enforced, each with the regular expression that is used as its pattern.

None means that llguidance implements the format. All other formats are ignored.
"""

UNSUPPORTED: Final = (
    *(
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
    ),
    *("maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    "uniqueItems",
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
_ONE = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_VALUES: Final[Mapping[str, tuple[str, type | tuple[type, ...]]]] = {
    **dict.fromkeys(_NAMED, ("an object", dict)),
    **dict.fromkeys(("allOf", "anyOf", "enum", "oneOf", "prefixItems", "required"), ("an array", list)),
    **dict.fromkeys(("$ref", "format", "pattern"), ("a string", str)),
    **dict.fromkeys((*_BOUNDS, "multipleOf"), ("a number", (int, float))),
    **dict.fromkeys(
        ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), ("an integer", int)
    ),
}
"""The type that the value of each JSON schema keyword must have: in words for error messages, and as Python types."""
# A schema with these keywords constrains one object in several places, none of which lists all of its keys.
_SEVERAL = frozenset({"allOf", "oneOf"})
_BESIDE = ("$ref", "anyOf", "patternProperties")


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


def children(node: Mapping[str, Any], at: str) -> Iterator[tuple[Schema, str]]:
    """Yield the direct subschemas of a JSON schema with their JSON pointers; ``at`` is the pointer of ``node``."""
    for key in _ONE:
        if isinstance(node.get(key), (dict, bool)):
            yield node[key], f"{at}/{key}"
    for key in _LISTS:
        if isinstance(node.get(key), list):
            yield from ((each, f"{at}/{key}/{number}") for number, each in enumerate(node[key]))
    for key in _NAMED:
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


def error_reason(complaint: str) -> str:
    """Return the reason in an llguidance error message as one line of plain words."""
    if re.search("look-?around", complaint):
        return "look-around is not supported"
    if complaint.startswith("NoExtension"):
        return "it is a dead end: no text satisfies it"
    if complaint.startswith("Resource"):
        return "only references within the schema are supported"
    if "coerce_one_of" in complaint:
        return (
            "more than one branch may be valid for one value: make them exclude each other, for instance by a const, "
            "or use anyOf"
        )
    lines = complaint.strip().splitlines() or ["unknown"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    if "Regex is empty" in reason:
        reason = "Unsatisfiable schema: its patterns, format and length exclude each other"
    reason = re.sub(r": json-schema:\S*|^at .*failed to compile JSON schema: ", "", reason)
    return reason.replace("Unsatisfiable schema:", "no value satisfies it:")


def is_beyond_exact(value: Any) -> bool:
    """Return whether a JSON value contains a number of 2^53 or more, which 64-bit floats may not represent."""
    if isinstance(value, dict):
        return any(map(is_beyond_exact, value.values()))
    if isinstance(value, list):
        return any(map(is_beyond_exact, value))
    return not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) >= MAX_EXACT


def escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


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
            if complaint := _pattern_complaint(pattern):
                self._refuse(patterns, pattern, f"{at}/patternProperties", complaint, "patternProperties")
            elif (names := _names_matched_by(pattern)) is not None:
                self._add_names(node, at, names, patterns.pop(pattern))
        if not patterns:
            node.pop("patternProperties", None)
        elif all(any(re.search(pattern, probe) for pattern in map(_for_python, patterns)) for probe in _PROBES):
            node["additionalProperties"] = False  # no other key is left, and a comma would lead to a dead end

    def _count_properties(self, node: dict[str, Any], at: str) -> None:
        if "minProperties" not in node and "maxProperties" not in node:
            return
        properties = node.get("properties", {})
        num_required = len(set(map(str, node.get("required", []))))
        if properties and _SEVERAL.isdisjoint(node) and not any(key in node for key in _BESIDE):
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
        if "pattern" in node and (complaint := _pattern_complaint(node["pattern"])):
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
        values = _listed_values(one), _listed_values(other)
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


def _listed_values(node: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the values of the keyword const or enum as JSON text (1.0 is written as 1); None if there is neither."""
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if values is None:
        return None
    return frozenset(
        str(int(value)) if isinstance(value, float) and value.is_integer() else json.dumps(value, sort_keys=True)
        for value in values
    )


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


# -- patterns


_PROBES = ("", "a", "A", "0", " ", "-", "\n", "\r", "\u2028", "\x00", "\u00e9", "aa")


def _for_python(pattern: str) -> str:
    return pattern.replace("(?<", "(?P<")


def _pattern_complaint(pattern: str) -> str:
    """Return the reason why llguidance cannot use a regular expression; an empty string if it can."""
    try:
        from llguidance import LLMatcher
    except ImportError:  # then no grammar is made
        return ""
    found = LLMatcher.validate_grammar(
        LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    )
    if not found or found.startswith("Unsatisfiable"):  # this depends on the rest of the schema
        return ""
    return f"cannot be used: {quote_pattern(pattern)}: {error_reason(found)}"


def quote_pattern(pattern: str) -> str:
    """Return a regular expression in quotes for an error message, without doubled backslashes."""
    return f"'{pattern}'" if pattern.isprintable() and len(pattern) <= 120 else quote_value(pattern)


def _names_matched_by(pattern: str) -> list[str] | None:
    """Return all strings that a regular expression matches; None if there are many or they are hard to list."""
    try:
        items = list(importlib.import_module("re._parser").parse(pattern))
    except (re.error, OverflowError, RecursionError, ImportError):
        return None
    if [str(argument) for _, argument in items[:1] + items[-1:]] != ["AT_BEGINNING", "AT_END"]:
        return None
    found = _expand(items[1:-1])
    return None if found is None else sorted(set(found))


def _expand(items: Iterable[Any]) -> list[str] | None:
    found = [""]
    for kind, argument in items:
        if str(kind) == "LITERAL":
            parts: list[str] | None = [chr(argument)]
        elif str(kind) == "IN":
            parts = []
            for inner, value in argument:
                low, high = value if str(inner) == "RANGE" else (value, value)
                if str(inner) not in ("LITERAL", "RANGE") or high - low >= _MAX_NAMES:
                    return None
                parts += map(chr, range(low, high + 1))
        elif str(kind) == "BRANCH":
            branches = [_expand(branch) for branch in argument[1]]
            parts = None if None in branches else [text for branch in branches if branch for text in branch]
        elif str(kind) == "SUBPATTERN" and not argument[1] and not argument[2]:
            parts = _expand(argument[3])
        elif str(kind) == "MAX_REPEAT" and argument[1] <= 4:
            if (once := _expand(argument[2])) is None:
                return None
            parts = []
            for times in range(argument[0], argument[1] + 1):
                repeated = itertools.product(once, repeat=times)
                parts += map("".join, itertools.islice(repeated, _MAX_NAMES + 1))
        else:
            return None
        if parts is None or len(found) * len(parts) > _MAX_NAMES:
            return None
        found = [text + part for text in found for part in parts]
    return found


# -- additional keys


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
    if not _SEVERAL.isdisjoint(_without_patterns(schema)) or (properties and any(key in schema for key in _BESIDE)):
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


def _without_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    parts = schema.get("allOf")
    if isinstance(parts, list) and all(isinstance(part, dict) and part.keys() == {"pattern"} for part in parts):
        return {key: value for key, value in schema.items() if key != "allOf"}
    return schema
