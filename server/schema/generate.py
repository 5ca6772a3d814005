"""The fields of all requests that generate text, and the request body of /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from server.base.limits import Limits
from server.schema.body import Body, RequestObject
from ssd.config import GrammarKind, SamplingParams, StructuredOutput
from ssd.errors import RequestError, quote_value

_MAX_REGEX = 1 << 13
"""The maximum number of characters of a regular expression that constrains the output."""


class CommonFields(BaseModel):
    """The fields that all requests for generated text have, in any API."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    coupled: bool | None = Field(
        default=None,
        description="false: this request does not share noise with other requests under `--coupled-sampling`.",
    )
    ignore_eos: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: int = 0
    num_speculative_tokens: int | None = Field(
        default=None,
        description="Maximum number of draft tokens per step. 0 disables drafts. The output does not change.",
    )


class SamplingFields(CommonFields):
    """Further sampling fields of OpenAI's APIs."""

    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    stop: str | Annotated[list[str], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field(default_factory=list, max_length=128)
    min_tokens: int = Field(default=0, description="Minimum output length; `stop` strings can end the output earlier.")
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] = Field(default_factory=list)
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None


class JsonSchemaFormat(RequestObject):
    """OpenAI's object around a JSON schema. Only the schema is used; the other fields are hints to the model."""

    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(RequestObject):
    """The format of the output: text, any JSON object, or JSON of a schema, which is always enforced strictly."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(RequestObject):
    """vLLM's constraints of the output; exactly one is set. ``grammar`` is Lark, and ``regex`` has Rust's syntax."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=1000, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def to_constraints(self) -> list[StructuredOutput]:
        schema = self.json_ if self.json_ is None or isinstance(self.json_, str) else json.dumps(self.json_)
        sources: tuple[tuple[GrammarKind, str | None], ...] = (
            ("json_schema", schema),
            ("regex", self.regex),
            ("choice", None if self.choice is None else json.dumps(self.choice)),
            ("grammar", self.grammar),
            ("json_object", "" if self.json_object else None),
        )
        return [StructuredOutput(kind, text, "structured_outputs") for kind, text in sources if text is not None]


class TextPart(RequestObject):
    type: Literal["text"]
    text: str


class Prediction(RequestObject):
    """A text that most of the output is expected to equal. Drafts from it make generation faster."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class OutputFields(BaseModel):
    """The fields that constrain the output of completions and chat completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None

    def structured_output(self) -> StructuredOutput | None:
        """Return the constraint of the output. Raises RequestError for several constraints or an empty constraint."""
        form, outputs = self.response_format, self.structured_outputs
        found: list[StructuredOutput] = []
        if form is not None and form.type != "text":
            if form.type == "json_schema" and form.json_schema is None:
                raise RequestError(
                    'response_format of type "json_schema" requires the field json_schema', param="response_format"
                )
            schema = "" if form.json_schema is None else json.dumps(form.json_schema.schema_)
            source = schema if form.type == "json_schema" else ""
            found.append(StructuredOutput(form.type, source, "response_format"))
        if outputs is not None:
            if not (given := outputs.to_constraints()):
                raise RequestError(
                    "structured_outputs requires one of json, regex, choice, grammar, json_object",
                    param="structured_outputs",
                )
            if len(given) > 1:
                raise RequestError(
                    f"structured_outputs accepts one of json, regex, choice, grammar, json_object, got {len(given)} of "
                    "them: keep one",
                    param="structured_outputs",
                )
            found += given
        if len(found) > 1:
            names = " and ".join(output.param for output in found)
            raise RequestError(f"only one structured output is possible, got {names}: keep one", param=found[1].param)
        return found[0] if found else None


class StreamOptions(RequestObject):
    """Options of a stream: whether it reports usage, and whether padding hides the lengths of its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    include_drafts: bool | None = Field(
        default=None, description="Report draft, source and number of accepted tokens of each verification pass."
    )


class GenerateBody(SamplingFields, OutputFields, Body):
    """The common request fields of completions and chat completions."""

    default_max_tokens: ClassVar[int | None] = None
    """The maximum number of output tokens of requests that set none. A smaller default of the model takes precedence.
    """

    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(default=None, description="Takes precedence over ``max_tokens``.")
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = Field(default=None, description="Number of alternatives per prompt token (vLLM).")
    return_tokens_as_token_ids: bool = False
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    store: bool | None = Field(
        default=None, description="false: drafts come from the retrieval cache, but this text is not added to it."
    )
    skip_special_tokens: bool = Field(default=True, description="false: the output text contains special tokens.")

    def require_within(self, limits: Limits) -> None:
        """Raise RequestError if the output has several constraints, or one that is too long to be compiled quickly."""
        output = self.structured_output()
        if output is None:
            return
        most = _MAX_REGEX if output.kind == "regex" else limits.max_grammar_characters
        if len(output.source) > most:
            raise RequestError(
                f"{output.param} has {len(output.source)} characters, but at most {most} are accepted: shorten it",
                param=output.param,
            )

    def disable_caching(self) -> None:
        self.store = False

    def output_limit(self) -> tuple[str, int | None]:
        """Return the name and value of the field that limits the number of output tokens."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def only_scores(self) -> bool:
        """Whether the request wants log-probabilities of the prompt and no output."""
        return False

    @property
    def continues_prompt(self) -> bool:
        """Whether the output continues the text at the end of the prompt, instead of beginning a new message."""
        return True

    def num_logprobs(self) -> int | None:
        """Return how many alternative tokens need log-probabilities; None if no log-probabilities are requested."""
        return None

    def sampling(self, defaults: Mapping[str, float], *, room: int) -> SamplingParams:
        """Return the sampling parameters of each choice.

        ``defaults`` replace missing fields, and ``room`` is the number of tokens that fit into the context after the
        prompt. Raises RequestError if fields contradict each other, or if a limit of output tokens is below 1.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
        options = self.stream_options or StreamOptions()
        if options.include_drafts and options.include_obfuscation:
            raise RequestError(
                "include_drafts reveals what include_obfuscation hides: omit one of them", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs is not possible when stream is true: omit one of them", param="prompt_logprobs"
            )
        name, limit = self.output_limit()
        if self.only_scores:
            limit = 1  # one token is computed with the prompt, but not returned
        if limit is not None and limit < 1:
            raise RequestError(f"{name} must be at least 1, got {quote_value(limit)}", param=name)
        if limit is None:
            wanted = [value for value in (self.default_max_tokens, defaults.get("max_new_tokens")) if value is not None]
            limit = max(1, min(room, int(min(wanted)))) if wanted else None
        if limit is not None and self.min_tokens > limit:
            raise RequestError(
                f"min_tokens {quote_value(self.min_tokens)} exceeds {name} {quote_value(limit)}: lower min_tokens",
                param="min_tokens",
            )
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
            coupled=self.coupled is not False,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            structured_output=self.structured_output(),
            logprobs=self.num_logprobs(),
            skip_special_tokens=self.skip_special_tokens,
            continues_prompt=self.continues_prompt,
            prompt_logprobs=self.prompt_logprobs,
        )


def _token_id(text: str) -> int:
    # Ten digits are enough for any id. Leading zeros are rejected, so that each token has one name.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and (text[0] != "0" or text == "0")):
        raise RequestError(
            f"logit_bias must map decimal token ids to numbers, got the key {quote_value(text)}", param="logit_bias"
        )
    return int(text)


class CompletionBody(GenerateBody):
    """The request body of POST /v1/completions."""

    default_max_tokens = 16  # OpenAI's default

    prompt: str | list[Any] = Field(description="A string, strings, a list of token ids, or lists of token ids.")
    add_special_tokens: bool = True
    logprobs: int | Literal[False] = Field(default=False, description="Number of alternatives to report per token.")
    top_logprobs: Literal[0] = 0
    echo: bool = Field(default=False, description="Put the prompt and its log-probabilities before the output.")

    def num_logprobs(self) -> int | None:
        """Return ``logprobs``; 0 requests the log-probabilities of the sampled tokens only."""
        return None if self.logprobs is False else self.logprobs

    @property
    def only_scores(self) -> bool:
        """Whether the request (``echo`` with ``max_tokens`` 0) wants only log-probabilities of the prompt."""
        return self.echo and self.output_limit()[1] == 0

    def sampling(self, defaults: Mapping[str, float], *, room: int) -> SamplingParams:
        params = super().sampling(defaults, room=room)
        if self.echo and params.logprobs is not None:
            wanted = max(params.logprobs, params.prompt_logprobs or 0)
            params = replace(params, prompt_logprobs=wanted)
        return params

    def prompts(self) -> list[str | list[int]]:
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
            "prompt must be a string, a list of strings, token ids or lists of token ids, and not empty", param="prompt"
        )


def _is_token_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int for entry in entries)
