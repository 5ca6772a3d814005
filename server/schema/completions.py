"""What requests to /v1/completions may contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from server.schema.generate import GenerateBody
from ssd.config import SamplingParams
from ssd.errors import RequestError

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""


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

    @property
    def only_scores(self) -> bool:
        """With ``echo`` an output of 0 tokens asks for the prompt alone, as evaluations do."""
        return self.echo and self.output_limit()[1] == 0

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


def _is_token_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int for entry in entries)
