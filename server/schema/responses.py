"""What requests to /v1/responses may contain, and the chat completion each of them is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import Field, PrivateAttr

from server.base.limits import SMALL_BODY_BYTES, Limits
from server.schema.body import Body
from server.schema.chat import ChatBody
from server.schema.generate import StreamOptions
from server.schema.output_fields import Prediction, StructuredOutputs
from server.schema.parts import Part
from server.schema.renaming import renaming
from server.schema.response_fields import honoured_response_fields
from server.schema.response_input import messages_of
from server.schema.response_tools import chat_tool_choice, chat_tools
from server.schema.sampling_fields import SamplingFields
from ssd.config import MAX_LOGPROBS
from ssd.errors import RequestError

_SAME_NAME = frozenset(
    {
        "model", "temperature", "top_p", "parallel_tool_calls", "stream", "store", "top_k", "min_p",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "coupled", "stop",
        "stop_token_ids", "ignore_eos", "min_tokens", "bad_words", "allowed_token_ids", "cache_salt", "priority",
        "num_speculative_tokens", "chat_template_kwargs", "structured_outputs", "prediction",
    }
)  # fmt: skip
"""Fields that a chat completion has by the same name."""
CHAT_NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text",
    "reasoning_effort": "reasoning", "logprobs": "include", "prompt": "input", "max_tokens": "max_output_tokens",
}  # fmt: skip
"""Those of chat completions, and what they are called here."""


class TextFormat(Part):
    """What the text must look like; a schema always holds strictly."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextConfig(Part):
    """``text``; ``verbosity`` is a hint that is not used here."""

    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, max_length=64)


class ReasoningConfig(Part):
    """``reasoning``: the effort is the chat template's to honour. No summaries are made, reasoning is shown whole."""

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


class ResponseStreamOptions(Part):
    """Whether the events of a stream hide their length."""

    include_obfuscation: bool | None = None


class ResponsesBody(SamplingFields, Body):
    """POST /v1/responses: what does not need a response that was stored before."""

    input: str | Annotated[list[Any], Field(fail_fast=True)] = Field(
        description="a text, or items: messages, function calls and their outputs, reasoning"
    )
    instructions: str | None = Field(default=None, description="a system message before the input")
    max_output_tokens: int | None = None
    tools: Annotated[list[Any], Field(fail_fast=True)] = Field(default_factory=list, description="functions")
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Include], Field(max_length=64, fail_fast=True)] = Field(default_factory=list)
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    metadata: dict[str, Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=16, description="comes back with the response"
    )
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = Field(default=True, description="responses are never stored; false: nor is anything learned from it")
    # Those of chat completions
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None

    _chat: ChatBody = PrivateAttr()
    _is_small: bool = PrivateAttr()

    @property
    def chat(self) -> ChatBody:
        """The chat completion it is; without ``stream_options``, which say other things there."""
        return self._chat

    @property
    def is_small(self) -> bool:
        """Whether what a response repeats of its request is little."""
        return self._is_small

    @property
    def events(self) -> StreamOptions:
        """How the stream is written."""
        wants = None if self.stream_options is None else self.stream_options.include_obfuscation
        return StreamOptions(include_obfuscation=wants)

    @property
    def wants_logprobs(self) -> bool:
        """Asked for in either of OpenAI's two ways."""
        return self.top_logprobs > 0 or "message.output_text.logprobs" in self.include

    def keep_out_of_cache(self) -> None:
        """As ``store: false``."""
        self.store = False
        self._chat.keep_out_of_cache()

    @classmethod
    def honoured(cls, content: dict[str, Any]) -> dict[str, Any]:
        """As `Body` says; more is refused here, since nothing is stored."""
        return honoured_response_fields(content)

    def require_within(self, limits: Limits) -> None:
        """Raises RequestError for whatever the chat completion would be refused for."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
        with renaming(CHAT_NAMES):
            self._chat = ChatBody.parse(self._chat_fields(), limits)
        repeated = pydantic_core.to_json([self.instructions, self.tools, self.metadata, self.tool_choice])
        self._is_small = len(repeated) <= SMALL_BODY_BYTES

    def _chat_fields(self) -> dict[str, Any]:
        given = self.model_dump(mode="json", by_alias=True, include=self.model_fields_set & _SAME_NAME)
        fields = {
            **given,
            "messages": messages_of(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        if self.tools:
            fields["tools"] = chat_tools(self.tools)
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
            raise RequestError('text.format of type "json_schema" needs the field schema', param="text")
        return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}
