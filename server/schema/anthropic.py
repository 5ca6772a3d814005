"""The request bodies of Anthropic's /v1/messages, and their conversion to chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, TypeAdapter

from server.base.errors import NO_THREADS, ApiError
from server.base.limits import Limits
from server.schema.body import IGNORED, Body, RequestObject, UnsupportedFields, renamed_fields, validate_field
from server.schema.chat import (
    FUNCTION,
    OF_RESULT,
    OR_TEXT,
    ChatForm,
    Conversation,
    TokenizeChatBody,
    function_choice,
    joined,
)
from server.schema.generate import CommonFields
from ssd.errors import RequestError, quote_value

_IGNORED: Mapping[str, str] = {
    "metadata": IGNORED["metadata"],
    "service_tier": IGNORED["service_tier"],
    "cache_control": IGNORED["prompt_cache_key"] + " (in content blocks and tools too)",
    "user_profile_id": IGNORED["user"],
    "workspace_id": IGNORED["user"],
    "diagnostics": "the server does not store earlier requests for comparison",
    "speed": "the server has only one speed",
}
"""Maps each request field that is ignored to the reason. None of these fields would change the output."""

_NO_TOOLS = "the server does not run tools or access the network. Define tools, and run them in the client"

_REFUSED: UnsupportedFields = {
    "container": ((), _NO_TOOLS),
    "mcp_servers": (([],), _NO_TOOLS),
    "thread": ((), "the server stores no conversations. Send the whole conversation with each request"),
    "inference_geo": (("global",), "the server does not know its own location"),
}
"""Request fields that are refused, because they would change the output.

Each field is mapped to the values that are accepted because they have no effect, and to the reason for refusing others.
"""


class _ContentBlock(RequestObject):
    cache_control: Any = None  # a hint for Anthropic's prompt caching, which is automatic here


class _TextBlock(_ContentBlock):
    type: Literal["text"]
    text: str
    citations: Any = None


class _Thinking(_ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: Any = None


class _Redacted(_ContentBlock):
    """Reasoning that is encrypted for Anthropic and cannot be read here."""

    type: Literal["redacted_thinking"]
    data: Any = None


class _Use(_ContentBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


_Texts = Annotated[list[_TextBlock], Field(fail_fast=True), OR_TEXT]


class _Result(_ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[_Texts, OF_RESULT] = Field(default_factory=list)
    is_error: bool = False
    toolset_name: Any = None

    @property
    def text(self) -> str:
        """Return the text of a tool result. The text of a failed call begins with "Error"; if missing, it is added."""
        text = joined(self.content)
        return f"Error: {text}" if self.is_error and not text.lower().startswith("error") else text


_AssistantBlock = Annotated[_TextBlock | _Thinking | _Redacted | _Use, Field(discriminator="type")]
_UserBlock = Annotated[_TextBlock | _Result, Field(discriminator="type")]


class _UserTurn(RequestObject):
    role: Literal["user"]
    content: Annotated[list[_UserBlock], Field(fail_fast=True), OR_TEXT]


class _AssistantTurn(RequestObject):
    role: Literal["assistant"]
    content: Annotated[list[_AssistantBlock], Field(fail_fast=True), OR_TEXT]


class _SystemTurn(RequestObject):
    role: Literal["system"]
    content: _Texts


_AnyTurn = Annotated[_UserTurn | _AssistantTurn | _SystemTurn, Field(discriminator="role")]
_TURNS: TypeAdapter[list[_AnyTurn]] = TypeAdapter(Annotated[list[_AnyTurn], Field(fail_fast=True)])
_SYSTEM: TypeAdapter[list[_TextBlock]] = TypeAdapter(_Texts)

_BILLING = re.compile(r"x-anthropic-billing-header:.*\n*")
"""Matches a system block of Claude Code that is removed, because it differs in each request and defeats prefix caching.
"""


def messages_of(system: str | list[Any] | None, turns: list[Any]) -> list[dict[str, Any]]:
    """Convert Anthropic's messages and tool results to messages of /v1/chat/completions.

    Raises RequestError if a message is invalid.
    """
    conversation = Conversation()
    if system is not None:
        said = [block for block in validate_field(_SYSTEM, system, "system") if not _BILLING.fullmatch(block.text)]
        conversation.add("system", joined(said))
    for turn in validate_field(_TURNS, turns, "messages"):
        texts: list[_TextBlock] = []  # consecutive text blocks
        for block in [*turn.content, None]:
            if isinstance(block, _TextBlock):
                texts.append(block)
                continue
            if texts:
                conversation.add_text(turn.role, joined(texts))
                texts.clear()
            if isinstance(block, _Thinking):
                conversation.assistant("reasoning_content")["reasoning_content"] = block.thinking
            elif isinstance(block, _Use):
                conversation.call(block.name, json.dumps(block.input, ensure_ascii=False), block.id)
            elif isinstance(block, _Result):
                conversation.add("tool", block.text, tool_call_id=block.tool_use_id)
    return conversation.messages


_WITHOUT: Mapping[str, tuple[Any, ...]] = {"defer_loading": (False,), "allowed_callers": (["direct"],)}
"""Unsupported fields of a tool definition, mapped to the values that are accepted because they have no effect."""
_HINTS = frozenset({"cache_control", "eager_input_streaming", "strict"})
"""Fields of a tool definition that are ignored, because the server does in any case what they ask for.

``strict``: the arguments of forced tool calls always follow their schema. ``eager_input_streaming``: arguments are
always streamed as they are generated.
"""
_NAMES = {"name": "name", "description": "description", "input_schema": "parameters"}


class ToolChoice(RequestObject):
    """Which tools the model may call. A grammar enforces the types "any" and "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=128)
    disable_parallel_tool_use: bool | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Return the equivalent fields of a chat completion. Raises RequestError for a tool without a name."""
        parallel = not self.disable_parallel_tool_use
        if self.type != "tool":
            choice = "required" if self.type == "any" else self.type
            return {"tool_choice": choice, "parallel_tool_calls": parallel}
        if self.name is None:
            raise RequestError('tool_choice of type "tool" requires the name of a tool', param="tool_choice")
        return {"tool_choice": function_choice(self.name), "parallel_tool_calls": parallel}


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object, got {type(tool).__name__}", param="tools")
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f'{where} is of type {quote_value(tool["type"])}, but only type "custom" is supported. Such a tool '
            "has a name, a description and an input_schema, and the client runs it",
            param="tools",
        )
    for name, value in tool.items():
        if value is None or name == "type" or name in _NAMES or name in _HINTS or value in _WITHOUT.get(name, ()):
            continue
        raise RequestError(
            f"{where} has the field {quote_value(name)}, which is not supported: omit the field", param="tools"
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        given = quote_value(tool.get("input_schema"))
        raise RequestError(f"{where}.input_schema must be an object, got {given}", param="tools")
    said = {there: tool[here] for here, there in _NAMES.items() if tool.get(here) is not None}
    validate_field(FUNCTION, said, "tools", where)
    return said


_CHAT_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "prompt": "messages",
    "parallel_tool_calls": "tool_choice",
    "continue_final_message": "messages",
}
_THINKS = {"enabled": True, "disabled": False}


class Thinking(RequestObject):
    """Whether the model reasons: sets ``enable_thinking`` of the chat template, if the template has this argument.

    ``budget_tokens`` has no effect.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestObject):
    """The JSON schema of the output, which is always enforced strictly."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestObject):
    """The output format, and the effort, which is passed to the chat template as ``reasoning_effort``."""

    effort: str | None = Field(default=None, max_length=64)
    format: OutputFormat | None = None


class ThinkingTurns(RequestObject):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class ClearThinking(RequestObject):
    """Removes the reasoning of assistant turns from the prompt, except that of the last ``keep`` turns (default: 1)."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns = ThinkingTurns(type="thinking_turns", value=1)


class ContextManagement(RequestObject):
    """Edits that shorten the conversation. Without this field a conversation is never shortened."""

    edits: Annotated[list[ClearThinking], Field(max_length=1)] = Field(default_factory=list)

    def edit(self, messages: list[dict[str, Any]]) -> None:
        """Remove the reasoning of earlier turns from the messages, if the request's field ``edits`` demands it."""
        for keep in [edit.keep for edit in self.edits if edit.keep != "all"]:
            for message in [message for message in messages if "reasoning_content" in message][: -keep.value]:
                del message["reasoning_content"]


class AnthropicChat(Body):
    """The conversation fields of /v1/messages and /v1/messages/count_tokens."""

    ignored, refused, chat_names = _IGNORED, _REFUSED, _CHAT_NAMES

    messages: Annotated[list[Any], Field(fail_fast=True)] = Field(
        min_length=1, description="User and assistant messages. The model continues a final assistant message."
    )
    system: str | Annotated[list[Any], Field(fail_fast=True)] | None = Field(
        default=None, description="A text, or a list of text blocks."
    )
    tools: Annotated[list[Any], Field(fail_fast=True)] = Field(
        default_factory=list, description="Only tools of type `custom`, with `name`, `description` and `input_schema`."
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def supported_fields(cls, content: dict[str, Any]) -> dict[str, Any]:
        if content.get("thread") is not None:
            raise ApiError(400, f"thread is not supported: {_REFUSED['thread'][1]}", param="thread", code=NO_THREADS)
        return super().supported_fields(content)

    def prompt_fields(self) -> dict[str, Any]:
        """Convert the conversation and its tools to the chat completion fields from which the prompt is made.

        Raises RequestError if a message or tool is invalid, or if the messages contain no text.
        """
        messages = messages_of(self.system, self.messages)
        if self.context_management is not None:
            self.context_management.edit(messages)
        if not messages:
            raise RequestError("messages contain no text: give at least one text", param="messages")
        last = messages[-1]  # if it is the assistant's and has no tool call, the output continues it
        template: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type in _THINKS:
            template["enable_thinking"] = _THINKS[self.thinking.type]
        if self.output_config is not None and self.output_config.effort is not None:
            template["reasoning_effort"] = self.output_config.effort
        fields: dict[str, Any] = {
            "messages": messages,
            "chat_template_kwargs": {**template, **self.chat_template_kwargs},
            "continue_final_message": (
                last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
            ),
        }
        if self.tools:
            functions = [_function(tool, f"tools[{number}]") for number, tool in enumerate(self.tools)]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        if self.tool_choice is not None:
            fields |= self.tool_choice.chat_fields()
        return fields


class CountTokensBody(AnthropicChat):
    """The request body of POST /v1/messages/count_tokens."""

    _chat: TokenizeChatBody = PrivateAttr()

    @property
    def chat(self) -> TokenizeChatBody:
        return self._chat

    def require_within(self, limits: Limits) -> None:
        with renamed_fields(self.chat_names):
            self._chat = TokenizeChatBody.parse({"model": self.model, **self.prompt_fields()}, limits)


class AnthropicBody(CommonFields, AnthropicChat, ChatForm):
    """The request body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    store: bool | None = Field(default=None, description="false: this text is not added to the retrieval cache.")

    def chat_fields(self) -> dict[str, Any]:
        fields = {**self.same_fields(), **self.prompt_fields(), "stop": self.stop_sequences}
        if self.thinking is not None and self.thinking.display == "omitted":
            fields["include_reasoning"] = False
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "", "schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields
