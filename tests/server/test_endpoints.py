"""The official client against a real server with the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from server.base.settings import read_sampling_defaults
from ssd.bundled import MODEL_PATH
from tests.server.bundled_engine import load_bundled
from tests.server.client import Answer, ask, get, greedy_completion, metric, post
from tests.server.failing_engine import RunningServer, serving
from tests.test_grammar import too_complex

MODEL = "test-model"
MAX_MODEL_LEN = 512
MESSAGES: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    defaults = read_sampling_defaults(MODEL_PATH / "generation_config.json")
    with serving(load_bundled, model=str(MODEL_PATH), sampling_defaults=defaults) as running:
        yield running


def completion(server: RunningServer, **fields: Any) -> Answer:
    return greedy_completion(server.port, **{"prompt": PROMPT, **fields})


# -- completions and chat ------------------------------------------------------------------------------------------


def test_no_output_but_an_echo_asks_what_the_model_says_of_the_prompt(server: RunningServer) -> None:
    one = completion(server, max_tokens=1, echo=True, logprobs=2, return_token_ids=True).json
    for name in ("max_tokens", "max_completion_tokens"):
        none = completion(server, **{name: 0}, echo=True, logprobs=2, return_token_ids=True).json
        (choice,), (scored,) = none["choices"], one["choices"]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
        for key, values in choice["logprobs"].items():
            assert values == scored["logprobs"][key][:-1]
        assert none["usage"]["completion_tokens"] == 0
    streamed = completion(server, max_tokens=0, echo=True, stream=True).events
    assert "".join(event["choices"][0]["text"] for event in streamed) == PROMPT
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_completion_tokens": 0}):
        answer = post(server.port, "/v1/completions", {"prompt": PROMPT, **fields})
        assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))


def test_probes_may_ask_for_the_head_alone(server: RunningServer) -> None:
    for path in ("/live", "/health"):
        answer = ask(server.port, "HEAD", path)
        assert (answer.status, answer.content) == (200, b"")


def test_a_grammar_that_becomes_too_complex_is_a_refusal(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "structured_outputs": {"grammar": too_complex().source}}
    answer = post(server.port, "/v1/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
    assert "too complex" in answer.error["message"] and len(answer.error["message"]) < 200
    streamed = post(server.port, "/v1/completions", {**body, "stream": True})
    assert b'"type":"invalid_request_error"' in streamed.content and b'"finish_reason":"stop"' not in streamed.content


def test_chat_goes_on_to_the_end_of_the_context(server: RunningServer) -> None:
    answer = post(server.port, "/v1/chat/completions", {"messages": MESSAGES, "ignore_eos": True, "temperature": 0})
    assert answer.json["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer.json["choices"][0]["finish_reason"] == "length"


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    with client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    *content, last = chunks
    assert last.choices == []
    assert last.usage is not None and whole.usage is not None
    without_cached = {"prompt_tokens_details": None}  # the second request finds what the first has left
    assert last.usage.model_copy(update=without_cached) == whole.usage.model_copy(update=without_cached)
    assert all(chunk.usage is None for chunk in content)
    assert content[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(choice.finish_reason is None for chunk in content[:-1] for choice in chunk.choices)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_continuous_usage_counts_up(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = completion(server, max_tokens=10, ignore_eos=True, stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 10


def test_choices_of_one_seed_differ_and_are_repeatable(server: RunningServer) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 16}
    first, second = (completion(server, **fields).json for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 1
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    # A choice is the same alone, in a batch and in a stream.
    alone = completion(server, **{**fields, "n": 1}).json["choices"][0]["text"]
    assert alone == texts[0]
    streamed = ["", "", ""]
    for event in completion(server, **fields, stream=True).events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_every_shape_of_prompt(server: RunningServer) -> None:
    ids = post(server.port, "/tokenize", {"prompt": PROMPT}).json["tokens"]
    expected = completion(server, max_tokens=8).json["choices"][0]["text"]
    for prompt in (ids, [PROMPT], [ids]):
        assert completion(server, prompt=prompt, max_tokens=8).json["choices"][0]["text"] == expected
    two = completion(server, prompt=[PROMPT, "import os\n"], n=2, max_tokens=8).json
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] == expected for choice in two["choices"]] == [True, True, False, False]
    assert two["usage"]["completion_tokens"] <= 32
    other = post(server.port, "/tokenize", {"prompt": "import os\n"}).json["count"]
    assert two["usage"]["prompt_tokens"] == len(ids) + other


def test_stop_string_ends_the_text(server: RunningServer) -> None:
    text = completion(server, max_tokens=16, ignore_eos=True).json["choices"][0]["text"]
    stop = text.strip()[1:3]
    choice = completion(server, max_tokens=16, ignore_eos=True, stop=[stop, "\x00"]).json["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == text[: text.index(stop)]
    kept = completion(server, max_tokens=16, ignore_eos=True, stop=stop, include_stop_str_in_output=True).json
    assert kept["choices"][0]["text"] == choice["text"] + stop


def test_stop_token_ends_the_output(server: RunningServer) -> None:
    ids = completion(server, max_tokens=8, ignore_eos=True, return_token_ids=True).json["choices"][0]["token_ids"]
    choice = completion(server, max_tokens=8, ignore_eos=True, return_token_ids=True, stop_token_ids=[ids[2]]).json
    found = choice["choices"][0]
    assert found["token_ids"] == ids[: ids.index(ids[2]) + 1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", ids[2])
    count = len(found["token_ids"])
    for flag, said in ((False, count - 1), (True, count)):  # as vLLM, of stop strings and token ids alike
        kept = completion(server, max_tokens=8, stop_token_ids=[ids[2]], include_stop_str_in_output=flag).json
        plain = completion(server, max_tokens=max(1, said), ignore_eos=True).json
        assert kept["choices"][0]["text"] == (plain["choices"][0]["text"] if said else "")


def test_token_ids_are_the_same_whole_and_streamed(server: RunningServer) -> None:
    whole = completion(server, max_tokens=12, return_token_ids=True).json["choices"][0]
    events = completion(server, max_tokens=12, return_token_ids=True, stream=True).events
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    fields = {"messages": MESSAGES, "max_tokens": 3, "return_token_ids": True}
    prompt = post(server.port, "/tokenize", {"messages": MESSAGES}).json["tokens"]
    assert post(server.port, "/v1/chat/completions", fields).json["prompt_token_ids"] == prompt
    first = post(server.port, "/v1/chat/completions", {**fields, "stream": True}).events[0]
    assert first["prompt_token_ids"] == prompt


def test_logit_bias_and_sampling_fields_are_honoured(server: RunningServer) -> None:
    token = post(server.port, "/tokenize", {"prompt": "x"}).json["tokens"][0]
    choice = completion(server, logit_bias={str(token): 100}, max_tokens=3, return_token_ids=True).json["choices"][0]
    assert choice["token_ids"] == [token] * 3
    greedy = completion(server, max_tokens=8).json["choices"][0]["text"]
    assert completion(server, temperature=1.0, top_k=1, max_tokens=8).json["choices"][0]["text"] == greedy


def test_chat_template_fields(server: RunningServer) -> None:
    def count(**fields: Any) -> int:
        return int(post(server.port, "/tokenize", {"messages": MESSAGES, **fields}).json["count"])

    assert count(add_generation_prompt=False) < count()
    begun = [*MESSAGES, {"role": "assistant", "content": "def add("}]
    fields = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 4}
    answer = post(server.port, "/v1/chat/completions", fields)
    assert answer.status == 200, answer.content
    assert not answer.json["choices"][0]["message"]["content"].startswith("def add(")


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_answers_400(server: RunningServer, stream: bool) -> None:
    for fields in ({"prompt": [5] * MAX_MODEL_LEN}, {"prompt": [5] * 500, "max_tokens": 50}):
        answer = post(server.port, "/v1/completions", {**fields, "stream": stream})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert str(MAX_MODEL_LEN) in answer.error["message"]
    hopeless = post(server.port, "/v1/completions", {"prompt": "x" * 1_000_000, "stream": stream})
    assert (hopeless.status, hopeless.error["param"]) == (400, "prompt")
    full = completion(server, prompt=[5] * (MAX_MODEL_LEN - 1))
    assert full.json["usage"]["completion_tokens"] == 1


def test_unknown_model_answers_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"prompt": "\\ud800"}', b"[]", b"NaN"])
def test_malformed_json_answers_400(server: RunningServer, content: bytes) -> None:
    answer = post(server.port, "/v1/completions", content)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


# -- the rest --------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    found = client.models.list().data
    assert [model.id for model in found] == [MODEL]
    extra = client.models.retrieve(MODEL).model_extra
    assert extra is not None
    assert (extra["root"], extra["max_model_len"]) == (str(MODEL_PATH), MAX_MODEL_LEN)
    assert (extra["backend"], extra["can_speculate"]) == ("slot attention", True)


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    found = post(server.port, "/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), MAX_MODEL_LEN)
    assert "".join(found["token_strs"]) == PROMPT
    assert post(server.port, "/detokenize", {"tokens": found["tokens"]}).json == {"prompt": PROMPT}
    assert post(server.port, "/detokenize", {"tokens": [-1]}).error["param"] == "tokens"


def test_state_endpoints(server: RunningServer) -> None:
    speculation = {"active": True, "reason": "drafts are verified if their expected gain exceeds their cost"}
    assert get(server.port, "/health").json == {"status": "ok", "batch_invariant": True, "speculation": speculation}
    assert get(server.port, "/v1/models").json["data"][0]["speculation"] == speculation
    assert get(server.port, "/live").status == 200
    assert get(server.port, "/version").json["version"]


def test_speculation_is_limited_by_request(server: RunningServer) -> None:
    ids = [7, 8, 9] * 20

    def drafted(**fields: Any) -> tuple[float, str]:
        names = ("vllm:spec_decode_num_draft_tokens_total", "ssd:verify_steps_total")
        before = [metric(server.port, name) for name in names]
        text = completion(server, prompt=ids, max_tokens=24, ignore_eos=True, **fields).json["choices"][0]["text"]
        tokens, steps = (metric(server.port, name) - count for name, count in zip(names, before, strict=True))
        return tokens / steps, text

    freely, text = drafted()
    assert freely > 2
    assert drafted(num_speculative_tokens=0) == (0, text)
    a_few, same = drafted(num_speculative_tokens=2)
    assert 0 < a_few <= 2 and same == text
