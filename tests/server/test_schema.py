"""What becomes of each field of a request, by what the engine and the chat template are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server.base.settings import read_sampling_defaults
from server.schema.body import IGNORED, REFUSED
from server.schema.generate import CompletionBody
from ssd.config import SamplingParams
from ssd.engine import Request
from ssd.errors import ConfigError
from tests.server.apis import CHAT, COMPLETIONS, Api
from tests.server.client import post
from tests.server.failing_engine import RunningServer, SayingCodec, SayingEngine, serving


class NotingEngine(SayingEngine):
    """Keeps the last request, and what the template was given for it."""

    def __init__(self) -> None:
        super().__init__("")
        self.grammars = None  # what holds an output is not compiled
        self.codec = NotingCodec("{{ tools }} <tool_call> {{ documents }}")

    def submit(self, request: Request) -> None:
        self.request = request
        super().submit(request)


class NotingCodec(SayingCodec):
    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.options = options
        return super().encode_chat(messages)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(lambda _: NotingEngine()) as running:
        yield running


def sampling(server: RunningServer, api: Api = COMPLETIONS, /, **fields: Any) -> SamplingParams:
    answer = post(server.port, api.path, {**api.asking("abc"), **fields})
    assert answer.status == 200, answer.content
    engine: Any = server.engine_thread.engine
    found: SamplingParams = engine.request.sampling
    return found


def test_null_means_absent_and_fields_without_effect_are_ignored(server: RunningServer) -> None:
    plain = sampling(server)
    assert sampling(server, **dict.fromkeys({*CompletionBody.model_fields, *REFUSED} - {"prompt"})) == plain
    assert sampling(server, **{name: {"any": "thing"} for name in IGNORED}) == plain
    neutral = {name: values[0] for name, (values, _reason) in REFUSED.items() if values}
    assert sampling(server, best_of=1, **neutral) == plain


def test_fields_reach_the_sampling_parameters(server: RunningServer) -> None:
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
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
    }
    found = sampling(server, logit_bias={"3": -1, "4": 2.5}, stop="end", stop_token_ids=[5], **fields)
    expected: dict[str, Any] = {**fields, "stop_token_ids": (5,), "stop": ("end",), "logit_bias": ((3, -1.0), (4, 2.5))}
    assert found == SamplingParams(**expected, continues_prompt=True)
    assert not sampling(server, CHAT).continues_prompt
    goes_on = {"messages": [{"role": "assistant", "content": "b"}], "continue_final_message": True}
    assert sampling(server, CHAT, **goes_on).continues_prompt


def test_an_output_ends_with_the_context_unless_a_limit_is_sent(server: RunningServer) -> None:
    assert sampling(server).max_tokens == 16 and sampling(server, CHAT).max_tokens is None
    assert sampling(server, prompt=[97] * 502).max_tokens == 10
    assert sampling(server, max_tokens=60, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ({}, (1.0, 0.5, 0, 0.0)),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 50}, (0.6, 0.5, 20, 0.0)),
    ],
)
def test_defaults_fill_what_the_request_leaves_out_and_openai_fills_the_rest(
    defaults: dict[str, float], expected: tuple[float, ...]
) -> None:
    with serving(lambda _: NotingEngine(), sampling_defaults=defaults) as running:
        found = sampling(running, CHAT, top_p=0.5)
        assert (found.temperature, found.top_p, found.top_k, found.min_p) == expected
        assert found.max_tokens == defaults.get("max_new_tokens")
        if defaults:
            assert sampling(running, CHAT, max_tokens=60).max_tokens == 60
            assert sampling(running, CHAT, messages=[{"role": "user", "content": "a" * 482}]).max_tokens == 30


def test_sampling_defaults_are_read_from_a_generation_config(tmp_path: Any) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "do_sample": true, "top_p": null}')
    assert read_sampling_defaults(path) == {"temperature": 0.6, "top_k": 20}
    for content in ("[]", "{", '{"top_k": "x"}'):
        path.write_text(content)
        with pytest.raises(ConfigError):
            read_sampling_defaults(path)


def test_tools_and_documents_reach_the_template(server: RunningServer) -> None:
    engine: Any = server.engine_thread.engine
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    one = {"type": "function", "function": {"name": "g"}}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": {**function, "strict": True}}, one],
        "documents": [{"title": "t", "text": "x"}],
        "chat_template_kwargs": {"enable_thinking": False, "tools": "none of these"},
        "reasoning_effort": "low",
    }
    for choice, tools in (
        ("auto", [{"type": "function", "function": function}, one]),
        (one, [one]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}, [one]),
    ):
        found = sampling(server, CHAT, **fields, tool_choice=choice)
        kept = {"enable_thinking": False, "reasoning_effort": "low", "documents": fields["documents"]}
        assert engine.codec.options["template_kwargs"] == {**kept, "tools": tools}
        assert (found.structured_output is not None) == (choice != "auto"), "a grammar holds to what is required"


def test_fields_that_are_not_known_are_left_unread_where_that_was_asked_for() -> None:
    with serving(lambda _: NotingEngine(), ignore_unknown_fields=True) as running:
        assert sampling(running, CHAT, cache_prompt=True, top_a=0, max_tokens=7).max_tokens == 7
        for field, value in (("max_tokens", "many"), ("suffix", "b")):
            assert CHAT.post(running.port, cache_prompt=True, **{field: value}).error["param"] == field
