"""Calls that an output ends within, by its length or a stop: through the official clients, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from tests.server.bundled_engine import load_bundled
from tests.server.client import claude_client, post
from tests.server.failing_engine import RunningServer, serving

pytest.importorskip("llguidance")
MODEL = "test-model"
TURNS: list[Any] = [{"role": "user", "content": "json"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "parameters": SCHEMA}
COMMON: dict[str, Any] = {"model": MODEL, "temperature": 0}
ONE_CALL: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
CHAT: Any = {**COMMON, **ONE_CALL, "messages": TURNS, "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE: Any = {**COMMON, **ONE_CALL, "input": "json", "tools": [{"type": "function", **FUNCTION}]}
CLAUDE: Any = {
    "model": MODEL,
    "messages": TURNS,
    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "extra_body": {"temperature": 0},
}
BEGUN = '{"city": "Par'


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(partial(load_bundled, max_model_len=1024)) as running:
        yield running


@pytest.fixture(scope="module")
def ways(server: RunningServer) -> dict[str, dict[str, Any]]:
    """What ends the output within "Paris", and what a call's end is followed by."""
    asked = {**CHAT, "max_tokens": 200, "return_token_ids": True}
    ids = post(server.port, "/v1/chat/completions", asked).json["choices"][0]["token_ids"]
    texts = [post(server.port, "/detokenize", {"tokens": ids[:end]}).json["prompt"] for end in range(len(ids) + 1)]
    place = next(place for place, text in enumerate(texts) if text.endswith("Par")) + 1
    return {
        "length": {"max_tokens": place - 1},
        "stop": {"stop": ['is"'], "max_tokens": 200},
        "stop token": {"stop_token_ids": [ids[place - 1]], "max_tokens": 200},
        "stop behind the call": {"stop": ["</tool_call>"], "max_tokens": 200},
    }


def calls_of(message: Any) -> list[str]:
    return [call.function.arguments for call in message.tool_calls or ()]


@pytest.mark.parametrize(
    ("way", "reason", "said"),
    [
        ("length", "length", [BEGUN]),
        ("stop", "stop", []),
        ("stop token", "stop", []),
        ("stop behind the call", "tool_calls", ['{"city": "Paris"}']),
    ],
)
def test_of_chat_completions(
    client: openai.OpenAI, ways: dict[str, dict[str, Any]], way: str, reason: str, said: list[str]
) -> None:
    """A whole answer leaves out what a stop cut, since "stop" does not tell; of a stream it was sent."""
    asked: Any = {**CHAT, **ways[way]}
    extra: Any = {"extra_body": {"stop_token_ids": asked.pop("stop_token_ids", [])}}
    whole = client.chat.completions.create(**asked, **extra, n=2)
    streamed = ["", ""]
    reasons: dict[int, Any] = {}
    for chunk in client.chat.completions.create(**asked, **extra, n=2, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                streamed[choice.index] += call.function.arguments or ""
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert (choice.finish_reason, calls_of(choice.message)) == (reason, said)
        assert (reasons[choice.index], streamed[choice.index]) == (reason, said[0] if said else BEGUN)


@pytest.mark.parametrize("way", ["length", "stop", "stop token", "stop behind the call"])
def test_of_responses(client: openai.OpenAI, ways: dict[str, dict[str, Any]], way: str) -> None:
    fields = dict(ways[way])
    asked = {**RESPONSE, "max_output_tokens": fields.pop("max_tokens"), "extra_body": fields}
    whole = client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    streamed = last.response
    (item,) = streamed.output
    is_whole = way == "stop behind the call"
    status = "completed" if is_whole else "incomplete"
    assert (streamed.status, whole.status, item.status, last.type) == (status, status, status, f"response.{status}")
    assert (item.type, item.arguments) == ("function_call", '{"city": "Paris"}' if is_whole else BEGUN)
    assert streamed.incomplete_details == whole.incomplete_details
    if is_whole:
        assert whole.incomplete_details is None
    else:
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == ("max_output_tokens" if way == "length" else None)
    found = [(each.arguments, each.status) for each in whole.output if each.type == "function_call"]
    assert found == ([] if way.startswith("stop") and not is_whole else [(item.arguments, status)])


def test_of_messages(server: RunningServer, ways: dict[str, dict[str, Any]]) -> None:
    """The input is what the official client makes of the beginning."""
    with claude_client(server.port) as client:
        for way, reason in (("length", "max_tokens"), ("stop", "stop_sequence")):
            asked = {**CLAUDE, "max_tokens": ways[way]["max_tokens"], "stop_sequences": ways[way].get("stop", [])}
            whole: Any = client.messages.create(**asked)
            with client.messages.stream(**asked) as events:
                streamed: Any = events.get_final_message()
            assert (whole.stop_reason, streamed.stop_reason) == (reason, reason)
            assert [(block.type, block.input) for block in streamed.content] == [("tool_use", {})]
            used = [(block.type, block.input) for block in whole.content if block.type == "tool_use"]
            assert used == ([("tool_use", {})] if way == "length" else [])
