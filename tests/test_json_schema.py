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
from ssd.text.schema import close_objects

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
    except RecursionError:  # {"$ref": "#"} alone
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
