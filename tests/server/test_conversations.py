"""What a conversation's answer is held to and taken apart by, for models of several formats."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from server.base.limits import Limits
from server.running.chat_preparation import AnswerPlan, MessageFormat, plan_answer
from server.schema.chat import ChatBody
from server.tools.formats import REASONING_FORMATS
from ssd.errors import RequestError
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


def test_grammars_of_too_many_functions_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="name fewer") as caught:
        plan(MessageFormat("hermes"), limits=Limits(max_grammar_characters=20), tools=[TOOL], tool_choice="required")
    assert caught.value.param == "tools"
    plan(MessageFormat("hermes"), limits=Limits(max_grammar_characters=20), tools=[TOOL])
