"""Every field of every body, with values that no client means: never a 5xx, and the engine lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    "0", "-1", "1", "-0.0", "2147483648", "9223372036854775808", "18446744073709551616", "1" + 400 * "0",
    "-1" + 400 * "0", "1" + 5000 * "0", "1e308", "-1e308", "5e-324", "1e400", "NaN", "Infinity", "true", "null", '""',
    '"x"', '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"' + 3000 * "y" + '"',
]  # fmt: skip
WHOLE = [
    *SCALARS, "[]", "{}", "[[]]", "[null]", '[""]', '["x", 1]', "[1, -1]", "[9223372036854775808]",
    "[1" + 400 * "0" + "]", '{"": 0}', '{"0": 1e400}', '{"00": 1, "0": 1}', '{"-1": 1}', '{"' + 5000 * "9" + '": 1}',
    '{"\\u0000": {"x": []}}', 150 * "[" + 150 * "]", 5000 * "[" + 5000 * "]", 150 * '{"a":' + "1" + 150 * "}",
]  # fmt: skip
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
    "stream_options": StreamOptions, "response_format": ResponseFormat, "structured_outputs": StructuredOutputs,
    "prediction": Prediction, "text": TextConfig, "reasoning": ReasoningConfig, "thinking": Thinking,
    "output_config": OutputConfig,
}  # fmt: skip


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


@pytest.mark.parametrize(("name", "part"), [*PARTS.items(), ("json_schema", JsonSchemaFormat)])
def test_no_value_within_a_part_is_an_error_of_the_server(server: RunningServer, name: str, part: type[Any]) -> None:
    for field, info in part.model_fields.items():
        key = info.alias or field
        for value in WHOLE:
            inner = f"{{{json.dumps(key)}:{value}}}"
            if name == "json_schema":
                body = spelled(BODIES[0][2], "response_format", f'{{"type":"json_schema","json_schema":{inner}}}')
                survives(server, "/v1/completions", body)
                continue
            path, _, base = next(each for each in BODIES if name in each[1].model_fields)
            survives(server, path, spelled({**base, "stream": name == "stream_options"}, name, inner))
    assert get(server.port, "/health").status == 200


@pytest.mark.parametrize("key", ["type", "function", "name", "description", "parameters", "strict", "x"])
def test_no_value_within_a_tool_is_an_error_of_the_server(server: RunningServer, key: str) -> None:
    base = {**BODIES[1][2], "tool_choice": "required"}
    for value in WHOLE:
        if key in ("type", "function"):
            tool = f'{{"function":{{"name":"f"}},{json.dumps(key)}:{value}}}'
        else:
            tool = f'{{"type":"function","function":{{"name":"f",{json.dumps(key)}:{value}}}}}'
        survives(server, "/v1/chat/completions", spelled(base, "tools", f"[{tool}]"))
    assert get(server.port, "/health").status == 200


@pytest.mark.parametrize(
    "keyword", ["type", "properties", "required", "enum", "const", "anyOf", "$ref", "$defs", "x-guidance"]
)
def test_no_schema_of_a_tool_is_an_error_of_the_server(server: RunningServer, keyword: str) -> None:
    base = {**BODIES[1][2], "tool_choice": "required"}
    for value in WHOLE:
        tool = f'{{"type":"function","function":{{"name":"f","parameters":{{{json.dumps(keyword)}:{value}}}}}}}'
        survives(server, "/v1/chat/completions", spelled(base, "tools", f"[{tool}]"))
        choice = f'{{"type":"function","function":{{"name":{value}}}}}'
        survives(server, "/v1/chat/completions", spelled(base, "tool_choice", choice))
    assert get(server.port, "/health").status == 200


@pytest.mark.parametrize("key", ["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "x"])
def test_no_value_within_a_message_is_an_error_of_the_server(server: RunningServer, key: str) -> None:
    for value in WHOLE:
        message = spelled({"role": "user", "content": "x"}, key, value).decode()
        survives(server, "/v1/chat/completions", f'{{"max_tokens":1,"messages":[{message}]}}'.encode())
    assert get(server.port, "/health").status == 200


@pytest.mark.parametrize("kind", ["message", "function_call", "function_call_output", "reasoning"])
def test_no_value_within_an_item_is_an_error_of_the_server(server: RunningServer, kind: str) -> None:
    item = {"type": kind, "role": "user", "content": "x", "call_id": "c", "name": "f", "arguments": "{}", "output": "x"}
    for key in item:
        for value in WHOLE:
            given = spelled(item, key, value).decode()
            survives(server, "/v1/responses", f'{{"max_output_tokens":1,"input":[{given}]}}'.encode())
    assert get(server.port, "/health").status == 200


@pytest.mark.parametrize("name", ["tools", "tool_choice"])
def test_no_value_within_a_tool_of_a_response_is_an_error_of_the_server(server: RunningServer, name: str) -> None:
    tool = {"type": "function", "name": "f", "description": "x", "parameters": {}, "strict": True}
    base = {"input": "x", "max_output_tokens": 1, "tools": [tool]}
    for key in tool:
        for value in WHOLE:
            given = spelled(tool, key, value).decode()
            survives(server, "/v1/responses", spelled(base, name, f"[{given}]" if name == "tools" else given))
    assert get(server.port, "/health").status == 200


@pytest.mark.parametrize("kind", ["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"])
def test_no_value_within_a_block_is_an_error_of_the_server(server: RunningServer, kind: str) -> None:
    block = {
        "text": "x", "thinking": "x", "data": "x", "id": "c", "name": "f", "input": {}, "tool_use_id": "c",
        "content": "x", "is_error": False, "cache_control": None,
    }  # fmt: skip
    known = {"text": ["text"], "thinking": ["thinking"], "tool_use": ["id", "name", "input"]}
    known["tool_result"] = ["tool_use_id", "content", "is_error"]
    base = {"type": kind, **{key: block[key] for key in known.get(kind, ["data"])}}
    role = "user" if kind == "tool_result" else "assistant"
    for key in ("type", *block):
        for value in WHOLE:
            turn = f'{{"role":"{role}","content":[{spelled(base, key, value).decode()}]}}'
            survives(server, "/v1/messages", f'{{"max_tokens":1,"messages":[{turn}]}}'.encode())
    assert get(server.port, "/health").status == 200


@pytest.mark.parametrize("name", ["tools", "tool_choice", "messages"])
def test_no_value_within_a_tool_of_a_message_is_an_error_of_the_server(server: RunningServer, name: str) -> None:
    tool = {"name": "f", "description": "x", "input_schema": {}, "type": "custom", "strict": True}
    base = {"messages": MESSAGES, "max_tokens": 1, "tools": [{"name": "f", "input_schema": {}}]}
    parts: dict[str, dict[str, Any]] = {
        "tools": tool,
        "tool_choice": dict.fromkeys(ToolChoice.model_fields),
        "messages": {**MESSAGES[0]},
    }
    for key in (*parts[name], "x"):
        for value in WHOLE:
            rest = {"type": "tool"} if name == "tool_choice" else parts[name]
            given = spelled(rest, key, value).decode()
            survives(server, "/v1/messages", spelled(base, name, given if name == "tool_choice" else f"[{given}]"))
    assert get(server.port, "/health").status == 200
