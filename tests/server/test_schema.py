"""What request bodies may contain, and what becomes of each field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.answers.wire import encode_events
from server.base.settings import read_sampling_defaults
from server.schema.body import IGNORED, REFUSED
from server.schema.chat import ChatBody
from server.schema.generate import CompletionBody, GenerateBody
from ssd.config import SamplingParams
from ssd.errors import ConfigError, RequestError

MESSAGES = [{"role": "user", "content": "hello"}]


def sampling(body: GenerateBody, *, room: int = 100, **defaults: float) -> SamplingParams:
    return body.sampling(defaults, room=room)


def test_null_means_absent_and_fields_without_effect_are_ignored() -> None:
    plain = CompletionBody.parse({"prompt": "x"})
    nulls = {name: None for name in [*CompletionBody.model_fields, *REFUSED, "best_of"] if name != "prompt"}
    assert CompletionBody.parse({"prompt": "x", **nulls}) == plain
    assert CompletionBody.parse({"prompt": "x", **{name: {"any": "thing"} for name in IGNORED}}) == plain
    neutral = {name: values[0] for name, (values, _reason) in REFUSED.items() if values}
    assert CompletionBody.parse({"prompt": "x", "best_of": 1, **neutral}) == plain


def test_fields_reach_the_sampling_parameters() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": -4,
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
    }
    body = CompletionBody.parse({"prompt": "x", "logit_bias": {"3": -1, "4": 2.5}, "stop": "end", **fields})
    expected: dict[str, Any] = {**fields, "stop_token_ids": (5,), "stop": ("end",), "logit_bias": ((3, -1.0), (4, 2.5))}
    assert sampling(body, temperature=1.5, top_k=3) == SamplingParams(**expected, continues_prompt=True)


def test_which_outputs_go_on_with_the_text_of_their_prompt() -> None:
    def goes_on(body: GenerateBody) -> bool:
        return body.sampling({}, room=10).continues_prompt

    said = {"model": "x", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    chat = {"add_generation_prompt": False, "continue_final_message": True}
    assert goes_on(CompletionBody.parse({"model": "x", "prompt": "a"}))
    assert goes_on(ChatBody.parse({**said, **chat})) and not goes_on(ChatBody.parse(said))


def test_defaults_fill_what_the_request_leaves_out_and_openai_fills_the_rest() -> None:
    body = ChatBody.parse({"messages": MESSAGES, "top_p": 0.5})
    found = sampling(body, temperature=0.6, top_p=0.9, top_k=20)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.5, 20, 0.0)
    assert sampling(body).temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "room", "defaults", "expected"),
    [
        ({"prompt": "x"}, 100, {}, 16),
        ({"prompt": "x"}, 10, {}, 10),
        ({"prompt": "x"}, -5, {}, 1),
        ({}, 100, {}, None),
        ({}, 100, {"max_new_tokens": 50}, 50),
        ({}, 30, {"max_new_tokens": 50}, 30),
        ({"max_tokens": 60}, 30, {"max_new_tokens": 50}, 60),
        ({"max_tokens": 60, "max_completion_tokens": 7}, 30, {}, 7),
    ],
)
def test_output_limit(fields: dict[str, Any], room: int, defaults: dict[str, float], expected: int | None) -> None:
    is_chat = "prompt" not in fields
    body = ChatBody.parse({"messages": MESSAGES, **fields}) if is_chat else CompletionBody.parse(fields)
    assert sampling(body, room=room, **defaults).max_tokens == expected


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=100), st.integers(0, 1 << 30))
def test_the_length_of_a_padded_event_does_not_tell_its_numbers_digits(numbers: list[float], count: int) -> None:
    padded = [
        len(encode_events([("", {"logprobs": some, "count": count})], pad=True))
        for some in (numbers, [0.0] * len(numbers))
    ]
    assert padded[0] == padded[1]


def test_sampling_defaults_are_read_from_a_generation_config(tmp_path: Any) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "do_sample": true, "top_p": null}')
    assert read_sampling_defaults(path) == {"temperature": 0.6, "top_k": 20}
    for content in ("[]", "{", '{"top_k": "x"}'):
        path.write_text(content)
        with pytest.raises(ConfigError):
            read_sampling_defaults(path)


def test_tools_and_documents_reach_the_template() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    fields = {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}],
        "documents": [{"title": "t", "text": "x"}],
        "chat_template_kwargs": {"enable_thinking": False, "tools": "none of these"},
        "reasoning_effort": "low",
    }
    assert ChatBody.parse(fields).template_arguments()["template_kwargs"] == {
        "enable_thinking": False,
        "reasoning_effort": "low",
        "documents": [{"title": "t", "text": "x"}],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "g"}},
        ],
    }
    one = {"type": "function", "function": {"name": "g"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    for choice in (one, some):
        use = ChatBody.parse({**fields, "tool_choice": choice}).tool_use()
        assert use is not None
        assert ([function.name for function in use.functions], use.mode) == (["g"], "required")


def test_fields_that_are_not_known_are_left_unread_where_that_was_asked_for() -> None:
    content = {"messages": [{"role": "user", "content": "a"}], "cache_prompt": True, "top_a": 0, "max_tokens": 7}
    assert ChatBody.parse(content, ignores_unknown=True).max_tokens == 7
    with pytest.raises(RequestError, match="max_tokens"):
        ChatBody.parse({**content, "max_tokens": "many"}, ignores_unknown=True)
    with pytest.raises(RequestError, match="suffix"):
        ChatBody.parse({**content, "suffix": "b"}, ignores_unknown=True)
