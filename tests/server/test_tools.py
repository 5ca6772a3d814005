"""Tools through OpenAI's own client: calls that a grammar holds the bundled model to, and calls as trained models write
them, said by an engine that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from server.answers.wire import PADDED_BYTES
from ssd.bundled import MODEL_PATH
from tests.server.bundled_engine import load_bundled
from tests.server.client import official_client, post
from tests.server.failing_engine import RunningServer, SayingEngine, serving

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
    "model": MODEL, "messages": ASKED, "tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False,
    "temperature": 0, "max_tokens": 160,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(partial(load_bundled, max_model_len=1024), model=str(MODEL_PATH)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with official_client(server.port) as made:
        yield made


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


def test_a_streamed_call_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ONE_CALL).choices[0].message.tool_calls
    with client.chat.completions.create(**ONE_CALL, stream=True) as stream:
        chunks = list(stream)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    first, *others = pieces
    assert first.function is not None and whole is not None and whole[0].type == "function"
    assert first.id is not None and first.id.startswith("call_")
    assert (first.index, first.type, first.function.arguments) == (0, "function", "")
    assert first.function.name == whole[0].function.name
    assert all((piece.index, piece.id, piece.type) == (0, None, None) for piece in others)
    arguments = "".join(piece.function.arguments or "" for piece in others if piece.function)
    assert arguments == whole[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(delta.content for delta in deltas)


def test_what_functions_returned_and_what_was_called_is_part_of_the_next_prompt(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**ONE_CALL).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 21 degrees"}
    history: list[Any] = [*ASKED, message, result]
    found = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=4)
    assert found.choices[0].finish_reason in ("length", "stop")
    without = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], max_tokens=4)
    assert found.usage is not None and without.usage is not None
    assert found.usage.prompt_tokens > without.usage.prompt_tokens + 10


def test_a_second_conversation_with_a_similar_call_takes_fewer_passes(server: RunningServer) -> None:
    fixed = {name: {"const": f"the {name} of nobody's luggage"} for name in ("owner", "colour", "weight")}
    parameters = {"type": "object", "properties": fixed, "required": [*fixed], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "describe_luggage", "parameters": parameters}}

    def passes(question: str) -> int:
        engine = server.engine_thread.engine
        before = engine.metrics.num_verify_steps
        messages = [{"role": "user", "content": question}]
        fields = {**ONE_CALL, "messages": messages, "tools": [tool], "max_tokens": 500}
        choice = post(server.port, "/v1/chat/completions", fields).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        return engine.metrics.num_verify_steps - before

    first = passes("Tell me: whose is it?")
    assert passes("Please look it up, and then tell me what it weighs.") < first


def test_older_names_are_answered_in_the_older_way(client: openai.OpenAI) -> None:
    fields = {key: value for key, value in ONE_CALL.items() if not key.startswith(("tool", "parallel"))}
    functions: Any = [WEATHER["function"]]
    chosen: Any = {"name": "get_weather"}
    found = client.chat.completions.create(**fields, functions=functions, function_call=chosen)
    choice = found.choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments)["city"] in ("Paris", "London")
    with client.chat.completions.create(**fields, functions=functions, function_call=chosen, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    pieces = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [piece.name for piece in pieces if piece.name] == ["get_weather"]
    assert "".join(piece.arguments or "" for piece in pieces) == choice.message.function_call.arguments
    assert chunks[-1].finish_reason == "function_call"


def test_with_tools_that_may_be_called_a_response_format_holds_for_the_answer(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"sunny": {"type": "boolean"}},
        "required": ["sunny"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = client.chat.completions.create(
        **{**ONE_CALL, "tool_choice": "auto", "n": 4, "temperature": 1.5, "seed": 3}, response_format=form
    )
    for choice in found.choices:
        if choice.message.tool_calls:
            assert choice.message.content is None
        else:
            assert json.loads(choice.message.content or "").keys() == {"sunny"}


def test_a_schema_that_cannot_be_compiled_names_the_field(server: RunningServer) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 7}}}
    answer = post(server.port, "/v1/chat/completions", {**ONE_CALL, "tools": [wrong]})
    assert (answer.status, answer.error["param"]) == (400, "tools")


def test_documents_are_refused_where_the_template_does_not_read_them(server: RunningServer) -> None:
    fields = {"messages": ASKED, "documents": [{"title": "Paris", "text": "It is sunny."}], "max_tokens": 1}
    answer = post(server.port, "/v1/chat/completions", fields)
    assert (answer.status, answer.error["param"]) == (400, "documents")
    assert post(server.port, "/tokenize", {"messages": ASKED, "documents": []}).status == 200


@pytest.mark.parametrize("calls", [5, "x", {}, [5], [[]], [{"function": 5}], [{"function": {"arguments": "[" * 500}}]])
def test_malformed_calls_of_earlier_messages_are_no_fault_of_the_server(server: RunningServer, calls: Any) -> None:
    history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, *ASKED]
    answer = post(server.port, "/v1/chat/completions", {"messages": history, "max_tokens": 1})
    assert answer.status in (200, 400)
    if answer.status == 400:
        assert answer.error["param"] == "messages"


def test_arguments_of_more_values_than_a_body_may_have_are_refused(server: RunningServer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" + "," * (1 << 18) + "]"}}
    history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = post(server.port, "/v1/chat/completions", {"messages": history, "max_tokens": 1})
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "values" in answer.error["message"]


def test_special_tokens_are_text_on_request(server: RunningServer) -> None:
    engine = server.engine_thread.engine
    assert engine.codec is not None
    user = engine.codec.encode_completion("<|user|>")[0]
    fields = {"prompt": "x", "max_tokens": 3, "allowed_token_ids": [user], "temperature": 0}
    for options in ({}, {"stream": True, "stream_options": {"include_obfuscation": True}}):
        for skipped in (True, False):
            answer = post(server.port, "/v1/completions", {**fields, **options, "skip_special_tokens": skipped})
            events = answer.events if options else [answer.json]
            said = "".join(choice["text"] for event in events for choice in event["choices"])
            assert said == ("" if skipped else "<|user|>" * 3)


def test_tokens_of_tools_are_counted_by_tokenize(server: RunningServer) -> None:
    counted = post(server.port, "/tokenize", {"messages": ASKED, "tools": [WEATHER, NOW]}).json
    answer = post(server.port, "/v1/chat/completions", {**ONE_CALL, "tool_choice": "auto", "max_tokens": 1}).json
    assert counted["count"] == answer["usage"]["prompt_tokens"]


# -- as trained models write them ------------------------------------------------------------------------------------

CALLS = (
    "<think>\nParis it is.\n</think>\n\nI will look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def test_calls_reasoning_and_content_are_told_apart(told: openai.OpenAI) -> None:
    found = told.chat.completions.create(**say(CALLS))
    (choice,) = found.choices
    message: Any = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.reasoning_content.strip() == message.reasoning.strip() == "Paris it is."
    assert message.content.strip() == "I will look."
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("get_weather", {"city": "Paris", "days": 2}),
        ("now", {}),
    ]
    assert found.usage is not None and found.usage.completion_tokens_details is not None
    assert found.usage.completion_tokens_details.reasoning_tokens == CALLS.index("</think>") + len("</think>")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_adds_up_to_the_whole_message(told: openai.OpenAI, n: int, padded: bool) -> None:
    whole: Any = told.chat.completions.create(**say(CALLS, n=n)).choices
    options: Any = {"include_usage": True, "include_obfuscation": padded}
    with told.chat.completions.create(**say(CALLS, n=n), stream=True, stream_options=options) as stream:
        chunks = list(stream)
    for expected in whole:
        deltas: list[Any] = [
            choice.delta for chunk in chunks for choice in chunk.choices if choice.index == expected.index
        ]
        for field in ("content", "reasoning_content", "reasoning"):
            said = "".join(getattr(delta, field, None) or "" for delta in deltas)
            assert said == getattr(expected.message, field)
        calls: dict[int, list[str]] = {}
        for piece in [piece for delta in deltas for piece in delta.tool_calls or ()]:
            if piece.id is not None:
                calls[piece.index] = [piece.function.name, ""]
            calls[piece.index][1] += piece.function.arguments
        wanted = [[call.function.name, call.function.arguments] for call in expected.message.tool_calls]
        assert [calls[index] for index in sorted(calls)] == wanted
    endings = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert endings == ["tool_calls"] * n
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == n * (CALLS.index("</think>") + len("</think>"))


def test_padded_events_of_calls_are_as_many_and_as_long_as_those_of_content(saying: RunningServer) -> None:
    plain = "".join("w" if character.isalnum() else "." for character in CALLS)

    def lengths(text: str) -> list[int]:
        fields = say(text, stream=True, stream_options={"include_obfuscation": True})
        answer = post(saying.port, "/v1/chat/completions", fields)
        assert answer.events
        return [len(block) + 2 for block in answer.content.split(b"\n\n")[:-2]]

    of_calls = lengths(CALLS)
    assert of_calls == lengths(plain)
    assert all(length % PADDED_BYTES == 0 for length in of_calls)


def test_token_ids_of_a_streamed_call_are_all_there(saying: RunningServer) -> None:
    answer = post(saying.port, "/v1/chat/completions", say(CALLS, stream=True, return_token_ids=True))
    choices = [event["choices"][0] for event in answer.events]
    assert [token for choice in choices for token in choice["token_ids"]] == list(map(ord, CALLS))


def test_without_parallel_calls_there_is_one(told: openai.OpenAI) -> None:
    found = told.chat.completions.create(**say(CALLS, parallel_tool_calls=False))
    (call,) = calls_of(found.choices[0])
    assert call.function.name == "get_weather"


def test_what_calls_nothing_is_content_and_where_nothing_may_be_called_calls_are_content(told: openai.OpenAI) -> None:
    for text, choice in (("It is sunny.", "auto"), (CALLS.split("</think>\n\n")[1], "none")):
        found = told.chat.completions.create(**say(text, tool_choice=choice)).choices[0]
        assert (found.message.content, found.message.tool_calls, found.finish_reason) == (text, None, "stop")


def test_reasoning_is_left_out_on_request_and_never_said_to_be_content(told: openai.OpenAI) -> None:
    message: Any = (
        told.chat.completions.create(**say("<think>secret</think>done"), extra_body={"include_reasoning": False})
        .choices[0]
        .message
    )
    assert message.content == "done"
    assert not hasattr(message, "reasoning_content")


def test_a_call_that_is_cut_off_ends_for_its_length(told: openai.OpenAI) -> None:
    found = told.chat.completions.create(**say(CALLS, max_tokens=CALLS.index('"days"'))).choices[0]
    assert found.finish_reason == "length"
    assert not found.message.tool_calls, "what it says is no JSON"
    stream = told.chat.completions.create(**say(CALLS, max_tokens=CALLS.index('"days"')), stream=True)
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(call.function.arguments for call in deltas).startswith('{"city": "Paris"')


@pytest.mark.parametrize(
    ("options", "fields", "param"),
    [
        ({"tool_call_parser": "none"}, {}, "tool_choice"),
        ({}, {"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        ({}, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({}, {"tools": [NOW, NOW]}, "tools"),
        ({}, {"guided_regex": "a+"}, "guided_regex"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: Any, fields: Any, param: str) -> None:
    with serving(lambda _: SayingEngine("{{ tools }} <tool_call>"), **options) as running:
        answer = post(running.port, "/v1/chat/completions", {**say("x"), **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
