"""/v1/responses, whose every body and event is one of the official client's own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import responses as types
from pydantic import BaseModel, Field

from server.answers.wire import PADDED_BYTES
from server.base.limits import Limits
from ssd.bundled import MODEL_PATH
from tests.server.bundled_engine import load_bundled
from tests.server.client import Answer, ask, get, post
from tests.server.failing_engine import FailingEngine, RunningServer, serving

MODEL = "test-model"
INPUT = "Write a function that adds two numbers."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(load_bundled, model=str(MODEL_PATH), obfuscation_interval_s=0.0) as running:
        yield running


EVENTS: dict[str, type[BaseModel]] = {
    "response.created": types.ResponseCreatedEvent,
    "response.in_progress": types.ResponseInProgressEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.reasoning_text.delta": types.ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": types.ResponseReasoningTextDoneEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent,
    "response.completed": types.ResponseCompletedEvent,
    "response.incomplete": types.ResponseIncompleteEvent,
    "response.failed": types.ResponseFailedEvent,
}


def require_official(event: dict[str, Any]) -> None:
    """An event is what the client's own type says, to the last field."""
    EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)


def respond(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """A greedy response that is not streamed, which must succeed."""
    answer = post(server.port, "/v1/responses", {"input": INPUT, "temperature": 0, "max_output_tokens": 16, **fields})
    assert answer.status == 200, answer.content
    types.Response.model_validate_json(answer.content, strict=True)
    found: dict[str, Any] = answer.json
    return found


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, each of the client's types, named and numbered."""
    assert answer.status == 200, answer.content
    blocks = [block for block in answer.content.decode().split("\n\n") if block and not block.startswith(":")]
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        require_official(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def stream(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """The events of a greedy response."""
    body = {"input": INPUT, "temperature": 0, "max_output_tokens": 16, "stream": True, **fields}
    return events_of(post(server.port, "/v1/responses", body))


# -- whole -----------------------------------------------------------------------------------------------------------


def test_a_response_says_what_a_chat_completion_says(server: RunningServer) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": INPUT}]
    fields = {"messages": messages, "temperature": 0, "max_tokens": 16}
    chat = post(server.port, "/v1/chat/completions", fields).json
    found = respond(server, instructions="Be short.")
    (message,) = found["output"]
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (found["object"], found["model"], found["id"][:5]) == ("response", MODEL, "resp_")
    usage = found["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_a_response_that_runs_out_of_tokens_is_incomplete(server: RunningServer) -> None:
    found = respond(server, max_output_tokens=3, ignore_eos=True)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][-1]["status"] == "incomplete"
    whole = respond(server, structured_outputs={"choice": ["yes", "no"]})
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
    assert whole["output"][0]["status"] == "completed"
    assert whole["completed_at"] >= whole["created_at"]


def test_a_response_repeats_its_request(server: RunningServer) -> None:
    asked = {
        "instructions": "Be short.", "metadata": {"a": "b"}, "max_output_tokens": 5, "temperature": 0.5, "top_p": 0.9,
        "reasoning": {"effort": "low"}, "parallel_tool_calls": False, "tool_choice": "none",
        "text": {"format": {"type": "json_object"}},
    }  # fmt: skip
    found = respond(server, **asked)
    assert {name: found[name] for name in asked} == {**asked, "reasoning": {"effort": "low", "summary": None}}
    assert (found["store"], found["background"], found["truncation"]) == (False, False, "disabled")


def test_log_probabilities_come_with_the_text(server: RunningServer) -> None:
    found = respond(server, top_logprobs=2, ignore_eos=True)
    part = found["output"][0]["content"][0]
    assert len(part["logprobs"]) == 16
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    included = respond(server, include=["message.output_text.logprobs"], ignore_eos=True)
    assert len(included["output"][0]["content"][0]["logprobs"]) == 16
    assert respond(server)["output"][0]["content"][0]["logprobs"] == []
    events = stream(server, top_logprobs=2, ignore_eos=True)
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in part["logprobs"]]


class Person(BaseModel):
    name: str = Field(max_length=20)  # a small model ends no string of itself
    is_tall: bool


def test_the_client_parses_structured_output(client: openai.OpenAI) -> None:
    found = client.responses.parse(model=MODEL, input="A person.", text_format=Person, max_output_tokens=400)
    assert found.status == "completed", found
    assert isinstance(found.output_parsed, Person)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_comes_to_what_the_whole_response_is(server: RunningServer) -> None:
    whole, events = respond(server), stream(server)
    kinds = [event["type"] for event in events]
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    after = ["output_text.done", "content_part.done", "output_item.done", whole["status"]]
    assert kinds[:4] == [f"response.{kind}" for kind in before]
    assert kinds[-4:] == [f"response.{kind}" for kind in after]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = "".join(event["delta"] for event in events[4:-4])
    last = events[-1]["response"]
    assert text == events[-4]["text"] == whole["output"][0]["content"][0]["text"]
    assert last["output"] == [events[-2]["item"]]
    assert {event["item_id"] for event in events[3:-2]} == {last["output"][0]["id"]}
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}
    changing = {"id": None, "output": None, "usage": None, "created_at": None, "completed_at": None}
    assert {**last, **changing} == {**whole, **changing}


@pytest.mark.parametrize("obfuscation_interval_s", [0.0, 0.05])
def test_an_obfuscated_stream_has_lengths_that_tell_nothing(obfuscation_interval_s: float) -> None:
    with serving(load_bundled, model=str(MODEL_PATH), obfuscation_interval_s=obfuscation_interval_s) as server:
        plain = stream(server, max_output_tokens=40, ignore_eos=True)
        options = {"include_obfuscation": True}
        body = {"input": INPUT, "temperature": 0, "max_output_tokens": 40, "ignore_eos": True, "stream": True}
        answer = post(server.port, "/v1/responses", {**body, "stream_options": options})
    events = events_of(answer)
    assert len(answer.content) % PADDED_BYTES == 0
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) == 3  # of 16 tokens each, but the last
    assert all(event["obfuscation"] for event in deltas)
    assert "".join(event["delta"] for event in deltas) == plain[-4]["text"]


# -- tools -----------------------------------------------------------------------------------------------------------

# -- what is not kept, and errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"] * 5000}, "input"),
        ({"input": "x " * 5000}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["everything"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text"),
        ({"reasoning": {"effort": 5}}, "reasoning"),
        ({"top_logprobs": 30}, "top_logprobs"),
        ({"temperature": 5}, "temperature"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = post(server.port, "/v1/responses", {"input": INPUT, **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.content


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"), ("DELETE", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"), ("POST", "/v1/responses/compact"),
        ("GET", "/v1/chat/completions"), ("GET", "/v1/chat/completions/chatcmpl-1"),
        ("POST", "/v1/chat/completions/chatcmpl-1"), ("DELETE", "/v1/chat/completions/chatcmpl-1"),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages"),
    ],
)  # fmt: skip
def test_what_would_have_to_be_stored_answers_404_with_the_reason(
    server: RunningServer, method: str, path: str
) -> None:
    answer = ask(server.port, method, path)
    assert (answer.status, answer.error["code"]) == (404, "not_stored")
    assert "stores no responses" in answer.error["message"]


def test_a_failure_in_a_stream_is_its_last_event() -> None:
    with serving(lambda _: FailingEngine(fail_at_step=3)) as server:
        events = events_of(post(server.port, "/v1/responses", {"input": "abcdef", "stream": True}))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
    assert last["response"]["output"][0]["content"][0]["text"] == "fe"
    assert [event["type"] for event in events].count("response.output_item.done") == 1


def test_more_items_than_a_conversation_may_have_are_refused() -> None:
    with serving(lambda _: FailingEngine(), limits=Limits(max_messages=2)) as server:
        items = [{"role": "user", "content": "x"}] * 3
        answer = post(server.port, "/v1/responses", {"input": items})
        assert (answer.status, answer.error["param"]) == (400, "input")
        assert get(server.port, "/health").status == 200
