"""Tools through OpenAI's own client: calls that a grammar holds the bundled model to, and calls as trained models write
them, said by an engine that says what it is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from server.schema.responses import ResponsesBody
from ssd.bundled import MODEL_PATH
from tests.server.bundled_engine import load_bundled
from tests.server.client import official_client, post
from tests.server.failing_engine import RunningServer, SayingCodec, SayingEngine, serving

MODEL = "test-model"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of the coming days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "London"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
ASKED: list[Any] = [{"role": "user", "content": "What will the weather be in Paris?"}]
ONE_CALL: dict[str, Any] = {
    "model": MODEL,
    "messages": ASKED,
    "tools": [WEATHER, NOW],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_tokens": 160,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(partial(load_bundled, max_model_len=1024), model=str(MODEL_PATH)) as running:
        yield running


@pytest.fixture(scope="module")
def saying() -> Iterator[RunningServer]:
    template = "{{ tools }} <tool_call> <think>"
    with serving(lambda _: SayingEngine(template), obfuscation_interval_s=0) as running:
        yield running


@pytest.fixture
def told(saying: RunningServer) -> Iterator[openai.OpenAI]:
    with official_client(saying.port) as made:
        yield made


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "tools": [WEATHER, NOW], **fields}


def calls_of(choice: Any) -> list[Any]:
    calls: list[Any] | None = choice.message.tool_calls
    return calls or []


def is_weather_call(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    return (
        call.type == "function"
        and call.id.startswith("call_")
        and call.function.name == "get_weather"
        and arguments.keys() == {"city", "days"}
        and arguments["city"] in ("Paris", "London")
        and arguments["days"] >= 1
    )


# -- held to by a grammar, on the bundled model ----------------------------------------------------------------------


def test_a_named_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    found = client.chat.completions.create(**{**ONE_CALL, "tool_choice": chosen})
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = calls_of(choice)
    assert is_weather_call(call)


def test_a_required_call_is_of_one_of_the_tools_in_every_choice(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(**{**ONE_CALL, "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 400})
    ids = []
    for choice in found.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = calls_of(choice)
        assert is_weather_call(call) or (call.type, call.function.name) == ("function", "now")
        ids.append(call.id)
    assert len(set(ids)) == 3


def test_a_schema_that_cannot_be_compiled_names_the_field(server: RunningServer) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 7}}}
    answer = post(server.port, "/v1/chat/completions", {**ONE_CALL, "tools": [wrong]})
    assert (answer.status, answer.error["param"]) == (400, "tools")


def test_arguments_of_more_values_than_a_body_may_have_are_refused(server: RunningServer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" + "," * (1 << 18) + "]"}}
    history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = post(server.port, "/v1/chat/completions", {"messages": history, "max_tokens": 1})
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "values" in answer.error["message"]


# -- as trained models write them ------------------------------------------------------------------------------------

CALLS = (
    "<think>\nParis it is.\n</think>\n\nI will look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def test_without_parallel_calls_there_is_one(told: openai.OpenAI) -> None:
    found = told.chat.completions.create(**say(CALLS, parallel_tool_calls=False))
    (call,) = calls_of(found.choices[0])
    assert call.function.name == "get_weather"


def test_what_calls_nothing_is_content_and_where_nothing_may_be_called_calls_are_content(told: openai.OpenAI) -> None:
    for text, choice in (("It is sunny.", "auto"), (CALLS.split("</think>\n\n")[1], "none")):
        found = told.chat.completions.create(**say(text, tool_choice=choice)).choices[0]
        assert (found.message.content, found.message.tool_calls, found.finish_reason) == (text, None, "stop")


@pytest.mark.parametrize(
    ("marker", "pattern"),
    [("[TOOL_CALLS]", r"([A-Za-z0-9]{9}) \1"), ("<|tool_calls_section_begin|>", r"(functions\.now:0) \1")],
)
def test_the_template_is_given_calls_by_the_names_that_it_writes(marker: str, pattern: str) -> None:
    class Naming(SayingCodec):
        def encode_chat(self, messages: list[dict[str, Any]], **_options: Any) -> list[int]:
            _, said, result = messages
            return self.encode_prompt(f"{said['tool_calls'][0]['id']} {result['tool_call_id']}")

    def load(_: object) -> SayingEngine:
        engine = SayingEngine("")
        engine.codec = Naming("{{ tools }} " + marker)
        return engine

    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "x"},
    ]
    with serving(load) as running:
        answer = post(running.port, "/v1/chat/completions", {**say("x"), "messages": turns}).json
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"])


def test_reasoning_is_left_out_on_request_and_never_said_to_be_content(told: openai.OpenAI) -> None:
    found = told.chat.completions.create(**say("<think>secret</think>done"), extra_body={"include_reasoning": False})
    message: Any = found.choices[0].message
    assert message.content == "done"
    assert not hasattr(message, "reasoning_content")
    assert found.usage is not None and found.usage.completion_tokens_details is not None
    assert found.usage.completion_tokens_details.reasoning_tokens == len("<think>secret</think>")  # each character one


@pytest.mark.parametrize(
    ("options", "fields", "param"),
    [
        ({"tool_call_parser": "none"}, {}, "tool_choice"),
        ({}, {"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        ({}, {"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: Any, fields: Any, param: str) -> None:
    with serving(lambda _: SayingEngine("{{ tools }} <tool_call>"), **options) as running:
        answer = post(running.port, "/v1/chat/completions", {**say("x"), **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_functions_of_a_namespace_are_called_as_these_and_a_web_search_is_left_out(told: openai.OpenAI) -> None:
    """As Codex asks for them."""
    of_codex: Any = {
        "type": "namespace",
        "name": "agents",
        "description": "Tools for agents.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}],
    }
    asked: Any = {"model": MODEL, "tools": [of_codex, {"type": "web_search", "external_web_access": False}]}
    said = '<tool_call>\n{"name": "agents.spawn", "arguments": {"a": 1}}\n</tool_call>'
    whole = told.responses.create(input=said, **asked)
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.namespace, call.name, call.arguments) == ("agents", "spawn", '{"a": 1}')
    assert [tool.type for tool in whole.tools] == ["namespace", "web_search"]
    with told.responses.stream(input=said, **asked) as stream:
        done = next(event for event in stream if event.type == "response.output_item.done").item
    assert done.type == "function_call" and (done.namespace, done.name) == ("agents", "spawn")
    back = [item.model_dump(exclude_none=True) for item in whole.output]
    body = ResponsesBody.parse({"model": MODEL, "input": back, **asked})
    (message,) = body.chat_fields()["messages"]
    assert message["tool_calls"][0]["function"]["name"] == "agents.spawn"
    assert [tool["function"]["name"] for tool in body.chat_fields()["tools"]] == ["agents.spawn"]
    wrongs: Any = ({"type": "namespace", "name": "agents"}, {**of_codex, "tools": [{"type": "custom", "name": "f"}]})
    for wrong in wrongs:
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\]"):
            told.responses.create(input=said, model=MODEL, tools=[wrong])
