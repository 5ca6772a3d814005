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


def sampling(
    body: GenerateBody, *, room: int = 100, default_limit: int | None = None, **defaults: float
) -> SamplingParams:
    return body.sampling(defaults, room=room, default_limit=default_limit)


def refusal(schema: type[GenerateBody], fields: dict[str, Any]) -> RequestError:
    base: dict[str, Any] = {"messages": MESSAGES} if schema is ChatBody else {"prompt": "hello"}
    with pytest.raises(RequestError) as caught:
        body = schema.parse({**base, **fields})
        if isinstance(body, CompletionBody):
            body.prompts()
        if isinstance(body, ChatBody):
            body.template_arguments()
        sampling(body)
    return caught.value


@pytest.mark.parametrize("schema", [CompletionBody, ChatBody])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", "1"), ("logprobs", 21), ("top_logprobs", 30), ("prompt_logprobs", 21), ("prompt_logprobs", -1),
        ("echo", "yes"), ("suffix", "end"), ("best_of", 2), ("tools", [{"type": "function"}]),
        ("chat_template", "{{ 1 }}"),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]), ("functions", [{"name": "f"}]),
        ("tool_choice", "required"), ("function_call", "auto"),
        ("response_format", {"type": "grammar"}), ("response_format", {"type": "json_schema"}),
        ("structured_outputs", {}), ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("modalities", ["audio"]), ("audio", {"voice": "x"}),
        ("prediction", {"type": "content"}), ("prediction", "x"), ("guided_json", {}), ("guided_choice", ["x"]),
        ("bad_words", [""]), ("truncate_prompt_tokens", 5),
        ("skip_special_tokens", "no"), ("use_beam_search", True), ("allowed_token_ids", []), ("no_such_field", 1),
        ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", "5"), ("max_tokens", 1.5), ("temperature", -0.1),
        ("temperature", 2.5), ("temperature", "hot"), ("temperature", True), ("top_p", 0.0), ("top_p", 1.5),
        ("top_k", -2), ("min_p", 2.0), ("repetition_penalty", 0.0), ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0), ("n", 0), ("n", 1000), ("seed", 1 << 64), ("stop", [""]), ("stop", ""),
        ("stop", [1]), ("stop", ["x"] * 200), ("stop_token_ids", ["1"]), ("min_tokens", -1), ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"1": 1000.0}), ("stream", "yes"), ("stream_options", {"include_usage": True}),
        ("cache_salt", ""), ("model", 5),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_honoured_are_refused_by_name(schema: type[GenerateBody], field: str, value: Any) -> None:
    error = refusal(schema, {field: value})
    assert error.param == field
    assert field in str(error)


@pytest.mark.parametrize(
    ("schema", "fields", "param"),
    [
        (CompletionBody, {"prompt": []}, "prompt"),
        (CompletionBody, {"prompt": [[]]}, "prompt"),
        (CompletionBody, {"prompt": [1, "a"]}, "prompt"),
        (CompletionBody, {"prompt": [[1], 2]}, "prompt"),
        (CompletionBody, {"prompt": [True]}, "prompt"),
        (CompletionBody, {"prompt": 7}, "prompt"),
        (CompletionBody, {"prompt": None}, "prompt"),
        (CompletionBody, {"messages": MESSAGES}, "messages"),
        (ChatBody, {"messages": []}, "messages"),
        (ChatBody, {"messages": "hello"}, "messages"),
        (ChatBody, {"messages": None}, "messages"),
        (ChatBody, {"prompt": "hello"}, "prompt"),
        (ChatBody, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (ChatBody, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (ChatBody, {"add_special_tokens": True}, "add_special_tokens"),
        (ChatBody, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (ChatBody, {"stream": True, "stream_options": {"every": 2}}, "stream_options.every"),
        (ChatBody, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (ChatBody, {"top_logprobs": 2}, "top_logprobs"),
        (ChatBody, {"logprobs": 1}, "logprobs"),
        (ChatBody, {"echo": True}, "echo"),
        (CompletionBody, {"logprobs": True}, "logprobs"),
        (
            ChatBody,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
    ],
)
def test_malformed_bodies_name_the_field(schema: type[GenerateBody], fields: dict[str, Any], param: str) -> None:
    assert refusal(schema, fields).param == param


def test_null_means_absent_and_fields_without_effect_are_ignored() -> None:
    plain = CompletionBody.parse({"prompt": "x"})
    nulls = {name: None for name in [*CompletionBody.model_fields, *REFUSED, "best_of"] if name != "prompt"}
    assert CompletionBody.parse({"prompt": "x", **nulls}) == plain
    assert CompletionBody.parse({"prompt": "x", **{name: {"any": "thing"} for name in IGNORED}}) == plain
    neutral = {name: values[0] for name, (values, _reason) in REFUSED.items() if values}
    assert CompletionBody.parse({"prompt": "x", "best_of": 1, **neutral}) == plain


def test_fields_reach_the_sampling_parameters() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": -4, "stop_token_ids": [5],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2,
    }  # fmt: skip
    body = CompletionBody.parse({"prompt": "x", "logit_bias": {"3": -1, "4": 2.5}, "stop": "end", **fields})
    expected: dict[str, Any] = {**fields, "stop_token_ids": (5,), "stop": ("end",), "logit_bias": ((3, -1.0), (4, 2.5))}
    assert sampling(body, temperature=1.5, top_k=3) == SamplingParams(**expected)


def test_defaults_fill_what_the_request_leaves_out_and_openai_fills_the_rest() -> None:
    body = ChatBody.parse({"messages": MESSAGES, "top_p": 0.5})
    found = sampling(body, temperature=0.6, top_p=0.9, top_k=20)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.5, 20, 0.0)
    assert sampling(body).temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "room", "default_limit", "defaults", "expected"),
    [
        ({}, 100, 16, {}, 16),
        ({}, 10, 16, {}, 10),
        ({}, -5, 16, {}, 1),
        ({}, 100, None, {}, None),
        ({}, 100, None, {"max_new_tokens": 50}, 50),
        ({}, 30, None, {"max_new_tokens": 50}, 30),
        ({"max_tokens": 60}, 30, None, {"max_new_tokens": 50}, 60),
        ({"max_tokens": 60, "max_completion_tokens": 7}, 30, None, {}, 7),
    ],
)
def test_output_limit(
    fields: dict[str, int], room: int, default_limit: int | None, defaults: dict[str, float], expected: int | None
) -> None:
    body = ChatBody.parse({"messages": MESSAGES, **fields})
    assert sampling(body, room=room, default_limit=default_limit, **defaults).max_tokens == expected


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


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"repeat_penalty": 1.1}, "unknown field 'repeat_penalty': did you mean repetition_penalty?"),
        ({"maxtokens": 1}, "unknown field 'maxtokens': did you mean max_tokens?"),
        ({"grammar": ""}, "unknown field 'grammar': remove it, or check its spelling"),
        ({"stream_options": {"include_usages": True}}, "include_usages': did you mean include_usage?"),
    ],
)
def test_a_field_that_is_not_known_is_refused_with_the_one_that_may_be_meant(field: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        ChatBody.parse({"messages": [{"role": "user", "content": "a"}], **field})
    assert said in str(refused.value)


def test_fields_that_are_not_known_are_left_unread_where_that_was_asked_for() -> None:
    content = {"messages": [{"role": "user", "content": "a"}], "cache_prompt": True, "top_a": 0, "max_tokens": 7}
    assert ChatBody.parse(content, ignores_unknown=True).max_tokens == 7
    with pytest.raises(RequestError, match="max_tokens"):
        ChatBody.parse({**content, "max_tokens": "many"}, ignores_unknown=True)
    with pytest.raises(RequestError, match="suffix"):
        ChatBody.parse({**content, "suffix": "b"}, ignores_unknown=True)
