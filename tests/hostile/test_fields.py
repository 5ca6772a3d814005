"""Every field of every body, with values that no client means: never a 5xx, and the engine lives on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from server.schema.anthropic import AnthropicBody, CountTokensBody, OutputConfig, Thinking, ToolChoice
from server.schema.body import IGNORED, REFUSED, Body
from server.schema.chat import ChatBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.schema.generate import (
    CompletionBody,
    JsonSchemaFormat,
    Prediction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)
from server.schema.responses import ReasoningConfig, ResponsesBody, TextConfig
from tests.server.bundled_engine import load_bundled
from tests.server.client import get, post
from tests.server.failing_engine import RunningServer, serving

MESSAGES = [{"role": "user", "content": "x"}]

SCALARS = [
    "0",
    "-1",
    "1",
    "-0.0",
    "2147483648",
    "9223372036854775808",
    "18446744073709551616",
    "1" + 400 * "0",
    "-1" + 400 * "0",
    "1" + 5000 * "0",
    "1e308",
    "-1e308",
    "5e-324",
    "1e400",
    "NaN",
    "Infinity",
    "true",
    "null",
    '""',
    '"x"',
    '"\\u0000"',
    '"\\ud800"',
    '"\\ud83d\\ude00"',
    '"' + 3000 * "y" + '"',
]
WHOLE = [
    *SCALARS,
    "[]",
    "{}",
    "[[]]",
    "[null]",
    '[""]',
    '["x", 1]',
    "[1, -1]",
    "[9223372036854775808]",
    "[1" + 400 * "0" + "]",
    '{"": 0}',
    '{"0": 1e400}',
    '{"00": 1, "0": 1}',
    '{"-1": 1}',
    '{"' + 5000 * "9" + '": 1}',
    '{"\\u0000": {"x": []}}',
    150 * "[" + 150 * "]",
    5000 * "[" + 5000 * "]",
    150 * '{"a":' + "1" + 150 * "}",
]
"""JSON as it is sent: Python would not write some of it."""

BODIES: list[tuple[str, type[Body], dict[str, Any]]] = [
    ("/v1/completions", CompletionBody, {"prompt": "x", "max_tokens": 2}),
    ("/v1/chat/completions", ChatBody, {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/responses", ResponsesBody, {"input": "x", "max_output_tokens": 2}),
    ("/v1/messages", AnthropicBody, {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/messages/count_tokens", CountTokensBody, {"messages": MESSAGES}),
    ("/tokenize", TokenizeTextBody, {"prompt": "x"}),
    ("/tokenize", TokenizeChatBody, {"messages": MESSAGES}),
    ("/detokenize", DetokenizeBody, {"tokens": [5]}),
]
PARTS: dict[str, type[Any]] = {
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
    "prediction": Prediction,
    "text": TextConfig,
    "reasoning": ReasoningConfig,
    "thinking": Thinking,
    "output_config": OutputConfig,
}


ANYTHING = {*IGNORED, *AnthropicBody.ignored, "chat_template_kwargs"}
"""Fields of which no value is refused."""


def names_of(schema: type[Body]) -> list[str]:
    if schema in (AnthropicBody, CountTokensBody):
        return sorted({*schema.model_fields, *AnthropicBody.ignored, *AnthropicBody.refused})
    generates = schema in (CompletionBody, ChatBody, ResponsesBody)
    return sorted({*schema.model_fields, *(IGNORED.keys() | REFUSED.keys() | {"best_of"} if generates else ())})


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(load_bundled) as running:
        yield running


def spelled(base: dict[str, Any], name: str, value: str) -> bytes:
    """A body with one field as it is given."""
    rest = json.dumps({key: each for key, each in base.items() if key != name})[1:-1]
    return f"{{{rest}{',' if rest else ''}{json.dumps(name)}:{value}}}".encode()


def survives(server: RunningServer, path: str, body: bytes) -> int:
    answer = post(server.port, path, body)
    assert answer.status < 500, (path, body[:200], answer.content[:300])
    if answer.status >= 400:
        assert answer.json["error"]["message"] and len(answer.content) < 1500, body[:200]
    return answer.status


@pytest.mark.slow
@pytest.mark.parametrize(("path", "schema", "base"), BODIES, ids=lambda each: getattr(each, "__name__", None))
def test_no_value_of_a_field_is_an_error_of_the_server(
    server: RunningServer, path: str, schema: type[Body], base: dict[str, Any]
) -> None:
    for name in names_of(schema):
        statuses = [survives(server, path, spelled(base, name, value)) for value in WHOLE]
        assert 400 in statuses or name in ANYTHING, name
    assert get(server.port, "/health").status == 200


Spelled = Callable[[str, str], bytes]
"""A body with a value, as JSON, under a key somewhere in it."""
CHAT, RESPONSE = BODIES[1][2], BODIES[2][2]
TOOL = {"name": "f", "description": "x", "parameters": {}, "strict": True}
ANTHROPIC_TOOL = {"name": "f", "description": "x", "input_schema": {}, "type": "custom", "strict": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"text": "x"},
    "thinking": {"thinking": "x"},
    "redacted_thinking": {"data": "x"},
    "tool_use": {"id": "c", "name": "f", "input": {}},
    "image": {"data": "x"},
    "tool_result": {"tool_use_id": "c", "content": "x", "is_error": False},
}
ITEM = {"role": "user", "content": "x", "call_id": "c", "name": "f", "arguments": "{}", "output": "x"}


def inside(base: dict[str, Any], name: str, given: dict[str, Any], around: str = "[%s]") -> Spelled:
    """``around`` : what the part stands in, as the field ``name`` of a body."""
    return lambda key, value: spelled(base, name, around % spelled(given, key, value).decode())


def cases() -> Iterator[tuple[str, str, Spelled, Iterable[str]]]:
    """Name, path, how a body is spelled, and the keys it may be spelled with."""
    for name, part in PARTS.items():
        path, _, base = next(each for each in BODIES if name in each[1].model_fields)
        base = {**base, "stream": name == "stream_options"}
        yield name, path, inside(base, name, {}, "%s"), [info.alias or key for key, info in part.model_fields.items()]
    json_schema = '{"type":"json_schema","json_schema":%s}'
    keys = [info.alias or key for key, info in JsonSchemaFormat.model_fields.items()]
    yield "json_schema", BODIES[0][0], inside(BODIES[0][2], "response_format", {}, json_schema), keys
    chat, called = BODIES[1][0], {**CHAT, "tool_choice": "required"}
    yield "tool", chat, inside(called, "tools", {"function": {"name": "f"}}), ("type", "function")
    function = '[{"type":"function","function":%s}]'
    yield "function", chat, inside(called, "tools", {"name": "f"}, function), (*TOOL, "x")
    keywords = ("type", "properties", "required", "enum", "const", "anyOf", "$ref", "$defs", "x-guidance")
    schema = '[{"type":"function","function":{"name":"f","parameters":%s}}]'
    yield "schema of a function", chat, inside(called, "tools", {}, schema), keywords
    yield "choice", chat, inside(called, "tool_choice", {}, '{"type":"function","function":%s}'), ("name", "x")
    keys = ["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "x"]
    yield "message", chat, inside(CHAT, "messages", dict(MESSAGES[0])), keys
    for kind in ("message", "function_call", "function_call_output", "reasoning"):
        yield f"item {kind}", BODIES[2][0], inside(RESPONSE, "input", {"type": kind, **ITEM}), ("type", *ITEM)
    tool = {"type": "function", **TOOL}
    tools = {**RESPONSE, "tools": [tool]}
    yield "tool of a response", BODIES[2][0], inside(tools, "tools", tool), tool
    yield "choice of a response", BODIES[2][0], inside(tools, "tool_choice", tool, "%s"), tool
    path, base = BODIES[3][0], {**BODIES[3][2], "tools": [{"name": "f", "input_schema": {}}]}
    for kind, block in BLOCKS.items():
        role = "user" if kind == "tool_result" else "assistant"
        around = f'[{{"role":"{role}","content":[%s]}}]'
        yield f"block {kind}", path, inside(base, "messages", {"type": kind, **block}, around), ("type", *block, "x")
    yield "tool of a message", path, inside(base, "tools", ANTHROPIC_TOOL), (*ANTHROPIC_TOOL, "x")
    yield "choice of a message", path, inside(base, "tool_choice", {"type": "tool"}, "%s"), ToolChoice.model_fields
    yield "turn", path, inside(base, "messages", dict(MESSAGES[0])), ("role", "content", "x")


@pytest.mark.parametrize(("path", "body", "keys"), [pytest.param(*case, id=name) for name, *case in cases()])
def test_no_value_within_a_part_is_an_error_of_the_server(
    server: RunningServer, path: str, body: Spelled, keys: Iterable[str]
) -> None:
    for key in keys:
        for value in WHOLE:
            survives(server, path, body(key, value))
    assert get(server.port, "/health").status == 200
