"""/v1/responses, whose every body and event is one of the official client's own types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from server.schema.responses import messages_of
from tests.server.apis import RESPONSES
from tests.server.client import ask
from tests.server.failing_engine import RunningServer, serving
from tests.server.reciting_target import reciting

MODEL = "test-model"


# -- whole -----------------------------------------------------------------------------------------------------------


def test_a_response_that_runs_out_of_tokens_is_incomplete(server: RunningServer) -> None:
    found = RESPONSES.say(server.port, max_output_tokens=3, ignore_eos=True)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][-1]["status"] == "incomplete"
    whole = RESPONSES.say(server.port, structured_outputs={"choice": ["yes", "no"]})
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
    assert whole["output"][0]["status"] == "completed"
    assert whole["completed_at"] >= whole["created_at"]


def test_a_response_repeats_its_request(server: RunningServer) -> None:
    asked = {
        "instructions": "Be short.",
        "metadata": {"a": "b"},
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning": {"effort": "low"},
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "text": {"format": {"type": "json_object"}},
    }
    found = RESPONSES.say(server.port, **asked)
    assert {name: found[name] for name in asked} == {**asked, "reasoning": {"effort": "low", "summary": None}}
    assert (found["store"], found["background"], found["truncation"]) == (False, False, "disabled")


def test_log_probabilities_come_with_the_text(server: RunningServer) -> None:
    found = RESPONSES.say(server.port, top_logprobs=2, ignore_eos=True)
    part = found["output"][0]["content"][0]
    assert len(part["logprobs"]) == 16
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    included = RESPONSES.say(server.port, include=["message.output_text.logprobs"], ignore_eos=True)
    assert len(included["output"][0]["content"][0]["logprobs"]) == 16
    assert RESPONSES.say(server.port)["output"][0]["content"][0]["logprobs"] == []
    events = RESPONSES.stream(server.port, top_logprobs=2, ignore_eos=True)
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in part["logprobs"]]


SAID = {
    "thinks": ["<think>", "\nhm 😀\n", "</think>", "\n\n", "H", "é", " <b> 😀😀 is", " so."],
    "calls": ["It", " is", " 😀.", "\n<tool_call>\n", '{"name": "f", "arguments": {"a": 1}}', "\n</tool_call>"],
}


@pytest.mark.parametrize("name", SAID)
def test_log_probabilities_are_of_the_tokens_that_spell_the_message(name: str, tmp_path: Path) -> None:
    """Not of those that were thought, or called something."""
    load = reciting(tmp_path, {name: ("", "".join(SAID[name])) for name in SAID}, [], ["<think>", "</think>"])
    asked: Any = {"include": ["message.output_text.logprobs"], "tools": [{"type": "function", "name": "f"}]}
    asked["max_output_tokens"] = 400
    with serving(load, tool_call_parser="hermes", reasoning_parser="qwen3") as running:
        found = RESPONSES.say(running.port, f"recite {name}", **asked)
        events = RESPONSES.stream(running.port, f"recite {name}", **asked)
    (part,) = (item["content"][0] for item in found["output"] if item["type"] == "message")
    assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"]
    streamed = [
        entry for event in events if event["type"].endswith("text.delta") for entry in event.get("logprobs", ())
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in part["logprobs"]]
    assert [item["type"] for item in found["output"]] == (
        ["reasoning", "message"] if name == "thinks" else ["message", "function_call"]
    )


class Person(BaseModel):
    name: str = Field(max_length=20)  # a small model ends no string of itself
    is_tall: bool


def test_the_client_parses_structured_output(client: openai.OpenAI) -> None:
    found = client.responses.parse(model=MODEL, input="A person.", text_format=Person, max_output_tokens=400)
    assert found.status == "completed", found
    assert isinstance(found.output_parsed, Person)


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_comes_to_what_the_whole_response_is(server: RunningServer) -> None:
    whole, events = RESPONSES.say(server.port), RESPONSES.stream(server.port)
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


def test_images_and_files_in_an_output_are_told_in_words(client: openai.OpenAI) -> None:
    output: Any = [
        {"type": "input_text", "text": "read"},
        {"type": "input_image", "image_url": "data:,", "detail": "auto"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "x"},
    ]
    items: Any = [
        {"role": "user", "content": "Read a.png."},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    said = "read\n[image left out: this model reads only text]\n[file a.pdf left out: this model reads only text]"
    assert messages_of(None, items)[-1]["content"] == said
    assert client.responses.create(model=MODEL, input=items, max_output_tokens=2).output
    parts: Any = [{"type": "text", "text": "read"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    turns: Any = [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": parts},
    ]
    assert client.chat.completions.create(model=MODEL, messages=turns, max_tokens=2).choices
    with pytest.raises(openai.BadRequestError, match="text part"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=2)


# -- what is not kept, and errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("POST", "/v1/responses/compact"),
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
        ("POST", "/v1/chat/completions/chatcmpl-1"),
        ("DELETE", "/v1/chat/completions/chatcmpl-1"),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages"),
    ],
)
def test_what_would_have_to_be_stored_answers_404_with_the_reason(
    server: RunningServer, method: str, path: str
) -> None:
    answer = ask(server.port, method, path)
    assert (answer.status, answer.error["code"]) == (404, "not_stored")
    assert "does not store responses" in answer.error["message"]
