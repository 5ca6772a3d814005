"""Streams as clients read them: where choices begin, where text ends, and what the log-probabilities are of."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.apis import APIS, CHAT, COMPLETIONS, Api
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
