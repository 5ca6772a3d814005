"""Log-probabilities, structured output and predictions over HTTP, read by the official client where it knows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from typing import Any

import openai
import pytest
import torch

from ssd.bundled import MODEL_PATH
from ssd.model.loading.load_target import load_model
from tests.server.client import Answer, greedy_completion, post
from tests.server.failing_engine import RunningServer
from tests.server.test_endpoints import MESSAGES, MODEL, PROMPT


def complete(server: RunningServer, **fields: Any) -> Answer:
    return greedy_completion(server.port, **{"prompt": PROMPT, **fields})


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(MODEL_PATH, dtype="float32", device="cpu")


def logprobs_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Of a plain pass, [len(ids), V]; row i predicts token i + 1."""
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float(), -1)


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_completion_logprobs(server: RunningServer, client: openai.OpenAI, model: Any) -> None:
    """Temperature, bias and drafts change what is chosen, never what the model is said to think of it."""
    arguments: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 12,
        "logprobs": 3,
        "temperature": 0.9,
        "seed": 5,
        "frequency_penalty": 0.4,
    }
    found = client.completions.create(**arguments, extra_body={"return_token_ids": True}).choices[0]
    logprobs, extra = found.logprobs, found.model_extra
    assert logprobs is not None and extra is not None
    ids, prompt = extra["token_ids"], extra["prompt_token_ids"]
    expected = logprobs_of(model, prompt + ids)[len(prompt) - 1 :]
    assert logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    assert len(logprobs.tokens) == len(ids)
    for i, token_id in enumerate(ids):
        assert logprobs.token_logprobs[i] == pytest.approx(float(expected[i, token_id]), abs=1e-4)
        top = logprobs.top_logprobs[i]
        assert 3 <= len(top) <= 4 and top[logprobs.tokens[i]] == logprobs.token_logprobs[i]
        assert max(top.values()) == pytest.approx(float(expected[i].max()), abs=1e-4)
        shown = [token for token in logprobs.tokens[:i] if not re.fullmatch(r"<\|\w+\|>", token)]
        assert "".join(shown) == found.text[: logprobs.text_offset[i]]
    marked = {**arguments, "prompt": f"<|endoftext|>{PROMPT}", "echo": True}
    for stream in (False, True):
        answer = complete(server, **marked, stream=stream)
        choices = [event["choices"][0] for event in answer.events] if stream else answer.json["choices"]
        text = "".join(choice["text"] for choice in choices)
        written = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        tokens = [token for each in written for token in each["tokens"]]
        offsets = [offset for each in written for offset in each["text_offset"]]
        assert tokens[0] == "<|endoftext|>" and offsets[1] == len(tokens[0])
        assert all(text.startswith(token, at) for token, at in zip(tokens[:-1], offsets, strict=False))
    alone = complete(server, **{**arguments, "logprobs": 0, "return_token_ids": True}).json["choices"][0]["logprobs"]
    assert [list(top) for top in alone["top_logprobs"]] == [[token] for token in logprobs.tokens]


def test_offsets_hold_where_tokens_are_parts_of_characters(server: RunningServer) -> None:
    pytest.importorskip("llguidance")
    said, marked = "a 😀é😀 b—c", f"{PROMPT} 😀"
    fields: dict[str, Any] = {"structured_outputs": {"choice": [said]}, "logprobs": 0, "max_tokens": 60}
    for more, before in (({"prompt": marked, "echo": True}, marked), ({}, "")):
        whole = complete(server, **fields, **more).json["choices"][0]
        events = complete(server, **fields, **more, stream=True).events
        pieces = [event["choices"][0]["logprobs"] for event in events]
        streamed = [offset for each in pieces if each for offset in each["text_offset"]]
        tokens, offsets = whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"]
        assert whole["text"] == before + said and streamed == offsets and any("\ufffd" in token for token in tokens)
        for token, offset in zip(tokens, offsets, strict=True):
            assert "\ufffd" in token or whole["text"].startswith(token, offset) or token.startswith("<|")


def test_echo_repeats_the_prompt_with_its_logprobs(server: RunningServer, model: Any) -> None:
    """As an evaluation harness asks: ids, echo, one token, logprobs."""
    ids = post(server.port, "/tokenize", {"prompt": PROMPT}).json["tokens"]
    found = complete(server, prompt=[ids, ids[:1]], echo=True, max_tokens=1, logprobs=1).json["choices"]
    logprobs = found[0]["logprobs"]
    assert found[0]["text"].startswith(PROMPT)
    assert "".join(logprobs["tokens"][: len(ids)]) == PROMPT
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = logprobs_of(model, ids)
    for i in range(1, len(ids)):
        assert logprobs["token_logprobs"][i] == pytest.approx(float(expected[i - 1, ids[i]]), abs=1e-4)
        is_greedy = int(expected[i - 1].argmax()) == ids[i]
        assert (logprobs["token_logprobs"][i] == max(logprobs["top_logprobs"][i].values())) == is_greedy
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert len(found[1]["logprobs"]["tokens"]) == 2
    assert complete(server, echo=True, max_tokens=1).json["choices"][0]["text"].startswith(PROMPT)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 10,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    choice = client.chat.completions.create(**arguments).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content and choice.message.content is not None
    content = choice.logprobs.content
    assert b"".join(bytes(token.bytes or []) for token in content).decode().startswith(choice.message.content)
    for token in content:
        assert [top.logprob for top in token.top_logprobs] == sorted(t.logprob for t in token.top_logprobs)[::-1]
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
        assert token.logprob <= 0
    with client.chat.completions.create(**arguments, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream]
    streamed = [token.token for c in chunks if c.logprobs is not None for token in c.logprobs.content or []]
    assert streamed == [token.token for token in content]
    with client.chat.completions.create(**{**arguments, "logprobs": None, "top_logprobs": None}, stream=True) as plain:
        assert all(chunk.choices[0].logprobs is None for chunk in plain)


def test_prompt_logprobs_are_vllms(server: RunningServer, model: Any) -> None:
    ids = post(server.port, "/tokenize", {"prompt": PROMPT}).json["tokens"]
    found = complete(server, prompt_logprobs=1, max_tokens=2).json["choices"][0]["prompt_logprobs"]
    expected = logprobs_of(model, ids)
    assert found[0] is None and len(found) == len(ids)
    for i in range(1, len(ids)):
        own = found[i][str(ids[i])]
        assert own["logprob"] == pytest.approx(float(expected[i - 1, ids[i]]), abs=1e-4)
        assert own["rank"] == int((expected[i - 1] > expected[i - 1, ids[i]]).sum()) + 1
        assert str(int(expected[i - 1].argmax())) in found[i]
    chat = post(server.port, "/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 0, "max_tokens": 1})
    assert len(chat.json["prompt_logprobs"]) == chat.json["usage"]["prompt_tokens"]
    with_ids = complete(server, logprobs=1, max_tokens=2, return_tokens_as_token_ids=True, return_token_ids=True).json
    choice = with_ids["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


# -- what may be sampled ---------------------------------------------------------------------------------------------


def test_allowed_tokens_and_bad_words(server: RunningServer) -> None:
    allowed = post(server.port, "/tokenize", {"prompt": "xyz"}).json["tokens"]
    fields: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    choice = complete(server, allowed_token_ids=allowed, **fields).json["choices"][0]
    assert set(choice["token_ids"]) <= set(allowed)
    token_ids = complete(server, **fields).json["choices"][0]["token_ids"]
    texts = {token: post(server.port, "/detokenize", {"tokens": [token]}).json["prompt"] for token in token_ids}
    banned, word = next((token, text) for token, text in texts.items() if re.fullmatch(r" \w{3,}", text))
    without = complete(server, bad_words=[word.strip()], **fields).json["choices"][0]["token_ids"]
    assert banned not in without
    assert without[: token_ids.index(banned)] == token_ids[: token_ids.index(banned)]


STRUCTURED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"structured_outputs": {"regex": "(ab){1,3}c"}}, "(ab){1,3}c"),
    ({"structured_outputs": {"json": {"enum": [1, "x"]}}}, '1|"x"'),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"const": {"a": [True, None]}}, "strict": True},
            }
        },
        r'\{\s*"a"\s*:\s*\[\s*true\s*,\s*null\s*\]\s*\}',
    ),
]


@pytest.mark.parametrize(("fields", "pattern"), STRUCTURED)
def test_structured_output(server: RunningServer, fields: dict[str, Any], pattern: str) -> None:
    pytest.importorskip("llguidance")
    for body in ({"prompt": PROMPT}, {"messages": MESSAGES}):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        answer = post(server.port, path, {**body, "max_tokens": 300, "temperature": 0, **fields})
        assert answer.status == 200, answer.content
        choice = answer.json["choices"][0]
        text = choice["text"] if "prompt" in body else choice["message"]["content"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop"
        streamed = post(server.port, path, {**body, "max_tokens": 300, "temperature": 0, "stream": True, **fields})
        parts = [event["choices"][0] for event in streamed.events]
        assert "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts) == text


# -- predictions -----------------------------------------------------------------------------------------------------


def test_a_prediction_saves_steps_changes_nothing_and_is_counted(server: RunningServer) -> None:
    arguments: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    salts = map(str, count())  # what one request taught is not drafted from for the next

    def ask(**fields: Any) -> tuple[Answer, int]:
        before = server.engine_thread.engine.metrics.num_verify_steps
        answer = post(server.port, "/v1/chat/completions", {**arguments, "cache_salt": next(salts), **fields})
        assert answer.status == 200, answer.content
        return answer, server.engine_thread.engine.metrics.num_verify_steps - before

    plain, plain_steps = ask()
    assert "completion_tokens_details" not in plain.json["usage"]
    text = plain.json["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    for content in (text, parts):
        found, steps = ask(prediction={"type": "content", "content": content})
        assert found.json["choices"][0]["message"]["content"] == text
        details = found.json["usage"]["completion_tokens_details"]
        num_predicted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
        assert details["accepted_prediction_tokens"] >= 0.8 * num_predicted > 10
        assert found.json["usage"]["completion_tokens"] == plain.json["usage"]["completion_tokens"]
        assert steps < plain_steps
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ask(prediction={"type": "content", "content": text}, stream=True, stream_options=options)[0].events
    assert events[-1]["usage"]["completion_tokens_details"] == details
    wrong = ask(prediction={"type": "content", "content": "\u4f60\u597d" * 9}, n=2)[0].json["usage"]
    assert wrong["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    empty = ask(prediction={"type": "content", "content": ""})[0].json["usage"]["completion_tokens_details"]
    assert empty == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
