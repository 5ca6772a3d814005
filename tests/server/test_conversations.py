"""What a conversation's answer is held to and taken apart by, for models of several formats."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from server.base.limits import Limits
from server.running.chat_preparation import AnswerPlan, MessageFormat, message_format, plan_answer
from server.schema.chat import ChatBody
from server.tools.formats import REASONING_FORMATS
from server.tools.message_parser import with_numbered_call_ids, with_short_call_ids
from ssd.errors import RequestError
from ssd.text.chat_template import ChatTemplate
from ssd.text.codec import TextCodec
from ssd.text.grammar_compiler import GrammarCompiler
from tests.tokenizers_for_tests import byte_level_tokenizer

PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SPECIAL_ADDED = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
)
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@cache
def codec() -> TextCodec:
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken(text, special=False) for text in PLAIN_ADDED])
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    end = backend.token_to_id("<|end|>")
    assert end is not None
    return TextCodec(tokenizer, (end,))


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(codec(), vocab_size=codec().vocab_size, eos_token_ids=codec().eos_token_ids)


def template_of(source: str) -> ChatTemplate:
    """Not the codec's own template."""
    return ChatTemplate(source, PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer()).apply_chat_template)


def plan(form: MessageFormat, *, prompt: str = "hello", limits: Limits | None = None, **fields: Any) -> AnswerPlan:
    body = ChatBody.parse({"messages": [{"role": "user", "content": "x"}], **fields})
    return plan_answer(body, form, codec(), codec().encode_completion(prompt), limits or Limits())


def accepts(found: AnswerPlan, text: str) -> bool:
    """Whether a model may say ``text`` and end."""
    assert found.output is not None
    ids = codec().encode_completion(text)
    masks = grammars().compile(found.output).masks(ids)
    return len(masks) == len(ids) + 1 and bool(masks[-1][codec().eos_token_ids[0]])


@pytest.mark.parametrize("reasoning", [*REASONING_FORMATS])
def test_every_kind_of_reasoning_can_go_before_a_call(reasoning: str) -> None:
    found = plan(MessageFormat("hermes", reasoning), tools=[TOOL], tool_choice="required")
    assert found.output is not None
    grammars().compile(found.output)


def test_a_format_without_a_grammar_of_its_own_is_made_to_write_json() -> None:
    found = plan(MessageFormat("pythonic"), tools=[TOOL], tool_choice="required")
    written = '[{"name": "f", "parameters": {"x": 2}}]'
    assert accepts(found, written)
    assert found.messages is not None
    (call,) = found.messages.parse(0, written).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("f", {"x": 2})


def test_an_answer_has_one_call_where_the_template_takes_no_more_in_a_message() -> None:
    for several in (True, False):
        form = MessageFormat("hermes", allows_several_calls=several)
        assert accepts(plan(form, tools=[TOOL], tool_choice="required"), f"{CALL}\n{CALL}") is several
        messages = plan(form, tools=[TOOL]).messages
        assert messages is not None and len(messages.parse(0, f"{CALL}\n{CALL}").tool_calls) == 1 + several
        assert accepts(plan(form, tools=[TOOL], tool_choice="required"), CALL)


def test_an_answer_of_a_schema_may_be_a_call_instead_where_calls_are_possible() -> None:
    found = plan(MessageFormat("hermes", "qwen3"), tools=[TOOL], response_format=FORM)
    assert [accepts(found, text) for text in (CALL, '"yes"', '<think>x</think>"yes"', "yes", CALL + '"yes"')] == [
        True,
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(RequestError, match="cannot be combined with tools in this model's tool call format"):
        plan(MessageFormat("pythonic"), tools=[TOOL], response_format=FORM)


def test_names_of_calls_are_made_short_where_a_template_takes_no_others() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": "f"}} for name in ("call_abcdefghijk", "a1b2c3d4e")]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [*calls, {"id": 7}, "x"]},
        {"role": "tool", "tool_call_id": "call_abcdefghijk", "content": "x"},
        {"role": "user", "content": "x", "tool_calls": 5},
    ]
    first, second, third = with_short_call_ids(messages)
    short = first["tool_calls"][0]["id"]
    assert len(short) == 9 and short.isalnum()
    assert second["tool_call_id"] == short
    assert first["tool_calls"][1:] == [calls[1], {"id": 7}, "x"]
    assert third == messages[2]
    for name, is_short in (("mistral", True), ("hermes", False)):
        made = plan(MessageFormat(name), tools=[TOOL]).messages
        assert made is not None
        (call,) = made.parse(0, f"{CALL if name == 'hermes' else '[TOOL_CALLS]f[ARGS]{}'}").tool_calls
        assert (len(call.id) == 9 and call.id.isalnum()) is is_short


def test_calls_are_named_by_function_and_number_where_a_template_writes_no_other_name() -> None:
    def turn(*named: tuple[str, str]) -> dict[str, Any]:
        calls = [{"id": call, "type": "function", "function": {"name": name}} for call, name in named]
        return {"role": "assistant", "tool_calls": calls}

    def result(call: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call, "content": "x"}

    messages = [
        turn(("call_a", "f"), ("b", "g")),
        result("b"),
        result("call_a"),
        result("unknown"),
        result(7),
        turn(("functions.f:7", "f"), ("b", "f")),
        result("b"),
        {"role": "assistant", "tool_calls": [7, {"id": "c"}]},
    ]
    first, *results, second, last, malformed = with_numbered_call_ids(messages)
    assert [call["id"] for call in first["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    answered = [message["tool_call_id"] for message in (*results, last)]
    assert answered == ["functions.g:1", "functions.f:0", "unknown", 7, "functions.f:3"]
    assert [call["id"] for call in second["tool_calls"]] == ["functions.f:2", "functions.f:3"]
    assert malformed == messages[-1] and messages[0] == turn(("call_a", "f"), ("b", "g"))


def test_what_was_thought_is_counted_in_tokens() -> None:
    def count(form: str, prompt: str, text: str) -> int:
        found = plan(MessageFormat(None, form), prompt=prompt)
        assert found.count_reasoning is not None
        return found.count_reasoning(codec().encode_completion(text))

    thought = len(codec().encode_completion("<think>some thought</think>"))
    assert count("qwen3", "", "<think>some thought</think>and more") == thought
    assert count("qwen3", "<think>", "some thought</think>and more") == thought - 1
    assert count("qwen3", "", "<think>some thought") == thought - 1
    assert count("qwen3", "", "no thought") == 0
    assert count("qwen3", "<think></think>", "no</think>") == 0
    assert count("deepseek_r1", "", "some thought</think>") == thought - 1
    assert count("openai_gptoss", "", "<|channel|>final<|message|>x") == 0
    assert count("qwen3", "", "") == 0


def test_grammars_of_too_many_functions_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="name fewer") as caught:
        plan(MessageFormat("hermes"), limits=Limits(max_grammar_characters=20), tools=[TOOL], tool_choice="required")
    assert caught.value.param == "tools"
    plan(MessageFormat("hermes"), limits=Limits(max_grammar_characters=20), tools=[TOOL])


@pytest.mark.parametrize(
    ("options", "template", "expected"),
    [
        (("auto", "auto"), "no such thing", MessageFormat("hermes", None, True)),
        (("auto", "auto"), "{{ tools }} <tool_call> <think>", MessageFormat("hermes", "qwen3", False)),
        (("auto", "none"), "{{ tools }} [TOOL_CALLS] [THINK]", MessageFormat("mistral", None, False)),
        (("auto", "auto"), "{{ tools }}", MessageFormat(None, None, False)),
        (("none", "auto"), "{{ tools }} <tool_call>", MessageFormat(None, None, False)),
        (("mistral", "none"), "no such thing", MessageFormat("mistral", None, False)),
        (("hermes", "none"), "no such thing", MessageFormat("hermes", None, True)),
        (("none", "none"), "{{ tools }} <tool_call>", MessageFormat()),
    ],
)
def test_the_format_is_the_templates_unless_it_is_given(
    options: tuple[str, str], template: str, expected: MessageFormat
) -> None:
    assert message_format(template_of(template), *options) == expected
