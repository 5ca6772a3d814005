"""Streams as clients read them: where choices begin, where text ends, and what the log-probabilities are of."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.apis import CHAT, COMPLETIONS, RESPONSES, Api
from tests.server.client import post
from tests.server.failing_engine import RunningServer

MODEL = "test-model"
ASKED: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
OBFUSCATED: dict[str, Any] = {"stream_options": {"include_obfuscation": True, "include_usage": True}}


def stream(server: RunningServer, api: Api, /, **fields: Any) -> list[dict[str, Any]]:
    """The choices of all chunks."""
    return [choice for event in api.stream(server.port, **fields) for choice in event.get("choices", ())]


def text_of(api: Api, choice: dict[str, Any]) -> str:
    return api.piece({"choices": [choice]}) or ""


@pytest.mark.parametrize("fields", [{}, OBFUSCATED, {"return_token_ids": True}], ids=["plain", "obfuscated", "ids"])
@pytest.mark.parametrize("api", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_the_chunk_that_has_the_finish_reason_has_no_text(
    server: RunningServer, api: Api, fields: dict[str, Any]
) -> None:
    """Not even where the answer was learned before, and all of it is drafted."""
    whole = api.say(server.port, max_tokens=40)
    for _ in range(3):
        *before, last = stream(server, api, max_tokens=40, **fields)
        assert (text_of(api, last), last["finish_reason"]) == ("", whole["choices"][0]["finish_reason"])
        assert last.get("delta", {}) == {} and not last.get("token_ids")
        assert all(choice["finish_reason"] is None for choice in before)
        assert "".join(text_of(api, choice) for choice in before) == api.said(whole)


@pytest.mark.parametrize("fields", [{}, OBFUSCATED], ids=["plain", "obfuscated"])
@pytest.mark.parametrize("api", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_choices_begin_in_order_before_the_first_text(server: RunningServer, api: Api, fields: dict[str, Any]) -> None:
    for seed in range(4):
        found = stream(server, api, n=6, temperature=1.0, seed=seed, **fields)  # more than there are slots
        first = next(place for place, choice in enumerate(found) if text_of(api, choice))
        assert [choice["index"] for choice in found[:first]] == [*range(6)]


def test_the_official_helper_follows_several_choices(server: RunningServer, client: openai.OpenAI) -> None:
    for seed in range(6):
        asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "n": 3, "seed": seed, "max_tokens": 60}
        asked["extra_body"] = {"structured_outputs": {"regex": "[a-z ]{1,20}"}}
        with client.chat.completions.stream(**asked) as events:
            streamed = events.get_final_completion()
        whole = client.chat.completions.create(**asked)
        for one, other in zip(streamed.choices, whole.choices, strict=True):
            assert (one.message.content, one.finish_reason) == (other.message.content, other.finish_reason)


# -- log-probabilities ---------------------------------------------------------------------------------------------


def logprobs(api: Api) -> dict[str, Any]:
    if api is RESPONSES:
        return {"include": ["message.output_text.logprobs"]}
    return {"logprobs": 1} if api is COMPLETIONS else {"logprobs": True, "top_logprobs": 1}


def tokens_of(choice: dict[str, Any]) -> list[str]:
    """The token texts of a completion's choice or a chat completion's, whole or streamed."""
    found = choice["logprobs"] or {}
    if "tokens" in found:
        tokens: list[str] = found["tokens"]
        return tokens
    return [bytes(entry["bytes"]).decode() for entry in found.get("content", ())]


ENDS: dict[str, dict[str, Any]] = {
    "the end of text": {"structured_outputs": {"choice": ["yes, it is"]}},
    "a stop string": {"structured_outputs": {"choice": ["yes, it is"]}, "stop": [" it"]},
    "a stop string within a token": {"structured_outputs": {"choice": ["yes, it is"]}, "stop": ["s, i"]},
    "a stop string that began": {"structured_outputs": {"choice": ["yes, it is"]}, "stop": ["is a"]},
    "its length": {"ignore_eos": True},
}


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("api", [COMPLETIONS, CHAT, RESPONSES], ids=["completions", "chat", "responses"])
def test_tokens_with_log_probabilities_join_to_the_text(server: RunningServer, api: Api, way: str) -> None:
    pytest.importorskip("llguidance")
    fields: dict[str, Any] = {**ENDS[way], **logprobs(api), api.limit: 12}
    whole = api.say(server.port, **fields)
    events = api.stream(server.port, **fields)
    if api is RESPONSES:
        found = whole["output"][0]["content"][0]["logprobs"]
        streamed = [entry for event in events for entry in event.get("logprobs", ()) if "delta" in event]
        tokens, pieces = ([bytes(each["bytes"]).decode() for each in every] for every in (found, streamed))
    else:
        tokens = tokens_of(whole["choices"][0])
        pieces = [token for event in events for choice in event["choices"] for token in tokens_of(choice)]
    assert "".join(tokens) == api.said(whole) and tokens == pieces and len(tokens) > 1 - ("within" in way)


def test_tokens_that_a_stop_token_or_skipping_leaves_out_have_no_log_probabilities(server: RunningServer) -> None:
    said = {"structured_outputs": {"choice": ["yes, it is"]}, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
    ids = COMPLETIONS.say(server.port, **said)["choices"][0]
    assert len(ids["token_ids"]) == len(ids["logprobs"]["tokens"]), "who asks for ids wants one for each"
    del said["return_token_ids"]
    for fields in (
        {"stop_token_ids": [ids["token_ids"][2]]},
        {"stop_token_ids": [ids["token_ids"][2]], "include_stop_str_in_output": True},
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
    ):
        choice = COMPLETIONS.say(server.port, **said, **fields)["choices"][0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"], fields
    special = post(server.port, "/tokenize", {"prompt": "<|user|>", "add_special_tokens": False}).json["tokens"]
    for is_skipped in (True, False):
        fields = {"allowed_token_ids": special, "skip_special_tokens": is_skipped, "logprobs": 0, "max_tokens": 3}
        choice = COMPLETIONS.say(server.port, **fields)["choices"][0]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == ("" if is_skipped else "<|user|>" * 3)
