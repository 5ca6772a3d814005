"""/v1/messages, whose every body and event is one of the official client's own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import types
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel

from server.schema.anthropic import messages_of
from ssd.bundled import MODEL_PATH
from tests.server.bundled_engine import load_bundled
from tests.server.client import Answer, ask, get, post
from tests.server.failing_engine import FailingEngine, RunningServer, SayingEngine, serving

MODEL = "test-model"
PATH = "/v1/messages"
ASKED = "Write a function that adds two numbers."
TURNS = [{"role": "user", "content": ASKED}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # which the client has no argument for


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(load_bundled, model=str(MODEL_PATH), obfuscation_interval_s=0.0) as running:
        yield running


def client_of(port: int, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0)


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with client_of(server.port) as made:
        yield made


EVENTS: dict[str, type[BaseModel]] = {
    "message_start": types.RawMessageStartEvent,
    "content_block_start": types.RawContentBlockStartEvent,
    "content_block_delta": types.RawContentBlockDeltaEvent,
    "content_block_stop": types.RawContentBlockStopEvent,
    "message_delta": types.RawMessageDeltaEvent,
    "message_stop": types.RawMessageStopEvent,
    "error": ErrorResponse,
}


def say(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """A greedy message that is not streamed, which must succeed."""
    answer = post(server.port, PATH, {"messages": TURNS, "temperature": 0, "max_tokens": 16, **fields})
    assert answer.status == 200, answer.content
    types.Message.model_validate_json(answer.content, strict=True)
    found: dict[str, Any] = answer.json
    return found


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream but pings, each of the client's types and named after it."""
    assert answer.status == 200, answer.content
    events = []
    for block in answer.content.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)
            events.append(event)
    return events


def stream(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """The events of a greedy message."""
    body = {"messages": TURNS, "temperature": 0, "max_tokens": 16, "stream": True, **fields}
    return events_of(post(server.port, PATH, body))


def told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that events tell of, as a client puts them together."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in events:
        kind = event["type"]
        if not kind.startswith("content_block"):
            continue
        if kind == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts.append("")
        elif kind == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            texts[-1] += next(value for key, value in event["delta"].items() if key != "type")
        is_open = kind != "content_block_stop"
    assert not is_open
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
        else:
            block["text" if block["type"] == "text" else "thinking"] = text
    return blocks


# -- whole and streamed ----------------------------------------------------------------------------------------------


def test_a_message_says_what_a_chat_completion_says(server: RunningServer) -> None:
    messages = [{"role": "system", "content": "Be short."}, *TURNS]
    chat = post(server.port, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 16}).json
    found = say(server, system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}])
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (found["type"], found["role"], found["model"], found["id"][:4]) == ("message", "assistant", MODEL, "msg_")
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_a_stream_comes_to_what_the_whole_message_is(server: RunningServer) -> None:
    whole, events = say(server), stream(server)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert told(events) == whole["content"]
    begun, ended = events[0]["message"], events[-2]
    assert (begun["content"], begun["stop_reason"], begun["model"]) == ([], None, MODEL)
    assert ended["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert begun["usage"]["input_tokens"] == sum(
        ended["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


def test_how_a_message_ended_is_said(server: RunningServer) -> None:
    def ended(**fields: Any) -> tuple[str, str | None]:
        whole, events = say(server, **fields), stream(server, **fields)
        assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return whole["stop_reason"], whole["stop_sequence"]

    assert ended(max_tokens=3, ignore_eos=True) == ("max_tokens", None)
    schema = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    assert ended(output_config={"format": schema}) == ("end_turn", None)
    text = say(server)["content"][0]["text"]
    assert ended(stop_sequences=[text[3:6]]) == ("stop_sequence", text[3:6])


def test_the_assistants_last_words_are_continued(server: RunningServer) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "def add("}]
    fields = {"messages": turns, "continue_final_message": True, "temperature": 0, "max_tokens": 8}
    chat = post(server.port, "/v1/chat/completions", fields).json
    found = say(server, messages=turns, max_tokens=8)
    assert found["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_the_client_reads_and_follows_a_message(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": TURNS, "max_tokens": 300, **GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        followed = events.get_final_message()
    assert followed.content[0].type == whole.content[0].type == "text"
    assert followed.content[0].text == whole.content[0].text != ""
    assert followed.stop_reason == whole.stop_reason == "end_turn"
    assert followed.usage.output_tokens == whole.usage.output_tokens
    assert whole._request_id and whole.id == f"msg_{whole._request_id}"


def test_tokens_are_counted_as_they_are_taken(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": TURNS, "system": "Be short.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted > client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens


# -- tools and reasoning ---------------------------------------------------------------------------------------------

WEATHER: dict[str, Any] = {
    "name": "get_weather", "description": "The weather of a city.", "cache_control": {"type": "ephemeral"},
    "input_schema": {
        "type": "object", "additionalProperties": False, "required": ["city"],
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    },
}  # fmt: skip
TIME = {"type": "custom", "name": "get_time", "input_schema": {"type": "object", "properties": {}}}


def test_an_agent_of_the_client_runs_its_tools(client: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "Sunny."

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=60, messages=[{"role": "user", "content": "The weather?"}], tools=[get_weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_iterations=2, **GREEDY,
    )  # fmt: skip
    answers = list(runner)  # the first request asks for a conversation that is kept, and is refused
    first, second = (answer.usage for answer in answers)
    assert answers[0].stop_reason == "tool_use" and asked
    assert sum_of_input(second) > sum_of_input(first)


def sum_of_input(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens)


def test_what_is_thought_is_a_block_of_its_own() -> None:
    text = "<think>\nhm\n</think>\nHello."
    with serving(lambda _: SayingEngine("{{ '<think>' }}"), reasoning_parser="qwen3") as server:
        turns = [{"role": "user", "content": text}]
        whole, events = say(server, messages=turns, max_tokens=100), stream(server, messages=turns, max_tokens=100)
        hidden = say(server, messages=turns, max_tokens=100, thinking={"type": "enabled", "display": "omitted"})
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert "hm" in whole["content"][0]["thinking"] and "Hello." in whole["content"][1]["text"]
    assert told(events) == whole["content"]
    assert hidden["content"] == whole["content"][1:]


# -- what comes in ---------------------------------------------------------------------------------------------------


def test_turns_become_the_messages_they_say() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    other = {"type": "tool_use", "id": "c2", "name": "g", "input": {}, "cache_control": {"type": "ephemeral"}}
    messages = messages_of("Help.", [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Well", "citations": None}, {"type": "text", "text": "then."}, call, other,
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "done"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [{"type": "text", "text": "no"}]},
            {"type": "tool_result", "tool_use_id": "c3"},
            {"type": "text", "text": "Go on."},
        ]},
    ])  # fmt: skip
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "tool", "user"]
    said = messages[2]
    assert (said["reasoning_content"], said["content"]) == ("hm", "Well\nthen.")
    functions = [call["function"] for call in said["tool_calls"]]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == [("f", {"a": 1}), ("g", {})]
    assert [message["content"] for message in messages[3:]] == ["done", "Error: no", "", "Go on."]
    assert [message["tool_call_id"] for message in messages[3:6]] == ["c1", "c2", "c3"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0]: "),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "content[0].y"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        ({"messages": 5000 * TURNS}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "shorten the prompt"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{**TIME, "input_examples": [{}]}]}, "input_examples"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice"),
        ({"stop_sequences": ["x" * 5000]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "output_config"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(server: RunningServer, fields: dict[str, Any], says: str) -> None:
    answer = post(server.port, PATH, {"messages": TURNS, "max_tokens": 4, **fields})
    assert answer.status == 400, answer.content
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error" and says in error["message"], error


def test_hints_about_what_is_not_here_are_taken(server: RunningServer) -> None:
    say(
        server, metadata={"user_id": "me"}, service_tier="auto", cache_control={"type": "ephemeral"}, mcp_servers=[],
        thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "low"}, tools=[], container=None,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, top_k=40, top_p=0.9,
    )  # fmt: skip


# -- errors, keys and what becomes of streams ------------------------------------------------------------------------


def test_errors_have_the_form_that_the_client_reads(server: RunningServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL, messages=[], max_tokens=1)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nobody", messages=[{"role": "user", "content": "x"}], max_tokens=1)
    assert unknown.value.type == "not_found_error"
    for method, path, status in (("GET", PATH, 405), ("POST", f"{PATH}/batches", 404), ("POST", PATH, 400)):
        answer = ask(server.port, method, path, b"{" if method == "POST" else None)
        assert answer.status == status
        ErrorResponse.model_validate_json(answer.content, strict=True)
        assert answer.json["request_id"] == answer.headers["request-id"]
    assert set(post(server.port, "/v1/chat/completions", {}).error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_keys_come_in_the_header_that_the_client_sends(root_path: str) -> None:
    keys = ("sesame", "other")
    with serving(lambda _: FailingEngine(), api_keys=keys, root_path=root_path) as server:
        with client_of(server.port, "sesame") as client:
            assert client.messages.create(model=MODEL, messages=[{"role": "user", "content": "abc"}], max_tokens=2)
        with client_of(server.port, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(model=MODEL, messages=[{"role": "user", "content": "abc"}], max_tokens=2)
        assert refused.value.type == "authentication_error"
        for headers, status in (
            ({"x-api-key": "other"}, 200), ({"x-api-key": ""}, 401), ({"x-api-key": "wrong"}, 401),
            ({"authorization": "Bearer wrong", "x-api-key": "other"}, 200), ({"authorization": "Basic other"}, 401),
        ):  # fmt: skip
            assert get(server.port, f"{root_path}/v1/models", headers=headers).status == status
        unknown = post(server.port, f"{root_path}{PATH}", {}, headers={"x-api-key": "other"})
        assert unknown.json["type"] == "error"


def test_a_failure_in_a_stream_is_its_last_event() -> None:
    turns: list[Any] = [{"role": "user", "content": "abcdef"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": turns, "max_tokens": 6}
    with serving(lambda _: FailingEngine(fail_at_step=3)) as server:
        events = events_of(post(server.port, PATH, {**asked, "stream": True}))
    assert [event["type"] for event in events].count("content_block_delta") == 2
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")
    with (
        serving(lambda _: FailingEngine(fail_at_step=3)) as server,
        client_of(server.port) as client,
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(**asked) as followed,
    ):
        followed.until_done()


def test_a_slow_message_is_kept_alive_and_begins_at_once() -> None:
    with serving(lambda _: FailingEngine(step_s=0.4), keep_alive_s=0.1) as server:
        body = {"messages": [{"role": "user", "content": "ab"}], "stream": True, "max_tokens": 2}
        answer = post(server.port, PATH, body)
    assert answer.content.startswith(b"event: message_start\n")
    assert b'event: ping\ndata: {"type":"ping"}\n\n' in answer.content
    events_of(answer)
