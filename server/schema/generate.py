"""What requests for text may contain, whichever endpoint they go to."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from server.base.limits import Limits
from server.schema.body import Body
from server.schema.output_fields import OutputFields
from server.schema.parts import Part
from server.schema.sampling_fields import SamplingFields
from ssd.config import SamplingParams
from ssd.errors import RequestError, shown


class StreamOptions(Part):
    """How a stream reports usage, and whether its chunks hide their length."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    include_drafts: bool | None = Field(
        default=None, description="of each pass what was drafted, from what, and how much of it was accepted"
    )


class GenerateBody(SamplingFields, OutputFields, Body):
    """What completions and chat completions have in common."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(default=None, description="wins over the older ``max_tokens``")
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = Field(default=None, description="as ``logprobs``, for the prompt's tokens; vLLM's")
    return_tokens_as_token_ids: bool = False
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    store: bool | None = Field(
        default=None, description="false: drafts still come from the cache, but nothing of this request is added to it"
    )
    skip_special_tokens: bool = Field(default=True, description="false: special tokens are written as text, too")

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

    def keep_out_of_cache(self) -> None:
        """As ``store: false``."""
        self.store = False

    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the output and its value; None where the client set no limit."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def only_scores(self) -> bool:
        """Whether no output is wanted, but what the model says of the prompt."""
        return False

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
        options = self.stream_options or StreamOptions()
        if options.include_drafts and options.include_obfuscation:
            raise RequestError(
                "include_drafts tells what include_obfuscation hides: leave one of them out", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is not possible when stream is true", param="prompt_logprobs")
        name, limit = self.output_limit()
        if self.only_scores:
            limit = 1  # is computed with the prompt, and left out of the answer
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
            prompt_logprobs=self.prompt_logprobs,
        )


def _token_id(text: str) -> int:
    # Ten digits hold every id. Without leading zeros no token has two names.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and (text[0] != "0" or text == "0")):
        raise RequestError(
            f"logit_bias must map token ids, written as usual, to numbers, got the key {shown(text)}",
            param="logit_bias",
        )
    return int(text)
