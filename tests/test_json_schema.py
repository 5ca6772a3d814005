"""Schemas without keys that nobody asked for: JSON of the closed one is JSON of the other, whatever that says."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from ssd.bundled import MODEL_PATH
from ssd.text.grammar_compiler import JSON_OPTIONS
from ssd.text.schema import UNSUPPORTED, prepare_schema
from ssd.text.schema_tree import SchemaError, close_objects

NAMES = st.sampled_from(["a", "b", "properties", "allOf"])
VALUES = st.recursive(
    st.sampled_from([1, "x", None]), lambda each: st.lists(each, max_size=2) | st.dictionaries(NAMES, each, max_size=3)
)


def objects(each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, each, max_size=3)},
        optional={
            "required": st.lists(NAMES, max_size=1),
            "additionalProperties": st.booleans() | each,
            "minProperties": st.just(1),
            "anyOf": st.lists(each, min_size=1, max_size=2),
            "const": VALUES,
        },
    )


SCHEMAS = st.recursive(
    st.sampled_from([True, {}, {"type": "integer"}, {"const": {"properties": {"a": 1}}}, {"$ref": "#"}]),
    lambda each: (
        objects(each)
        | st.fixed_dictionaries({"items": each})
        | st.fixed_dictionaries({"anyOf": st.lists(each, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"allOf": st.lists(each, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"not": each})
    ),
    max_leaves=6,
)


def holds(schema: Any, value: Any) -> bool:
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))
    except BaseException as error:  # {"$ref": "#"} alone; where Python's stack ends, a library in Rust may panic
        if not isinstance(error, RecursionError) and type(error).__name__ != "PanicException":
            raise
        return False


@given(SCHEMAS, VALUES)
def test_what_a_closed_schema_takes_the_open_one_takes(schema: Any, value: Any) -> None:
    before = json.dumps(schema)
    assert not holds(close_objects(schema), value) or holds(schema, value)
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"const": {"properties": {"a": 1}}},
    ],
)
def test_a_schema_whose_keys_are_said_elsewhere_stays_open(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


def test_a_schema_nested_beyond_measure_is_returned() -> None:
    deep: dict[str, Any] = {"properties": {"a": {}}}
    for _ in range(100_000):
        deep = {"items": deep}
    assert close_objects(deep) is deep


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{"a":1,"b":["x","y"]}', True),
        ('{"a": 1, "b": ["x", "y"]}', True),
        ('{"a":  1}', False),
        ('{\n  "a": 1\n}', False),
        ('{"a": 1, "c": 2}', False),
        ('{"a": 1, "a": 2}', False),
    ],
)
def test_json_is_on_one_line_and_repeats_no_key(text: str, is_taken: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a"]}
    tokenizer = LLTokenizer((MODEL_PATH / "tokenizer.json").read_text(), n_vocab=4096)
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(close_objects(schema)), overrides=JSON_OPTIONS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    ids = tokenizer.tokenize_str(text)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_taken


# -- what is refused, and what is left out


BRANCHES = [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a/b": {"pattern": "^(?!foo)x"}}},
            "pattern at /properties/a~1b/pattern cannot be used: '^(?!foo)x': look-around is not supported",
        ),
        ({"patternProperties": {"(?=x)": {}}}, "patternProperties at /patternProperties/(?=x) cannot be used"),
        ({"items": {"not": {"type": "string"}}}, "not at /items/not is not supported: leave it out"),
        ({"uniqueItems": True}, "uniqueItems at /uniqueItems is not supported: leave it out, or"),
        ({"propertyNames": {"format": "email"}}, "propertyNames at /propertyNames is not supported"),
        ({"type": "object", "minProperties": 2}, "minProperties at /minProperties 2 cannot be enforced"),
        (
            {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 2},
            "minimum at /minimum is 1152921504606846977: beyond 2^53",
        ),
        ({"minimum": 2**63}, "minimum at /minimum is 9223372036854775808"),
        ({"anyOf": [{"multipleOf": 99991}]}, "multipleOf at /anyOf/0/multipleOf 99991 has too many digits"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "leads back to itself"),
        ({"items": {"properties": []}}, "properties at /items/properties must be an object"),
        ({"required": True}, "required at /required must be an array"),
        ({"items": {"minimum": "1"}}, "minimum at /items/minimum must be a number"),
        ({"anyOf": [3]}, "the schema at /anyOf/0 must be an object or a boolean"),
        ({"const": "\ud800"}, "half of a surrogate pair"),
        ({"const": float("nan")}, "not finite"),
        (False, "the schema false"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$ref at /items/$ref leads back to itself without"),
        ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}]}}, "required": ["a"]}, "without an end"),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_place(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        prepare_schema(schema)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({"type": "string", "format": "path"}, {"type": "string"}),
        ({"type": "array", "uniqueItems": True}, {"type": "array"}),
        ({"type": "string", "pattern": "(?!a)"}, {"type": "string"}),
        ({"not": {}, "if": {}, "then": {}}, {}),
        ({"oneOf": BRANCHES}, {"anyOf": BRANCHES}),
        ({"type": "object", "minProperties": 2}, {"type": "object"}),
        ({"type": "integer", "minimum": 2**63}, {"type": "integer"}),
    ],
)
def test_a_schema_that_is_not_strict_leaves_out_what_cannot_be_held(schema: Any, left: Any) -> None:
    assert prepare_schema(schema, strict=False) == left


@pytest.mark.parametrize(
    ("schema", "prepared"),
    [
        ({"propertyNames": {"type": "string"}}, {}),
        ({"propertyNames": {"pattern": "^x"}}, {"patternProperties": {"^x": True}, "additionalProperties": False}),
        ({"type": "array", "uniqueItems": True, "maxItems": 1.0}, {"type": "array", "maxItems": 1}),
        ({"type": "string", "uniqueItems": True, "format": "binary"}, {"type": "string"}),
        ({"minimum": 3, "exclusiveMinimum": False}, {"minimum": 3}),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, {"type": "integer", "minimum": 4}),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, {"anyOf": [{"type": "null"}, {"type": "string"}]}),
        ({"unevaluatedProperties": False}, {"additionalProperties": False}),
        (True, {}),
    ],
)
def test_what_says_nothing_or_can_be_said_otherwise_is_no_refusal(schema: Any, prepared: Any) -> None:
    assert prepare_schema(schema) == prepared


KEYWORDS = st.sampled_from(
    [
        *UNSUPPORTED,
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "exclusiveMaximum",
        "multipleOf",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "discriminator",
        "minProperties",
        "additionalItems",
    ]
)
ODD = st.recursive(
    st.sampled_from([None, True, False, 0, -1, 1.5, 2**70, 1e300, "", "#", "#/a", "object", "^a$", "(", "\ud800"]),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(KEYWORDS, each, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYWORDS, ODD, max_size=4), st.booleans())
def test_odd_schemas_are_prepared_once_or_refused(schema: Any, strict: bool) -> None:
    try:
        prepared = prepare_schema(schema, strict=strict)
    except SchemaError:
        return
    assert prepare_schema(prepared) == prepared
