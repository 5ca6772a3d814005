"""What requests may contain. Unknown fields are refused; an explicit null means absent, as at OpenAI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ssd.config import MAX_LOGPROBS, SamplingParams
from ssd.errors import RequestError, shown

from .counts import require_counts
from .fields import honoured_fields
from .limits import Limits
from .output_fields import OutputFields
from .parts import UNKNOWN_FIELD, Part

_DEFAULT_LIMITS = Limits()

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""


class Body(BaseModel):
    """A JSON object sent by a client."""

    # Strict: "5" is no number and 1 no boolean, as at OpenAI.
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(default=None, max_length=1024)

    @classmethod
    def parse(cls, content: Any, limits: Limits = _DEFAULT_LIMITS) -> Self:
        """Validate decoded JSON; raises RequestError with the field at fault as ``param``.

        Takes milliseconds for the largest body within ``limits``, whatever is wrong in it: one mistake is looked for.
        """
        if not isinstance(content, dict):
            raise RequestError(f"the body must be a JSON object, got {type(content).__name__}")
        fields = honoured_fields(content)
        unknown = next((name for name in fields if name not in cls.model_fields), None)
        if unknown is not None:  # before anything else, since it explains other mistakes
            raise _unknown_field(unknown)
        require_counts(fields, limits)
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise _request_error(error) from None
        body.require_within(limits)
        return body

    def require_within(self, limits: Limits) -> None:
        """Raises RequestError for what can be measured only now."""


class StreamOptions(Part):
    """How a stream reports usage, and whether its chunks hide their length."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerateBody(OutputFields, Body):
    """What completions and chat completions have in common."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field(default_factory=list, max_length=128)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] = Field(default_factory=list)
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    prompt_logprobs: int | None = Field(default=None, description="as ``logprobs``, for the prompt's tokens; vLLM's")
    return_tokens_as_token_ids: bool = False
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: int = 0
    num_speculative_tokens: int | None = Field(
        default=None,
        description="most draft tokens per step of this request; 0: plain decoding. The output is the same",
    )

    def require_within(self, limits: Limits) -> None:
        """Raises RequestError for a structured output that would take too long to compile, or more than one."""
        output = self.structured_output()
        if output is None:
            return
        most = limits.max_regex_characters if output.kind == "regex" else limits.max_grammar_characters
        if len(output.source) > most:
            raise RequestError(
                f"{output.param} has {len(output.source)} characters, at most {most} are taken: shorten it",
                param=output.param,
            )

    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the output and its value; None where the client set no limit."""
        return "max_tokens", self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many alternatives to report beside each token; None where no log-probabilities are asked for."""
        return None

    def sampling(self, defaults: Mapping[str, float], *, room: int, default_limit: int | None) -> SamplingParams:
        """How to sample each choice.

        defaults : values for what the request leaves out. room : tokens left in the context after the prompt.
        default_limit : output tokens where neither request nor defaults say, never more than ``room``.
        Raises RequestError.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is not possible when stream is true", param="prompt_logprobs")
        name, limit = self.output_limit()
        if limit is not None and limit < 1:
            raise RequestError(f"{name} must be at least 1, got {shown(limit)}", param=name)
        if limit is None:
            wanted = [value for value in (default_limit, defaults.get("max_new_tokens")) if value is not None]
            limit = max(1, min(room, int(min(wanted)))) if wanted else None
        if limit is not None and self.min_tokens > limit:
            raise RequestError(f"min_tokens {shown(self.min_tokens)} exceeds {name} {shown(limit)}", param="min_tokens")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

        def chosen(field: str, neutral: float) -> float:
            value: float | None = getattr(self, field)
            return value if value is not None else defaults.get(field, neutral)

        return SamplingParams(
            max_tokens=limit,
            temperature=chosen("temperature", 1.0),
            top_p=chosen("top_p", 1.0),
            top_k=int(chosen("top_k", 0)),
            min_p=chosen("min_p", 0.0),
            repetition_penalty=chosen("repetition_penalty", 1.0),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((_token_id(token), bias) for token, bias in self.logit_bias.items()),
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            structured_output=self.structured_output(),
            logprobs=self.num_logprobs(),
            prompt_logprobs=self.prompt_logprobs,
        )


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: str | list[Any] = Field(description="string, strings, token ids, or lists of token ids")
    add_special_tokens: bool = True
    logprobs: int | Literal[False] = Field(default=False, description="report this many alternatives beside each token")
    top_logprobs: Literal[0] = 0
    echo: bool = Field(default=False, description="the text begins with the prompt, log-probabilities included")

    def num_logprobs(self) -> int | None:
        """``logprobs``; 0 reports each token alone."""
        return None if self.logprobs is False else self.logprobs

    def sampling(self, defaults: Mapping[str, float], *, room: int, default_limit: int | None) -> SamplingParams:
        """As above; with ``echo`` the prompt's log-probabilities belong to the answer."""
        params = super().sampling(defaults, room=room, default_limit=default_limit)
        if self.echo and params.logprobs is not None:
            wanted = max(params.logprobs, params.prompt_logprobs or 0)
            params = replace(params, prompt_logprobs=wanted)
        return params

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids; raises RequestError when the field is neither."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and all(isinstance(entry, str) for entry in prompt):
            return list(prompt)
        if prompt and _is_token_ids(prompt):
            return [prompt]
        if prompt and all(isinstance(entry, list) and entry and _is_token_ids(entry) for entry in prompt):
            return list(prompt)
        raise RequestError(
            "prompt must be a string, strings, token ids or lists of token ids, and not empty",
            param="prompt",
        )


class ChatTemplateFields(BaseModel):
    """How messages become a prompt."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = Field(default=None, max_length=1 << 16)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = False

    def template_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``TextCodec.encode_chat``; raises RequestError when they contradict each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: leave one out",
                param="continue_final_message",
            )
        if self.add_special_tokens:
            raise RequestError(
                "add_special_tokens is not supported with messages: the chat template adds them",
                param="add_special_tokens",
            )
        return {
            "add_generation_prompt": not self.continue_final_message and self.add_generation_prompt is not False,
            "continue_final_message": self.continue_final_message,
            "chat_template": self.chat_template,
            "template_kwargs": self.chat_template_kwargs,
        }


class ChatBody(ChatTemplateFields, GenerateBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)
    logprobs: bool = False
    top_logprobs: int = Field(
        default=0, ge=0, le=MAX_LOGPROBS, description="alternatives to report beside each token; needs ``logprobs``"
    )
    echo: Literal[False] = False

    def num_logprobs(self) -> int | None:
        """``top_logprobs``; raises RequestError where ``logprobs`` does not ask for them."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None

    def output_limit(self) -> tuple[str, int | None]:
        """``max_completion_tokens`` wins over the older ``max_tokens``."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().output_limit()

    def template_arguments(self) -> dict[str, Any]:
        """As above; ``reasoning_effort`` is the template's to honour, as in vLLM."""
        arguments = super().template_arguments()
        if self.reasoning_effort is not None:
            arguments["template_kwargs"] = {"reasoning_effort": self.reasoning_effort, **self.chat_template_kwargs}
        return arguments


class TokenizeTextBody(Body):
    """POST /tokenize with a prompt."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatTemplateFields, Body):
    """POST /tokenize with messages."""

    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[int], Field(fail_fast=True)]


def _is_token_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int for entry in entries)


def _token_id(text: str) -> int:
    # Ten digits hold every id. Without leading zeros no token has two names.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and (text[0] != "0" or text == "0")):
        raise RequestError(
            f"logit_bias must map token ids, written as usual, to numbers, got the key {shown(text)}",
            param="logit_bias",
        )
    return int(text)


def _unknown_field(name: str) -> RequestError:
    return RequestError(f"unknown field {shown(name)}: remove it, or check its spelling", param=name[:128])


def _request_error(error: ValidationError) -> RequestError:
    """The first complaint of pydantic, in our words; unknown fields first, since they explain the others."""
    complaints = error.errors(include_url=False, include_input=False)
    unknown = [complaint for complaint in complaints if complaint["type"] == UNKNOWN_FIELD]
    first = (unknown or complaints)[0]
    name = ".".join(str(part) for part in first["loc"])
    # A union's branches are part of pydantic's location; the client knows the field only.
    param = str(first["loc"][0]) if first["loc"] else None
    if unknown:
        return _unknown_field(f"{name}.{first['ctx']['name']}")
    if first["type"] == "missing":
        return RequestError(f"the field {name!r} is required", param=param)
    return RequestError(f"{param}: {first['msg']:.500}", param=param)
