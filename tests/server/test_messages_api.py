"""/v1/messages, whose every body and event is one of the official client's own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types.shared import ErrorResponse

from server.schema.anthropic import AnthropicChat, messages_of
from tests.server.apis import INPUT, MESSAGES
from tests.server.client import ask, claude_client, get, post
from tests.server.failing_engine import FailingEngine, RunningServer, SayingEngine, serving

MODEL = "test-model"
PATH = "/v1/messages"
TURNS = [{"role": "user", "content": INPUT}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # which the client has no argument for


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with claude_client(server.port) as made:
        yield made


# -- whole and streamed ----------------------------------------------------------------------------------------------


def test_a_stream_comes_to_what_the_whole_message_is(server: RunningServer) -> None:
    whole, events = MESSAGES.say(server.port), MESSAGES.stream(server.port)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"} and {event["index"] for event in events[1:-2]} == {0}
    assert "".join(MESSAGES.piece(event) or "" for event in events) == MESSAGES.said(whole)
    begun, ended = events[0]["message"], events[-2]
    assert (begun["content"], begun["stop_reason"], begun["model"]) == ([], None, MODEL)
    assert ended["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert begun["usage"]["input_tokens"] == sum(
        ended["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


def test_how_a_message_ended_is_said(server: RunningServer) -> None:
    def ended(**fields: Any) -> tuple[str, str | None]:
        whole, events = MESSAGES.say(server.port, **fields), MESSAGES.stream(server.port, **fields)
        assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return whole["stop_reason"], whole["stop_sequence"]

    assert ended(max_tokens=3, ignore_eos=True) == ("max_tokens", None)
    schema = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    assert ended(output_config={"format": schema}) == ("end_turn", None)
    text = MESSAGES.say(server.port)["content"][0]["text"]
    assert ended(stop_sequences=[text[3:6]]) == ("stop_sequence", text[3:6])


def test_the_assistants_last_words_are_continued(server: RunningServer) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "def add("}]
    fields = {"messages": turns, "continue_final_message": True, "temperature": 0, "max_tokens": 8}
    chat = post(server.port, "/v1/chat/completions", fields).json
    found = MESSAGES.say(server.port, messages=turns, max_tokens=8)
    assert found["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_tokens_are_counted_as_they_are_taken(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": TURNS, "system": "Be short.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted > client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens


# -- tools and reasoning ---------------------------------------------------------------------------------------------

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "cache_control": {"type": "ephemeral"},
    "input_schema": {
        "type": "object",
        "additionalProperties": False,
        "required": ["city"],
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    },
}
TIME = {"type": "custom", "name": "get_time", "input_schema": {"type": "object", "properties": {}}}


def test_an_agent_of_the_client_runs_its_tools(client: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "Sunny."

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "The weather?"}],
        tools=[get_weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        **GREEDY,
    )
    answers = list(runner)  # the first request asks for a conversation that is kept, and is refused
    first, second = (answer.usage for answer in answers)
    assert answers[0].stop_reason == "tool_use" and asked
    assert sum_of_input(second) > sum_of_input(first)


def sum_of_input(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens)


def test_what_is_thought_is_a_block_of_its_own() -> None:
    text = "<think>\nhm\n</think>\nHello."
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": text}]}
    with (
        serving(lambda _: SayingEngine("{{ '<think>' }}"), reasoning_parser="qwen3") as server,
        claude_client(server.port) as client,
    ):
        whole: Any = client.messages.create(**asked)
        hidden: Any = client.messages.create(
            **asked, extra_body={"thinking": {"type": "enabled", "display": "omitted"}}
        )
        with client.messages.stream(**asked) as events:
            followed: Any = events.get_final_message()
    for message in (whole, followed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert "hm" in message.content[0].thinking and "Hello." in message.content[1].text
    assert hidden.content == whole.content[1:]


def test_the_client_lists_models(server: RunningServer, client: anthropic.Anthropic) -> None:
    (found,) = client.models.list()
    assert (found.type, found.id, found.display_name, found.lifecycle) == ("model", MODEL, MODEL, "active")
    assert found.created_at.tzinfo is not None and found.max_input_tokens == 512
    assert client.models.retrieve(MODEL) == found
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.models.retrieve("nobody")
    assert unknown.value.type == "not_found_error"
    page = client.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, MODEL)
    of_openai = get(server.port, "/v1/models")
    assert of_openai.json["object"] == "list" and get(server.port, "/v1/models/").json == of_openai.json


# -- what comes in ---------------------------------------------------------------------------------------------------


def test_turns_become_the_messages_they_say() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
    other = {"type": "tool_use", "id": "c2", "name": "g", "input": {}, "cache_control": {"type": "ephemeral"}}
    messages = messages_of(
        "Help.",
        [
            {"role": "user", "content": "Hi."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Well", "citations": None},
                    {"type": "text", "text": "then."},
                    call,
                    other,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "done"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}],
                    },
                    {"type": "tool_result", "tool_use_id": "c3"},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
    )
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "tool", "user"]
    said = messages[2]
    assert (said["reasoning_content"], said["content"]) == ("hm", "Well\nthen.")
    functions = [call["function"] for call in said["tool_calls"]]
    assert [(each["name"], json.loads(each["arguments"])) for each in functions] == [("f", {"a": 1}), ("g", {})]
    assert [message["content"] for message in messages[3:]] == ["done", "Error: no", "", "Go on."]
    assert [message["tool_call_id"] for message in messages[3:6]] == ["c1", "c2", "c3"]


def test_what_is_no_text_in_a_result_is_told_in_words(client: anthropic.Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}

    def document(**source: Any) -> dict[str, Any]:
        return {"type": "document", "title": "a.md", "source": source, "citations": {"enabled": True}}

    text, pdf = {"type": "text", "text": "read"}, {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    found = {"type": "search_result", "source": "http://a", "title": "A", "content": [text], "citations": {}}
    for block, said in (
        (image, "[image left out: this model reads only text]"),
        ({"type": "tool_reference", "tool_name": "Grep"}, "Tool available: Grep"),
        (document(type="text", media_type="text/plain", data="# Title"), "a.md\n# Title"),
        (document(type="content", content="words"), "a.md\nwords"),
        (document(type="content", content=[text, image]), "a.md\nread\n[image left out: this model reads only text]"),
        (document(**pdf), "[document a.md left out: this model reads only text]"),
        (document(type="url", url="http://a/b.pdf"), "[document a.md left out: this model reads only text]"),
        (found, "A\nhttp://a\nread"),
        (
            {"type": "browser_state", "cache_control": {"type": "ephemeral"}, "tabs": []},
            "[browser_state left out: this model reads only text]",
        ),
    ):
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [text, block]}
        turns: list[Any] = [
            *TURNS,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
            {"role": "user", "content": [result]},
        ]
        assert messages_of(None, turns)[-1]["content"] == f"read\n{said}"
        assert client.messages.create(model=MODEL, messages=turns, max_tokens=2)
        assert client.messages.count_tokens(model=MODEL, messages=turns)


def test_a_header_that_is_another_in_each_request_is_no_part_of_the_prompt() -> None:
    def said(*texts: str) -> list[dict[str, Any]]:
        return messages_of([{"type": "text", "text": text} for text in texts], TURNS)

    header = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch="
    assert said(header + "f4a33;", "Help.") == said(header + "00000;\n", "Help.") == said("Help.")
    for text in (f"{header}\nHelp.", f"Help. {header}"):  # a text that has it is kept
        assert said(text)[0]["content"] == text


def test_what_was_thought_is_left_out_of_older_turns_on_request() -> None:
    def turn(number: int) -> list[dict[str, Any]]:
        said = [{"type": "thinking", "thinking": f"hm {number}"}, {"type": "text", "text": str(number)}]
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]

    def thought(**fields: Any) -> list[str | None]:
        body = {"model": MODEL, "messages": [*turn(1), *turn(2), *turn(3)], **fields}
        messages = AnthropicChat.parse(body).prompt_fields()["messages"]
        return [message.get("reasoning_content") for message in messages if message["role"] == "assistant"]

    def edit(**fields: Any) -> dict[str, Any]:
        return {"context_management": {"edits": [{"type": "clear_thinking_20251015", **fields}]}}

    all_of_it = ["hm 1", "hm 2", "hm 3"]
    assert thought() == thought(context_management={}) == thought(**edit(keep="all")) == all_of_it
    assert thought(**edit(keep={"type": "thinking_turns", "value": 2})) == [None, "hm 2", "hm 3"]
    assert thought(**edit(keep={"type": "thinking_turns", "value": 9})) == all_of_it
    assert thought(**edit()) == [None, None, "hm 3"]


def test_hints_about_what_is_not_here_are_taken(server: RunningServer) -> None:
    MESSAGES.say(
        server.port,
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        tools=[],
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
        container=None,
        mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        top_k=40,
        top_p=0.9,
    )


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
        with claude_client(server.port, "sesame") as client:
            assert client.messages.create(model=MODEL, messages=[{"role": "user", "content": "abc"}], max_tokens=2)
        with claude_client(server.port, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(model=MODEL, messages=[{"role": "user", "content": "abc"}], max_tokens=2)
        assert refused.value.type == "authentication_error"
        for headers, status in (
            ({"x-api-key": "other"}, 200),
            ({"x-api-key": ""}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({"authorization": "Bearer wrong", "x-api-key": "other"}, 200),
            ({"authorization": "Basic other"}, 401),
        ):
            assert get(server.port, f"{root_path}/v1/models", headers=headers).status == status
        unknown = post(server.port, f"{root_path}{PATH}", {}, headers={"x-api-key": "other"})
        assert unknown.json["type"] == "error"
