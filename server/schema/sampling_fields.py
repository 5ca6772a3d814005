"""Fields that say how tokens are chosen and drafted: the same in every API that is spoken here."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field


class CommonFields(BaseModel):
    """What a request for text may contain, whatever it goes to."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    coupled: bool | None = Field(
        default=None,
        description="false: drawn with noise of its own where the server couples requests (`--coupled-sampling`)",
    )
    ignore_eos: bool = False
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: int = 0
    num_speculative_tokens: int | None = Field(
        default=None,
        description="most draft tokens per step of this request; 0: plain decoding. The output is the same",
    )


class SamplingFields(CommonFields):
    """The rest of what chooses a token, in OpenAI's APIs."""

    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    stop: str | Annotated[list[str], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field(default_factory=list, max_length=128)
    min_tokens: int = 0
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] = Field(default_factory=list)
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
