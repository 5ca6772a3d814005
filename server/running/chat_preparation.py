"""Prepare conversations for the engine: the prompt, the output constraints, and the parser of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from server.admission.fair_executor import FairExecutors
from server.base.limits import Limits
from server.base.settings import ServerSettings
from server.running.tokenization import Tokenization, codec_of
from server.schema.chat import ChatBody, ChatTemplateFields, TokenizeChatBody, ToolUse
from server.tools.formats import (
    AUTO,
    FORMAT_IN_WORDS,
    JSON,
    OFF,
    REASONING_FORMATS,
    detect,
    make_parser,
    special_tokens,
    write_calls,
)
from server.tools.grammars import call_grammar, count_reasoning_tokens, reasoning_rule
from server.tools.message_parser import Messages, call_id, short_call_id, with_numbered_call_ids, with_short_call_ids
from server.tools.reasoning import ends_within_reasoning
from server.tools.values import Functions
from ssd.config import StructuredOutput
from ssd.errors import RequestError

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.text.chat_template import ChatTemplate
    from ssd.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How a model writes tool calls and reasoning in its messages, mostly detected from its chat template.

    Attributes:
        tool_call: The name of the tool call parser. None: the output is not searched for tool calls.
        reasoning: The name of the reasoning parser. None: the output is not searched for reasoning.
        in_words: Whether a text in the prompt describes the tools, because the chat template does not support tools.
        allows_several_calls: Whether a message may contain several tool calls.
    """

    tool_call: str | None = None
    reasoning: str | None = None
    in_words: bool = False
    allows_several_calls: bool = True


@lru_cache(maxsize=8)
def message_format(template: ChatTemplate | None, tool_call: str, reasoning: str) -> MessageFormat:
    """Detect how a chat template writes tool calls and reasoning. Results are cached.

    ``tool_call`` and ``reasoning`` are names of parsers, "auto" for detection, or "none".
    """
    if template is None or tool_call == reasoning == OFF:
        return MessageFormat()
    calls, thoughts = detect(template.source, template.sample_call())
    if tool_call != AUTO:
        calls = None if tool_call == OFF else tool_call
    if reasoning != AUTO:
        thoughts = None if reasoning == OFF else reasoning
    # An operator who selects another format describes it, and the tools, to the model.
    in_words = not template.takes_tools and (tool_call == AUTO or calls == FORMAT_IN_WORDS)
    allows_several_calls = in_words or template.takes_several_calls
    return MessageFormat(FORMAT_IN_WORDS if in_words else calls, thoughts, in_words, allows_several_calls)


_TAIL_TOKENS = 32
"""The number of tokens at the end of the prompt that are decoded to see whether the output will begin inside reasoning.
"""
_SCHEMAS = frozenset({"json_object", "json_schema"})


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the output for a conversation is constrained and parsed."""

    messages: Messages | None
    """Parses tool calls and reasoning in the output. None: all text is content."""
    output: StructuredOutput | None
    shown_special_ids: tuple[int, ...] = ()
    """The ids of the special tokens that are decoded to text, because the output parser searches for them."""
    count_reasoning: Callable[[Sequence[int]], int] | None = None
    """A function that counts the reasoning tokens of an output. None: the model does not reason."""


def plan_answer(
    body: ChatBody, form: MessageFormat, codec: TextCodec, prompt: Sequence[int], limits: Limits
) -> AnswerPlan:
    """Return how the output for a chat request is constrained and parsed.

    ``form`` is the format of the model's messages, and ``prompt`` the tokenized conversation. Raises RequestError if
    the request has tools, but the model's tool calls cannot be parsed, or if no grammar can enforce a schema.
    """
    use, asked = body.tool_use(), body.structured_output()
    if use is not None and not form.allows_several_calls:
        use = replace(use, parallel=False)
    mode = "none" if use is None else use.mode
    if mode == "none" and form.reasoning is None:
        return AnswerPlan(None, asked)
    tail = codec.decode(prompt[-_TAIL_TOKENS:]) if form.reasoning is not None else ""
    if form.reasoning is not None and body.continue_final_message:
        thoughts = REASONING_FORMATS[form.reasoning]
        if ends_within_reasoning(thoughts, str(body.messages[-1].get("content"))):
            tail = thoughts.begin[0]
        elif thoughts.starts_inside:  # the model has already finished or skipped its reasoning
            form = replace(form, reasoning=None)
    functions: Functions = {}
    reader, calls = form.tool_call if mode != "none" else None, None
    if use is not None and mode != "none":
        functions = {function.name: function.parameters or {"type": "object"} for function in use.functions}
        if mode == "required" or asked is not None:
            reader, calls = _calls(use, form, functions, codec, limits)
        elif reader is None:
            raise RequestError(
                "this model's tool calls cannot be parsed, because the server was started without a parser for "
                'their format (--tool-call-parser). Send tool_choice "required", "none" or the name of a function',
                param="tool_choice",
            )
    seen = special_tokens(reader, form.reasoning)
    thought = reasoning_rule(form.reasoning, tail, codec.added_tokens)
    output = _output(calls, None if mode == "required" else asked, thought)
    messages = Messages(
        partial(make_parser, reader, form.reasoning, functions=functions, prompt=tail),
        parallel=use is None or use.parallel,
        only_calls=mode == "required",
        show_reasoning=body.include_reasoning,
        make_id=short_call_id if form.tool_call == "mistral" else call_id,
    )
    count = None
    if form.reasoning is not None:
        count = partial(count_reasoning_tokens, form.reasoning, tail, decode=codec.decode)
    ids = {token_id for text, token_id in codec.added_tokens.items() if text in seen}
    shown = tuple(sorted(ids & codec.special_ids))
    return AnswerPlan(messages, output, shown, count)


def _calls(
    use: ToolUse, form: MessageFormat, functions: Functions, codec: TextCodec, limits: Limits
) -> tuple[str, StructuredOutput]:
    """Return the format in which the model must write its tool calls, and the grammar that enforces it."""
    for name in (form.tool_call, JSON):
        markers = special_tokens(name, None)  # only markers, as there may be thousands of added tokens
        added = {text: token_id for text, token_id in codec.added_tokens.items() if text in markers}
        strict = {function.name for function in use.functions if function.strict}
        grammar = call_grammar(name, functions, parallel=use.parallel, special=added, strict=strict)
        if name is not None and grammar is not None:
            if len(grammar) > limits.max_grammar_characters:
                raise RequestError(
                    f"the grammar of these functions has {len(grammar)} characters, at most "
                    f"{limits.max_grammar_characters} are accepted: name fewer functions in tool_choice",
                    param="tools",
                )
            return name, StructuredOutput("grammar", grammar, "tools")
        if use.mode != "required":  # the prompt then mentions no other format
            break
    raise RequestError(
        "response_format cannot be combined with tools in this model's tool call format: omit response_format, or set "
        'tool_choice to "none"',
        param="response_format",
    )


def _output(
    calls: StructuredOutput | None, asked: StructuredOutput | None, reasoning: str | None
) -> StructuredOutput | None:
    """Combine the grammars for reasoning, for tool calls, and for the requested form of the text."""
    if calls is not None and asked is not None and asked.kind not in _SCHEMAS:
        raise RequestError(
            f"{asked.param} can be combined with tools only if it is a JSON schema: use a JSON schema, or omit "
            f"{asked.param} or tools",
            param=asked.param,
        )
    parts = {name: part for name, part in (("calls", calls), ("answer", asked)) if part is not None}
    if not parts:
        return None
    first = next(iter(parts.values()))
    if len(parts) == 1 and reasoning is None:
        return first
    choices = " | ".join(f"@{name}" for name in parts)
    rules = f"start: ({choices})" if reasoning is None else f"start: reasoning ({choices})\n{reasoning}"
    return StructuredOutput.parts(rules, parts, first.param)


def _writing(form: MessageFormat) -> dict[str, Any]:
    """Return the arguments of `TextCodec.encode_chat` that determine how the prompt presents tools and tool calls."""
    return {"tools_in_words": form.in_words, "write_calls": partial(write_calls, form.tool_call)}


B = TypeVar("B", bound=ChatTemplateFields)

_CALL_IDS: Mapping[str | None, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "mistral": with_short_call_ids,
    "kimi_k2": with_numbered_call_ids,
}
"""For formats whose chat templates accept only one form of tool call ids: functions that convert the ids in messages.
"""


class ChatPreparer:
    """Tokenizes conversations with their tools, and plans how the output is constrained and parsed."""

    def __init__(self, texts: Tokenization, lanes: FairExecutors, settings: ServerSettings) -> None:
        self._texts, self._lanes, self._settings = texts, lanes, settings

    async def prepare(self, engine: Engine, body: ChatBody) -> tuple[tuple[int, ...], AnswerPlan]:
        """Return the token ids of a conversation, and how the output is constrained and parsed.

        Raises RequestError if the conversation cannot be tokenized, or if its tools or output constraints cannot be
        used.
        """
        body, form = self._adapt_to_template(engine, body)
        prompt = await self._texts.messages(engine, body, **_writing(form))
        codec, limits, use = codec_of(engine), self._settings.limits, body.tool_use()
        if use is not None and (use.mode == "required" or body.structured_output() is not None):  # builds a grammar
            return prompt, await self._lanes.answers.run(plan_answer, body, form, codec, prompt, limits)
        return prompt, plan_answer(body, form, codec, prompt, limits)

    async def tokenize(self, engine: Engine, body: TokenizeChatBody) -> dict[str, Any]:
        body, form = self._adapt_to_template(engine, body)
        return await self._texts.tokenize_messages(engine, body, **_writing(form))

    def _adapt_to_template(self, engine: Engine, body: B) -> tuple[B, MessageFormat]:
        """Return the request with its tools in the form that the chat template expects, and the message format."""
        use = body.tool_use()
        if use is not None and use.mode == "none" and self._settings.exclude_tools_when_tool_choice_none:
            body, use = body.model_copy(update={"tools": [], "tool_choice": None}), None
        codec = codec_of(engine)
        if body.documents and "documents" not in (codec.chat_template() or "documents"):
            raise RequestError(
                "this model's chat template ignores documents: put them into a message", param="documents"
            )
        template = codec.template(with_tools=use is not None)
        form = message_format(template, self._settings.tool_call_parser, self._settings.reasoning_parser)
        if named := _CALL_IDS.get(form.tool_call):
            body = body.model_copy(update={"messages": named(body.messages)})
        return body, form
