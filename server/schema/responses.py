"""The request body of OpenAI's /v1/responses, and its conversion to a chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, TypeAdapter

from server.base.limits import SMALL_BODY_BYTES, Limits
from server.schema.body import IGNORED, RequestObject, UnsupportedFields, validate_field
from server.schema.chat import FUNCTION, OF_RESULT, OR_TEXT, ChatForm, Conversation, function_choice, joined
from server.schema.generate import SamplingFields, StructuredOutputs
from ssd.config import MAX_LOGPROBS
from ssd.errors import RequestError, quote_value

_IGNORED: Mapping[str, str] = {
    name: reason
    for name, reason in IGNORED.items()
    if name not in ("metadata", "verbosity", "spaces_between_special_tokens")
} | {
    "max_tool_calls": "it limits the calls of tools that a server runs, but here clients run the tools",
    "background_options": "no request runs in the background",
    "access_programs": "they are objects of OpenAI accounts",
    "client_metadata": IGNORED["metadata"],
}
_NOT_STORED = "this server stores no responses. Send the whole conversation as input, with the output of earlier ones"
_NOT_HERE = "the server has no such feature"

_REFUSED: UnsupportedFields = {
    "previous_response_id": ((), _NOT_STORED),
    "conversation": ((), _NOT_STORED),
    "background": ((False,), "background responses would be fetched later, but " + _NOT_STORED),
    "prompt": ((), "the server stores no prompt templates. Send the text as instructions and input"),
    "truncation": (("disabled",), "the input is never shortened. Omit the oldest items"),
    "context_management": (([],), "the input is never shortened. Omit the oldest items"),
    "moderation": ((), _NOT_HERE),
    "image": ((), _NOT_HERE),
}


class _Part(BaseModel):
    """An item of an earlier response that the client sends back. Fields without a meaning for the model are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Text(_Part):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


_Texts = Annotated[list[_Text], Field(fail_fast=True), OR_TEXT]


class _Message(_Part):
    role: str
    content: _Texts


class _Call(_Part):
    name: str
    namespace: str | None = None
    arguments: str
    call_id: str


class _Output(_Part):
    output: Annotated[_Texts, OF_RESULT]
    call_id: str | None = None


class _Reasoning(_Part):
    """A reasoning item, which is ignored unless it contains plain text."""

    content: _Texts | None = None


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    return kind if isinstance(kind, str) else None


_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(_kind),
]
_ITEMS: TypeAdapter[list[_Item]] = TypeAdapter(Annotated[list[_Item], Field(fail_fast=True)])


def messages_of(instructions: str | None, items: str | list[Any]) -> list[dict[str, Any]]:
    """Convert input items to messages of /v1/chat/completions, merging the items of one turn.

    Raises RequestError if the input is empty or an item is invalid.
    """
    conversation = Conversation()
    if instructions is not None:
        conversation.add("system", instructions)
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in validate_field(_ITEMS, items, "input"):
        if isinstance(item, _Message):
            conversation.add_text(item.role, joined(item.content))
        elif isinstance(item, _Call):
            conversation.call(_full_name(item.namespace, item.name), item.arguments, item.call_id)
        elif isinstance(item, _Output):
            call = {} if item.call_id is None else {"tool_call_id": item.call_id}
            conversation.add("tool", joined(item.output), **call)
        elif item.content:
            conversation.assistant("reasoning_content")["reasoning_content"] = joined(item.content)
    if not conversation.messages:
        raise RequestError("input is empty: give a text or at least one item", param="input")
    return conversation.messages


_OF_A_FUNCTION = ("name", "description", "parameters", "strict")
_LEFT_OUT = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
"""Unsupported tools that are removed without an error, because clients offer them by default and work without them."""


def _full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _spread(tools: list[Any]) -> Iterator[tuple[str, str | None, Any]]:
    """Yield the JSON path, namespace and definition of each supported tool in a Responses request."""
    for number, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "namespace":
            name, inner = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not isinstance(inner, list):
                raise RequestError(f"tools[{number}] of type 'namespace' requires a name and tools", param="tools")
            yield from ((f"tools[{number}].tools[{place}]", name, each) for place, each in enumerate(inner))
        elif kind not in _LEFT_OUT:
            yield f"tools[{number}]", None, tool


def chat_tool_choice(choice: Any) -> Any:
    """Convert ``tool_choice`` of the Responses API to that of chat completions.

    Raises RequestError if the choice is invalid or not supported.
    """
    if isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return _named(choice)
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        if not isinstance(allowed, list) or not allowed or not all(isinstance(tool, Mapping) for tool in allowed):
            raise RequestError("tool_choice.tools must be a list of tools", param="tool_choice")
        if choice.get("mode") not in ("auto", "required"):
            given = quote_value(choice.get("mode"))
            raise RequestError(f"tool_choice.mode must be 'auto' or 'required', got {given}", param="tool_choice")
        tools = [_named(tool) for tool in allowed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    said = "use none, auto or required, or name a function or allowed_tools"
    raise RequestError(f"tool_choice of type {quote_value(kind)} is not supported: {said}", param="tool_choice")


def _function(tool: Any, namespace: str | None, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind != "function":
        why = f"{where} is of type {quote_value(kind)}: the server does not run tools, so give functions"
        raise RequestError(why, param="tools")
    said: dict[str, Any] = {name: tool[name] for name in _OF_A_FUNCTION if tool.get(name) is not None}
    validate_field(FUNCTION, said, "tools", where)
    return {**said, "name": _full_name(namespace, said["name"])}


def _named(choice: Mapping[str, Any]) -> dict[str, Any]:
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise RequestError(
            'tool_choice may name only functions: write {"type": "function", "name": ...}', param="tool_choice"
        )
    return function_choice(choice["name"])


_CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "include",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
}


class TextFormat(RequestObject):
    """The format of the output. A JSON schema is always enforced strictly."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextConfig(RequestObject):
    """The format of the output. ``verbosity`` has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, max_length=64)


class ReasoningConfig(RequestObject):
    """Settings of reasoning. The effort is passed to the chat template, and reasoning is never summarized."""

    effort: str | None = Field(default=None, max_length=64)
    summary: str | None = Field(default=None, max_length=64)
    generate_summary: str | None = Field(default=None, max_length=64)
    context: str | None = Field(default=None, max_length=64)
    mode: str | None = Field(default=None, max_length=64)


Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesBody(SamplingFields, ChatForm):
    """The request body of POST /v1/responses, which cannot refer to stored responses."""

    ignored, refused, chat_names = _IGNORED, _REFUSED, _CHAT_NAMES

    input: str | Annotated[list[Any], Field(fail_fast=True)] = Field(
        description="A text, or a list of items: messages, function calls, function call outputs and reasoning."
    )
    instructions: str | None = Field(default=None, description="A system message, which is put before the input.")
    max_output_tokens: int | None = None
    tools: Annotated[list[Any], Field(fail_fast=True)] = Field(
        default_factory=list, description="Functions, optionally in namespaces. Web search tools are dropped."
    )
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = Field(
        default=None, description="Form of the output: text, or JSON that follows a schema."
    )
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Include], Field(max_length=64, fail_fast=True)] = Field(default_factory=list)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    metadata: dict[str, Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=16, description="The response repeats it."
    )
    store: bool = Field(default=True, description="false: this text is not added to the retrieval cache.")
    # The limits of chat completions apply, too
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    structured_outputs: StructuredOutputs | None = None

    _is_small: bool = PrivateAttr()

    @property
    def is_small(self) -> bool:
        """Whether the fields that the response repeats are small, so that the event loop may serialize them."""
        return self._is_small

    @property
    def namespaces(self) -> dict[str, str]:
        """Map the names of functions, as the model sees them, to their tool namespaces in the request."""
        spread = [(namespace, tool.get("name")) for _, namespace, tool in _spread(self.tools) if namespace is not None]
        return {_full_name(namespace, name): namespace for namespace, name in spread}

    def require_within(self, limits: Limits) -> None:
        super().require_within(limits)
        repeated = pydantic_core.to_json([self.instructions, self.tools, self.metadata, self.tool_choice])
        self._is_small = len(repeated) <= SMALL_BODY_BYTES

    def chat_fields(self) -> dict[str, Any]:
        fields = {
            **self.same_fields(),
            "messages": messages_of(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "logprobs": self.top_logprobs > 0 or "message.output_text.logprobs" in self.include,
            "top_logprobs": self.top_logprobs,
        }
        if functions := [_function(tool, namespace, where) for where, namespace, tool in _spread(self.tools)]:
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        if self.tool_choice is not None:
            fields["tool_choice"] = chat_tool_choice(self.tool_choice)
        return {name: value for name, value in fields.items() if value is not None}

    def _response_format(self) -> dict[str, Any] | None:
        asked = None if self.text is None else self.text.format
        if asked is None:
            return None
        if asked.type != "json_schema":
            return {"type": asked.type}
        if asked.schema_ is None:
            raise RequestError('text.format of type "json_schema" requires the field schema', param="text")
        return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}
