"""What requests to /v1/messages may contain, and the chat completion each of them is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from server.base.errors import NO_THREADS, ApiError
from server.base.limits import Limits
from server.schema.body import IGNORED, Body, Part, Refused, renaming
from server.schema.chat import ChatForm, Conversation, TokenizeChatBody, function_choice, string_of
from server.schema.generate import CommonFields
from ssd.errors import RequestError, shown

_IGNORED: Mapping[str, str] = {
    "metadata": IGNORED["metadata"],
    "service_tier": IGNORED["service_tier"],
    "cache_control": IGNORED["prompt_cache_key"] + ", here and in blocks and tools",
    "user_profile_id": IGNORED["user"],
    "workspace_id": IGNORED["user"],
    "diagnostics": "nothing is kept that a request could be compared with",
    "speed": "there is one",
}
"""Fields that may be left unread without changing the output, and why they are."""

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_NO_TOOLS = "the server runs no tools and reaches no network. Give the model tools, and run them yourself"

_REFUSED: Refused = {
    "container": ((), _NO_TOOLS),
    "mcp_servers": (([],), _NO_TOOLS),
    "context_management": (
        ({}, {"edits": []}, _KEEP_ALL), "a conversation is never shortened. Leave out what is not needed",
    ),
    "thread": ((), "no conversation is kept here. Send the whole of it with each request"),
    "inference_geo": (("global",), "the server does not know where it stands"),
}  # fmt: skip
"""Fields that would change the output, or where it is made, each with values that mean "without it" and the reason."""


_ROLES = ("user", "assistant", "system")
_FIELDS: dict[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller", "toolset_name"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error", "toolset_name"}),
}
"""Blocks, and what each may hold beside its type and ``cache_control``, which is a hint to a cache that needs none."""
_BLOCKS_OF: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def messages_of(system: str | list[Any] | None, turns: list[Any]) -> list[dict[str, Any]]:
    """Messages as /v1/chat/completions takes them, ``system`` first. O(blocks and their text).

    The results of tools become messages of their own. Raises RequestError (``param`` "messages" or "system") for what
    cannot become a message, and names it.
    """
    conversation = _Turns()
    if system is not None:
        conversation.add("system", _joined(_blocks(system, "system", "system", "system"), "system"))
    for number, turn in enumerate(turns):
        conversation.take(turn, f"messages[{number}]")
    return conversation.messages


def goes_on(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last message: the assistant's own, in which it has called nothing."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


class _Turns(Conversation):
    """Messages as they are put together from turns."""

    def take(self, turn: Any, where: str) -> None:
        if not isinstance(turn, Mapping):
            raise _wrong(f"{where} must be an object, got {type(turn).__name__}")
        role = turn.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _wrong(f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
        _require_known(turn, {"role", "content"}, where)
        texts: list[str] = []  # of blocks that follow each other
        for block, at in _blocks(turn.get("content"), role, f"{where}.content", "messages"):
            if block["type"] == "text":
                texts.append(string_of(block, "text", at, "messages"))
                continue
            self._say(role, texts)
            _TAKES[block["type"]](self, block, at)
        self._say(role, texts)

    def thinking(self, block: Mapping[str, Any], at: str) -> None:
        self.assistant("reasoning_content")["reasoning_content"] = string_of(block, "thinking", at, "messages")

    def redacted_thinking(self, _block: Mapping[str, Any], _at: str) -> None:
        """Nothing: only who wrote it can read it."""

    def tool_use(self, block: Mapping[str, Any], at: str) -> None:
        given = block.get("input")
        if not isinstance(given, Mapping):
            raise _wrong(f"{at}.input must be an object, got {shown(given)}")
        name, call_id = (string_of(block, field, at, "messages") for field in ("name", "id"))
        self.call(name, json.dumps(given, ensure_ascii=False), call_id)

    def tool_result(self, block: Mapping[str, Any], at: str) -> None:
        """What came of a call; that it went wrong is told in words, where they do not say so."""
        content, is_error = block.get("content"), block.get("is_error")
        if not (is_error is None or isinstance(is_error, bool)):
            raise _wrong(f"{at}.is_error must be true or false, got {shown(is_error)}")
        where = f"{at}.content"
        text = "" if content is None else _joined(_blocks(content, "system", where, "messages"), "messages")
        if is_error and not text.lower().startswith("error"):
            text = f"Error: {text}"
        self.add("tool", text, tool_call_id=string_of(block, "tool_use_id", at, "messages"))

    def _say(self, role: str, texts: list[str]) -> None:
        if not texts:
            return
        text = "\n".join(texts)
        texts.clear()
        if role == "assistant":
            self.assistant("content")["content"] = text
        else:
            self.add(role, text)


_TAKES: dict[str, Callable[[_Turns, Mapping[str, Any], str], None]] = {
    "thinking": _Turns.thinking,
    "redacted_thinking": _Turns.redacted_thinking,
    "tool_use": _Turns.tool_use,
    "tool_result": _Turns.tool_result,
}


def _blocks(content: Any, role: str, where: str, param: str) -> list[tuple[Mapping[str, Any], str]]:
    """The blocks of a content, each with where it is; a string is one of text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise _wrong(f"{where} must be a string or a list of blocks, got {shown(content)}", param)
    found: list[tuple[Mapping[str, Any], str]] = []
    for number, block in enumerate(content):
        at = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str) or kind not in _BLOCKS_OF[role]:
            taken = ", ".join(_BLOCKS_OF[role])
            raise _wrong(f"{at} is of type {shown(kind)}, which this model is not given: {taken} are taken here", param)
        _require_known(block, _FIELDS[kind] | {"type", "cache_control"}, at, param)
        found.append((block, at))
    return found


def _joined(blocks: list[tuple[Mapping[str, Any], str]], param: str) -> str:
    """The text of text blocks, which follow each other in lines."""
    return "\n".join(string_of(block, "text", at, param) for block, at in blocks)


def _require_known(
    given: Mapping[str, Any], known: set[str] | frozenset[str], where: str, param: str = "messages"
) -> None:
    name = next((name for name, value in given.items() if value is not None and name not in known), None)
    if name is not None:
        raise _wrong(f"unknown field {shown(f'{where}.{name}')}: remove it, or check its spelling", param)


def _wrong(message: str, param: str = "messages") -> RequestError:
    return RequestError(message, param=param)


_WITHOUT: Mapping[str, tuple[Any, ...]] = {"defer_loading": (False,), "allowed_callers": (["direct"],)}
"""Fields of a tool that change what the model is told, and values that mean "without it"."""
_HINTS = frozenset({"cache_control", "eager_input_streaming", "strict"})
"""What may be left unread: forced calls follow their schema, ``strict`` or not, and arguments come as they are made."""
_NAMES = {"name": "name", "description": "description", "input_schema": "parameters"}


class ToolChoice(Part):
    """Which of the tools are called. "any" and "tool" are held to by a grammar."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=128)
    disable_parallel_tool_use: bool | None = None

    def chat_fields(self) -> dict[str, Any]:
        """``tool_choice`` and ``parallel_tool_calls``; raises RequestError for a tool without a name."""
        parallel = not self.disable_parallel_tool_use
        if self.type != "tool":
            choice = "required" if self.type == "any" else self.type
            return {"tool_choice": choice, "parallel_tool_calls": parallel}
        if self.name is None:
            raise RequestError('tool_choice of type "tool" needs the name of one', param="tool_choice")
        return {"tool_choice": function_choice(self.name), "parallel_tool_calls": parallel}


def chat_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Functions; raises RequestError for any other tool, since this server runs none itself."""
    return [{"type": "function", "function": _function(tool, f"tools[{number}]")} for number, tool in enumerate(tools)]


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _wrong(f"{where} must be an object, got {type(tool).__name__}", "tools")
    if tool.get("type") not in (None, "custom"):
        raise _wrong(
            f'{where} is of type {shown(tool["type"])}: only tools of type "custom" are known, with a name, a '
            "description and an input_schema, and clients run them",
            "tools",
        )
    for name, value in tool.items():
        if value is None or name == "type" or name in _NAMES or name in _HINTS or value in _WITHOUT.get(name, ()):
            continue
        raise _wrong(f"{where} has the field {shown(name)}, which is not supported: leave it out", "tools")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise _wrong(f"{where}.input_schema must be an object, got {shown(tool.get('input_schema'))}", "tools")
    return {there: tool[here] for here, there in _NAMES.items() if tool.get(here) is not None}


_CHAT_NAMES = {
    "stop": "stop_sequences", "response_format": "output_config", "prompt": "messages",
    "parallel_tool_calls": "tool_choice", "continue_final_message": "messages",
}  # fmt: skip
_THINKS = {"enabled": True, "disabled": False}


class Thinking(Part):
    """``thinking``: "enabled" and "disabled" are the chat template's ``enable_thinking``, other types leave it alone.

    ``display`` "omitted" leaves what is thought out of the answer. ``budget_tokens`` is read, and bounds nothing.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Part):
    """What the text must look like; a schema always holds strictly."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """``output_config``: the effort is the chat template's to honour, as ``reasoning_effort``."""

    effort: str | None = Field(default=None, max_length=64)
    format: OutputFormat | None = None


class AnthropicChat(Body):
    """A conversation: what is counted, and what is answered."""

    ignored, refused, chat_names = _IGNORED, _REFUSED, _CHAT_NAMES

    messages: Annotated[list[Any], Field(fail_fast=True)] = Field(
        min_length=1, description="turns of a user and an assistant; a last one of the assistant is continued"
    )
    system: str | Annotated[list[Any], Field(fail_fast=True)] | None = Field(
        default=None, description="a text, or blocks of text"
    )
    tools: Annotated[list[Any], Field(fail_fast=True)] = Field(
        default_factory=list, description="of type custom: name, description, input_schema"
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def honoured(cls, content: dict[str, Any]) -> dict[str, Any]:
        if content.get("thread") is not None:
            raise ApiError(400, f"thread is not supported: {_REFUSED['thread'][1]}", param="thread", code=NO_THREADS)
        return super().honoured(content)

    def prompt_fields(self) -> dict[str, Any]:
        """The fields of a chat completion that become its prompt; raises RequestError."""
        messages = messages_of(self.system, self.messages)
        if not messages:
            raise RequestError("messages say nothing: give at least one text", param="messages")
        template: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type in _THINKS:
            template["enable_thinking"] = _THINKS[self.thinking.type]
        if self.output_config is not None and self.output_config.effort is not None:
            template["reasoning_effort"] = self.output_config.effort
        fields: dict[str, Any] = {
            "messages": messages,
            "chat_template_kwargs": {**template, **self.chat_template_kwargs},
            "continue_final_message": goes_on(messages),
        }
        if self.tools:
            fields["tools"] = chat_tools(self.tools)
        if self.tool_choice is not None:
            fields |= self.tool_choice.chat_fields()
        return fields


class CountTokensBody(AnthropicChat):
    """POST /v1/messages/count_tokens."""

    _chat: TokenizeChatBody = PrivateAttr()

    @property
    def chat(self) -> TokenizeChatBody:
        return self._chat

    def require_within(self, limits: Limits) -> None:
        """Raises RequestError for whatever /tokenize would be refused for."""
        with renaming(self.chat_names):
            self._chat = TokenizeChatBody.parse({"model": self.model, **self.prompt_fields()}, limits)


class AnthropicBody(CommonFields, AnthropicChat, ChatForm):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    store: bool | None = Field(default=None, description="false: nothing is learned from this request")

    def chat_fields(self) -> dict[str, Any]:
        fields = {**self.same_fields(), **self.prompt_fields(), "stop": self.stop_sequences}
        if self.thinking is not None and self.thinking.display == "omitted":
            fields["include_reasoning"] = False
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "", "schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields
