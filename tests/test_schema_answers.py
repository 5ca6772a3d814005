"""Schemas are held: each finished answer is valid, or the schema is refused before the first token, with its place.

Schemas are drawn, and answers to each sampled under its grammar with random logits and the bundled tokenizer. They are
checked by jsonschema. `make fuzz` draws more.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from fractions import Fraction
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ssd.bundled import MODEL_PATH
from ssd.config import StructuredOutput
from ssd.errors import RequestError
from ssd.text.codec import TextCodec
from ssd.text.grammar_compiler import GrammarCompiler

pytest.importorskip("llguidance")

CASES = int(os.environ.get("SSD_FUZZ_CASES", "200"))
ANSWERS = 8
MOST_TOKENS = 160

CODEC = TextCodec.load(str(MODEL_PATH))
EOS = CODEC.eos_token_ids[0]


# -- the answers


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(CODEC, vocab_size=CODEC.vocab_size, eos_token_ids=CODEC.eos_token_ids)


@cache
def closing() -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The tokens that bring an answer to its end."""
    found = [(CODEC.piece(token) or "")[-1:] in ('"', "]", "}") for token in range(CODEC.vocab_size)]
    found[EOS] = True
    return np.array(found)


def answer(output: StructuredOutput, seed: int) -> str | None:
    """One finished answer of random logits, None for one that does not end. Raises RequestError."""
    random = np.random.default_rng(seed)
    state = compiler().compile(output)
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS:
        (mask,) = state.masks([])
        logits = random.normal(size=CODEC.vocab_size) + len(tokens) / 8 * closing()
        token = int(np.argmax(np.where(mask, logits, -np.inf)))
        state.advance([token])
        if token == EOS:
            return CODEC.decode(tokens)
        tokens.append(token)
    return None


# -- what is valid, by other means than the grammar's


def of_type(kind: Any) -> Callable[[str], bool]:
    def is_one(text: str) -> bool:
        TypeAdapter(kind).validate_python(text)
        return True

    return is_one


FORMATS = {
    "date": of_type(date),
    "time": of_type(time),
    "date-time": of_type(datetime),
    "duration": of_type(timedelta),
    "ipv4": of_type(IPv4Address),
    "ipv6": of_type(IPv6Address),
    "uuid": of_type(UUID),
    "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+", text) is not None,
    "hostname": lambda text: all(re.fullmatch(r"(?!-)[a-zA-Z0-9-]{1,63}(?<!-)", part) for part in text.split(".")),
    "uri": lambda text: re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", text) is not None,
}
CHECKER = jsonschema.FormatChecker(())
for name, check in FORMATS.items():
    CHECKER.checks(name, raises=ValueError)(lambda value, check=check: not isinstance(value, str) or check(value))


def is_multiple(_: Any, multiple: float, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """The keyword multipleOf in decimals: 0.3 is a multiple of 0.1."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and Fraction(repr(value)) % Fraction(repr(multiple)):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {multiple}")


def matches(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """The keyword pattern as JavaScript reads it: its classes are of ASCII."""
    if isinstance(value, str) and re.search(pattern, value, re.ASCII) is None:
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern}")


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"multipleOf": is_multiple, "pattern": matches}
)


def of_2020(schema: Any) -> Any:
    """The schema with the exclusive bounds of draft 4 written as those of 2020-12."""
    if isinstance(schema, list):
        return [of_2020(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    named = ("properties", "patternProperties", "$defs")
    made = {
        key: {name: of_2020(each) for name, each in value.items()}
        if key in named
        else value
        if key in ("enum", "const")
        else of_2020(value)
        for key, value in schema.items()
    }
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and bound in made:
            made[exclusive] = made.pop(bound)
    return made


# -- the schemas


NAMES = st.sampled_from(["a", "b", "score", "x_a", "x_b", "<|user|>", "é/~", "const"])
BIG = st.sampled_from([2**53 + 1, 1234567890123456789, 1234567890123456791, -(2**53) - 3, 2**64 + 1, 10**25 + 1, 2**60])
SMALL = st.sampled_from([0, 1, -1, 2, 5, 10, -10, 0.05, 0.5, -0.05, 1.5, 9.75, 99.9, -1.25, 10.5, 0.001, 7, 100])
TEXTS = st.sampled_from(
    ["x", "", "end: <|endoftext|>.", "tag <|user|> one", "tag <|user|> two", 'q"\\', "\u00e9\n\u0001"]
)
SCALARS = st.one_of(st.none(), st.booleans(), BIG, SMALL, TEXTS)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(NAMES, SCALARS, max_size=2))
PATTERNS = st.sampled_from(
    [
        "^[ab]{1,3}$",
        "^a",
        "b$",
        "^a$|^bc$",
        r"^\d{2}-\w$",
        "[xy]",
        "^(?!foo)[a-z]{3}$",
        r"^\S{1,4}$",
        r"(a)\1",
        r"\bfoo\b",
        "^<\\|user\\|>$",
        "^",
        "^$",
    ]
)
KEY_PATTERNS = st.sampled_from(["^score$", "^x_[ab]$", "^x_", "^(a|b)$", "^", "^.{1,3}$", "a", "^[ab]", "^(?!a)"])
ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={"title": st.just("T"), "description": st.just("text"), "default": st.none(), "examples": st.just([1])},
)


Schemas = st.SearchStrategy[dict[str, Any]]


def merged(*parts: Schemas) -> Schemas:
    return st.tuples(*parts).map(lambda each: {key: value for part in each for key, value in part.items()})


NEAR = st.tuples(st.sampled_from([0, 1, -1, 10]), st.sampled_from([0.05, 0.5, -0.05, -0.5, 1])).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1])
)
"""A whole number and one that is at most one away."""


def bounds(pairs: st.SearchStrategy[tuple[Any, Any]]) -> Schemas:
    """Bounds that are not in the wrong order, whether they are exclusive or not, of any draft."""
    names = st.tuples(
        st.sampled_from(["exclusiveMinimum", "minimum", None]), st.sampled_from(["exclusiveMaximum", "maximum", None])
    )

    def written(drawn: Any) -> dict[str, Any]:
        limits, keys = sorted(drawn[0]), drawn[1]
        made = {key: limit for key, limit in zip(keys, limits, strict=True) if key is not None}
        if drawn[2]:  # as draft 4
            for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
                if exclusive in made:
                    made[bound], made[exclusive] = made[exclusive], True
        return made

    return st.tuples(pairs, names, st.booleans()).map(written)


def numbers(pairs: st.SearchStrategy[tuple[Any, Any]], draft_4: bool | None = None) -> Schemas:
    kinds: Schemas = st.sampled_from([{"type": "number"}, {"type": ["number", "null"]}, {"type": "integer"}])
    multiples: Schemas = st.sampled_from([{}, {}, {}, {"multipleOf": 0.25}, {"multipleOf": 0.1}, {"multipleOf": 3}])
    drawn = merged(kinds, bounds(pairs), multiples)
    if draft_4 is None:
        return drawn
    drawn = merged(st.just({"type": "number"}), bounds(pairs))
    drawn = drawn.filter(lambda each: {"exclusiveMinimum", "exclusiveMaximum"} & each.keys() and len(each) > 2)
    return drawn.filter(lambda each: any(value is True for value in each.values()) == draft_4)


CONSTANTS = st.one_of(
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)}), st.fixed_dictionaries({"const": VALUES})
)
BIG_CONSTANTS = st.one_of(
    st.fixed_dictionaries({"enum": st.lists(BIG, min_size=1, max_size=3)}, optional={"type": st.just("integer")}),
    st.fixed_dictionaries({"const": BIG | st.dictionaries(NAMES, BIG, max_size=2)}),
)
SPELLED = st.one_of(
    st.fixed_dictionaries({"enum": st.lists(TEXTS, min_size=1, max_size=2)}), st.fixed_dictionaries({"const": TEXTS})
)
STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(2, 5),
        "pattern": PATTERNS,
    },
)
FORMATTED = st.fixed_dictionaries(
    {"type": st.just("string"), "format": st.sampled_from([*FORMATS, "path", "binary", "password", "idn-email"])},
    optional={"pattern": st.sampled_from(["-02-29", ":60", "^1", "9"])},
)
UNSUPPORTED = st.one_of(
    st.fixed_dictionaries({"not": st.fixed_dictionaries({"type": st.just("string")})}),
    st.just({"if": {"type": "integer"}, "then": {"minimum": 3}}),
    st.just({"type": "object", "dependentRequired": {"a": ["b"]}}),
    st.just({"type": "array", "contains": {"type": "integer"}}),
    st.just({"$ref": "#"}),
    st.just({"$ref": "#/nowhere"}),
    st.just({"type": "nothing"}),
)
LEAVES = st.one_of(
    numbers(NEAR),
    numbers(st.tuples(BIG | SMALL, BIG | SMALL)),
    CONSTANTS,
    BIG_CONSTANTS,
    STRINGS,
    FORMATTED,
    st.just({"type": "boolean"}),
    st.booleans(),
    UNSUPPORTED,
)
SHORT = st.one_of(numbers(st.tuples(SMALL, SMALL)), CONSTANTS, STRINGS, st.just({"type": "null"}))


def objects(each: st.SearchStrategy[Any]) -> Schemas:
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, each, max_size=3)},
        optional={
            "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": st.booleans() | each,
            "minProperties": st.integers(0, 3),
            "maxProperties": st.integers(1, 3),
            "propertyNames": st.one_of(
                st.just({"type": "string"}), st.just({"enum": ["a", "b"]}), st.fixed_dictionaries({"pattern": PATTERNS})
            ),
        },
    )


def patterned(each: st.SearchStrategy[Any]) -> Schemas:
    return merged(
        objects(each), st.fixed_dictionaries({"patternProperties": st.dictionaries(KEY_PATTERNS, each, max_size=2)})
    )


COUNTED = st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "patternProperties": st.dictionaries(KEY_PATTERNS, st.just({"enum": [1]}), min_size=1, max_size=1),
        "additionalProperties": st.just(False),
        "minProperties": st.integers(1, 2),
    },
    optional={"maxProperties": st.just(2)},
)
TWICE = st.sampled_from(["score", "a", "x_a"]).flatmap(
    lambda name: st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.fixed_dictionaries({name: st.just({"type": "integer", "minimum": 0, "maximum": 9})}),
            "patternProperties": st.fixed_dictionaries({f"^{name}$": st.just({"enum": [5, 6]}) | SHORT}),
            "additionalProperties": st.booleans(),
        },
        optional={"required": st.just([name])},
    )
)
"""A key that properties and patternProperties both constrain."""


def arrays(each: st.SearchStrategy[Any]) -> Schemas:
    return st.fixed_dictionaries(
        {"type": st.just("array"), "items": each, "maxItems": st.integers(0, 3)},
        optional={
            "minItems": st.integers(0, 2),
            "prefixItems": st.lists(each, max_size=2),
            "uniqueItems": st.booleans(),
        },
    )


def combined(each: st.SearchStrategy[Any]) -> Schemas:
    lists = st.lists(each, min_size=1, max_size=3)
    return st.one_of(
        *(st.fixed_dictionaries({key: lists}) for key in ("anyOf", "oneOf", "allOf")),
        merged(st.fixed_dictionaries({"anyOf": lists}), SHORT),
        merged(st.fixed_dictionaries({"allOf": lists}), SHORT),
    )


SCHEMAS = st.recursive(
    LEAVES, lambda each: st.one_of(objects(each), patterned(each), arrays(each), combined(each)), max_leaves=5
)


def with_references(each: st.SearchStrategy[Any]) -> Schemas:
    """The schema by reference, from a property, from a list, and from itself."""
    return each.map(
        lambda schema: {
            "type": "object",
            "properties": {
                "one": {"$ref": "#/$defs/one"},
                "more": {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2},
                "inner": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            },
            "required": ["one"],
            "additionalProperties": False,
            "$defs": {"one": schema},
        }
    )


KINDS = {
    "constants beyond 2^53": merged(BIG_CONSTANTS, ANNOTATIONS),
    "bounds beyond 2^53": numbers(st.tuples(BIG, BIG)),
    "exclusive bounds": numbers(NEAR, draft_4=False),
    "exclusive bounds of draft 4": numbers(NEAR, draft_4=True),
    "texts that spell tokens": SPELLED,
    "strings": STRINGS,
    "formats": FORMATTED,
    "objects": objects(SHORT),
    "counted keys": COUNTED,
    "keys of two keywords": TWICE,
    "patterns of keys": patterned(SHORT),
    "references": with_references(LEAVES),
    "anything": SCHEMAS,
    "anything in an object": objects(SCHEMAS),
}


ALWAYS: dict[str, list[Any]] = {
    "bounds beyond 2^53": [{"type": "number", "minimum": 2**53 + 1, "maximum": 2**53 + 1}],
    "exclusive bounds": [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.05}],
    "exclusive bounds of draft 4": [{"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.05}],
    "formats": [{"type": "string", "format": "time", "pattern": ":60"}],
}
"""Schemas with faults that a few answers may miss, in addition to those that are drawn."""


# -- the property


FOREIGN = re.compile("coerce_one_of|NoExtension|json-schema:|Unimplemented|Expecting object|RuntimeError|panick")
PLACE = re.compile(r" at /|the schema false|too many branches|not finite|number of|value of")


def assert_held(schema: Any, seed: int) -> None:
    output = StructuredOutput("json_schema", json.dumps(schema), "response_format")
    try:
        compiler().compile(output)
    except RequestError as error:
        assert error.param == "response_format"
        assert PLACE.search(str(error)) and not FOREIGN.search(str(error)), (schema, str(error))
        return
    for number in range(ANSWERS):
        text = answer(output, seed + number)
        if text is not None:
            Validator(of_2020(schema), format_checker=CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("kind", KINDS)
def test_each_finished_answer_is_valid_or_the_schema_is_refused(kind: str) -> None:
    @settings(max_examples=max(1, CASES // len(KINDS)), suppress_health_check=list(HealthCheck), print_blob=False)
    @given(schema=KINDS[kind], seed=st.integers(0, 2**20))
    def held(schema: Any, seed: int) -> None:
        assert_held(schema, seed)

    for schema in ALWAYS.get(kind, []):
        for seed in range(0, 4 * ANSWERS, ANSWERS):
            assert_held(schema, seed)
    held()
