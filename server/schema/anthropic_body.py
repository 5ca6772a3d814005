"""What requests to /v1/messages may contain, and the chat completion each of them is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from server.base.limits import Limits
from server.schema.anthropic_fields import honoured_anthropic_fields
from server.schema.anthropic_input import goes_on, messages_of
from server.schema.anthropic_tools import ToolChoice, chat_tools
from server.schema.body import Body
from server.schema.chat import ChatBody
from server.schema.generate import StreamOptions
from server.schema.output_fields import Prediction
from server.schema.parts import Part
from server.schema.renaming import renaming
from server.schema.responses import ResponseStreamOptions
from server.schema.sampling_fields import CommonFields
from server.schema.tokenize import TokenizeChatBody
from ssd.errors import RequestError

CHAT_NAMES = {
    "stop": "stop_sequences", "response_format": "output_config", "prompt": "messages",
    "parallel_tool_calls": "tool_choice", "continue_final_message": "messages",
}  # fmt: skip
"""Fields of chat completions, and what they are called here."""
_SAME_NAME = frozenset(
    {
        "model", "max_tokens", "temperature", "top_p", "top_k", "stream", "store", "min_p", "seed", "coupled",
        "ignore_eos", "cache_salt", "priority", "num_speculative_tokens", "prediction",
    }
)  # fmt: skip
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
        """As `Body` says."""
        return honoured_anthropic_fields(content)

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
        """The conversation."""
        return self._chat

    def require_within(self, limits: Limits) -> None:
        """Raises RequestError for whatever /tokenize would be refused for."""
        with renaming(CHAT_NAMES):
            self._chat = TokenizeChatBody.parse({"model": self.model, **self.prompt_fields()}, limits)


class AnthropicBody(CommonFields, AnthropicChat):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    stream: bool = False
    # Those of chat completions
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(default=None, description="false: nothing is learned from this request")
    prediction: Prediction | None = None

    _chat: ChatBody = PrivateAttr()

    @property
    def chat(self) -> ChatBody:
        """The chat completion it is; without ``stream_options``, which say other things there."""
        return self._chat

    @property
    def events(self) -> StreamOptions:
        """How the stream is written."""
        wants = None if self.stream_options is None else self.stream_options.include_obfuscation
        return StreamOptions(include_obfuscation=wants)

    def keep_out_of_cache(self) -> None:
        """As ``store: false``."""
        self.store = False
        self._chat.keep_out_of_cache()

    def require_within(self, limits: Limits) -> None:
        """Raises RequestError for whatever the chat completion would be refused for."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
        given = self.model_dump(mode="json", by_alias=True, include=self.model_fields_set & _SAME_NAME)
        fields = {**given, **self.prompt_fields(), "stop": self.stop_sequences}
        if self.thinking is not None and self.thinking.display == "omitted":
            fields["include_reasoning"] = False
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "", "schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        with renaming(CHAT_NAMES):
            self._chat = ChatBody.parse(fields, limits)
