"""The request bodies of /v1/chat/completions and /tokenize: messages and tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, TypeAdapter, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.base.limits import Limits
from server.schema.body import Body, RequestObject, renamed_fields
from server.schema.generate import GenerateBody, Prediction, StreamOptions
from ssd.config import MAX_LOGPROBS
from ssd.errors import RequestError
from ssd.text.messages import convert_to_text_part

ToolMode = Literal["none", "auto", "required"]

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$"
"""Matches function names that every tool call format can write: OpenAI's, and names with dots and slashes."""


class Function(RequestObject):
    """A function that the model may call. If ``strict`` is set, a forced call follows all constraints of its schema."""

    name: str = Field(min_length=1, max_length=128, pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments. Default: any.")
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the function for the chat template, with its fields in the order that models were trained on."""
        said = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {key: value for key, value in said.items() if value is not None}


FUNCTION: TypeAdapter[Function] = TypeAdapter(Function)


class _NestedFunction(RequestObject):
    """A JSON object with an object ``function``. If ``name`` is outside it, the error says where the name belongs."""

    @model_validator(mode="before")
    @classmethod
    def _has_function(cls, content: Any) -> Any:
        if isinstance(content, dict) and "name" in content and content.get("function") is None:
            raise ValueError('function.name is missing: write {"type": "function", "function": {"name": ...}}')
        return content


class Tool(_NestedFunction):
    """A tool that the model may call. Only functions are supported."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, content: Any) -> Any:
        kind = content.get("type") if isinstance(content, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f'only tools of type "function" are supported, got {kind!r:.80}: omit this tool')
        return content


class NamedFunction(RequestObject):
    name: str = Field(max_length=128)


class NamedTool(_NestedFunction):
    """A reference to one of the request's tools."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestObject):
    """A subset of the request's tools, and whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)] = Field(min_length=1)


class AllowedToolChoice(RequestObject):
    """A ``tool_choice`` that allows a subset of the request's tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The functions that the prompt describes, and whether the model must call one of them."""

    functions: tuple[Function, ...]
    mode: ToolMode
    parallel: bool

    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": function.for_template()} for function in self.functions]


def _chosen(functions: tuple[Function, ...], names: Sequence[str], param: str) -> tuple[Function, ...]:
    """Return the functions with the given names, in their original order. Raises RequestError for unknown names."""
    wanted = set(names)
    if unknown := wanted - {function.name for function in functions}:
        raise RequestError(f"{param} names {min(unknown)!r:.140}, which is not a function in tools", param=param)
    return tuple(function for function in functions if function.name in wanted)


class ChatTemplateFields(BaseModel):
    """The request fields from which the chat template makes the prompt."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = Field(
        default=None, description='Default: "auto" if there are tools. A grammar enforces "required" and named tools.'
    )
    parallel_tool_calls: bool = Field(default=True, description="false: the answer contains at most one tool call.")
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents: Annotated[list[dict[str, str]], Field(fail_fast=True)] = Field(
        default_factory=list, description="Texts for chat templates that put documents into the prompt."
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = False

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, given: list[Tool]) -> list[Tool]:
        names = [tool.function.name for tool in given]
        if len(set(names)) != len(names):
            twice = next(name for number, name in enumerate(names) if name in names[:number])
            raise ValueError(f"two functions have the name {twice!r}: rename one of them")
        return given

    def tool_use(self) -> ToolUse | None:
        """Return how the model may use tools; None if the request has none. Raises RequestError if fields conflict."""
        functions = tuple(tool.function for tool in self.tools)
        choice = self.tool_choice
        if not functions:
            if choice not in (None, "none", "auto"):
                raise RequestError("tool_choice requires tools: define the functions in tools", param="tool_choice")
            return None
        parallel = self.parallel_tool_calls
        if isinstance(choice, NamedTool):
            chosen = _chosen(functions, [choice.function.name], "tool_choice")
            return ToolUse(functions=chosen, mode="required", parallel=False)
        if isinstance(choice, AllowedToolChoice):
            allowed = choice.allowed_tools
            chosen = _chosen(functions, [tool.function.name for tool in allowed.tools], "tool_choice")
            return ToolUse(functions=chosen, mode=allowed.mode, parallel=parallel)
        return ToolUse(functions=functions, mode=choice or "auto", parallel=parallel)

    def template_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for ``TextCodec.encode_chat``. Raises RequestError if fields conflict."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: omit one of them",
                param="continue_final_message",
            )
        if self.add_special_tokens:
            raise RequestError(
                "add_special_tokens is not supported with messages, because the chat template adds the special "
                "tokens: omit add_special_tokens",
                param="add_special_tokens",
            )
        use = self.tool_use()
        variables: dict[str, Any] = {} if use is None else {"tools": use.for_template()}
        if self.documents:
            variables["documents"] = self.documents
        return {
            "add_generation_prompt": not self.continue_final_message and self.add_generation_prompt is not False,
            "continue_final_message": self.continue_final_message,
            "template_kwargs": {**self.chat_template_kwargs, **variables},
        }


class ChatBody(ChatTemplateFields, GenerateBody):
    """The request body of POST /v1/chat/completions."""

    include_reasoning: bool = Field(default=True, description="false: the answer does not contain the reasoning.")
    reasoning_effort: str | None = Field(default=None, max_length=64)
    logprobs: bool = False
    top_logprobs: int = Field(
        default=0, ge=0, le=MAX_LOGPROBS, description="Number of alternatives to report per token. Needs ``logprobs``."
    )
    echo: Literal[False] = False

    @property
    def continues_prompt(self) -> bool:
        return self.continue_final_message

    def num_logprobs(self) -> int | None:
        """Return ``top_logprobs``. Raises RequestError if it is set without ``logprobs``."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs to be true: set logprobs", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def template_arguments(self) -> dict[str, Any]:
        arguments = super().template_arguments()
        if self.reasoning_effort is not None:
            arguments["template_kwargs"] = {"reasoning_effort": self.reasoning_effort, **arguments["template_kwargs"]}
        return arguments


class TokenizeTextBody(Body):
    """The request body of POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatTemplateFields, Body):
    """The request body of POST /tokenize with a conversation."""

    return_token_strs: bool = False


def parse_tokenize(content: Any, **options: Any) -> TokenizeTextBody | TokenizeChatBody:
    """Validate the request body of /tokenize, which has either ``prompt`` or ``messages``."""
    is_chat = isinstance(content, dict) and content.get("messages") is not None
    return (TokenizeChatBody if is_chat else TokenizeTextBody).parse(content, **options)


class DetokenizeBody(Body):
    """The request body of POST /detokenize."""

    tokens: Annotated[list[int], Field(fail_fast=True)]


def _to_text_parts(given: Any) -> Any:
    if not isinstance(given, str | list):
        raise PydanticCustomError("text_type", "Input should be a string or a list")
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


OR_TEXT = BeforeValidator(_to_text_parts)
"""A pydantic validator that accepts a single text in place of a list of texts."""


def _convert_text_parts(given: Any) -> Any:
    return [convert_to_text_part(part) for part in given] if isinstance(given, list) else given


OF_RESULT = BeforeValidator(_convert_text_parts)
"""A pydantic validator that converts all parts of a tool result to text parts. A text document becomes its text; an
image becomes a note that it was left out.
"""


def joined(texts: list[Any]) -> str:
    return "\n".join(each.text for each in texts)


AssistantField = Literal["reasoning_content", "content", "tool_calls"]
_ORDER: tuple[AssistantField, ...] = ("reasoning_content", "content", "tool_calls")
"""The order of the parts of an assistant message. A part that would break this order begins another message."""


class Conversation:
    """Builds messages for /v1/chat/completions from the smaller items of the Messages and Responses APIs.

    Consecutive reasoning, text and tool calls of the assistant become one message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._last_rank = -1
        """The index in `_ORDER` of the last part of the last message; -1 if the last message is not the assistant's."""

    def add(self, role: str, content: str, **others: Any) -> None:
        self.messages.append({"role": role, "content": content, **others})
        self._last_rank = -1

    def add_text(self, role: str, text: str) -> None:
        """Add a text to the conversation. An assistant's text is added to the assistant's last message if possible."""
        if role == "assistant":
            self.assistant("content")["content"] = text
        else:
            self.add(role, text)

    def assistant(self, field: AssistantField) -> dict[str, Any]:
        """Return the message for the assistant's part ``field``: the last message or, if needed, a new one."""
        rank = _ORDER.index(field)
        if self._last_rank < 0 or rank < self._last_rank or (rank == self._last_rank and field != "tool_calls"):
            self.add("assistant", "")
        self._last_rank = rank
        return self.messages[-1]

    def call(self, name: str, arguments: str, call_id: str) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self.assistant("tool_calls").setdefault("tool_calls", []).append(call)


class ResponseStreamOptions(RequestObject):
    """Options of a stream in the Responses API: whether padding hides the lengths of its events."""

    include_obfuscation: bool | None = None


class ChatForm(Body):
    """The request body of another API, which is converted to a chat completion."""

    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    prediction: Prediction | None = None

    _chat: ChatBody = PrivateAttr()

    @property
    def chat(self) -> ChatBody:
        """The equivalent chat completion, without ``stream_options``, whose meaning differs between the APIs."""
        return self._chat

    @property
    def events(self) -> StreamOptions:
        wants = None if self.stream_options is None else self.stream_options.include_obfuscation
        return StreamOptions(include_obfuscation=wants)

    def disable_caching(self) -> None:
        self._chat.disable_caching()

    def require_within(self, limits: Limits) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
        with renamed_fields(self.chat_names):
            self._chat = ChatBody.parse(self.chat_fields(), limits)

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat completion. Raises RequestError if there is no equivalent."""
        raise NotImplementedError

    def same_fields(self) -> dict[str, Any]:
        same = self.model_fields_set & ChatBody.model_fields.keys() - _FORMED
        return self.model_dump(mode="json", by_alias=True, include=same)


_FORMED = {"messages", "tools", "tool_choice", "chat_template_kwargs", "stream_options", "top_logprobs"}
"""Names of chat completion fields that are not copied from requests of other APIs, because they mean something else
there or must be converted.
"""


def function_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
