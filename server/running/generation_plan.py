"""The plan of a request for generated text, and the engine requests that it is turned into."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

from server.admission.quotas import Account
from server.admission.registry import CacheAccess
from server.base.settings import ServerSettings
from server.running.chat_preparation import AnswerPlan
from server.schema.chat import ChatBody
from server.schema.generate import CompletionBody
from ssd.config import SamplingParams
from ssd.errors import RequestError

if TYPE_CHECKING:
    from ssd.engine import Engine, Request

_MAX_LOGPROBS = 1 << 20
"""The maximum number of log-probabilities in a response, including those of alternative tokens."""
_TOKENS_A_CHOICE = 256
"""The estimated fixed cost of submitting one choice. It equals the cost of submitting this number of prompt tokens."""


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """A validated and tokenized request for generated text.

    Attributes:
        body: The request as a completion or chat completion.
        answer_id: The id of the response.
        prompts: The token ids of each prompt.
        answer: How the output is constrained and parsed.
        prediction: The token ids of the client's prediction. None: the request has no prediction.
        bad_words: The token ids of the texts that the output must not contain.
    """

    body: CompletionBody | ChatBody
    answer_id: str
    prompts: Sequence[tuple[int, ...]]
    answer: AnswerPlan
    prediction: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def num_choices(self) -> int:
        return self.body.n * len(self.prompts)

    @cached_property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_queued_tokens(self) -> int:
        """The number of prompt and prediction tokens of all choices. A prompt with n choices counts n times."""
        return self.body.n * self.num_prompt_tokens + self.num_choices * len(self.prediction or ())

    @property
    def cost(self) -> int:
        """The estimated cost of building and submitting the engine requests, as a number of prompt tokens."""
        num_ruled = len(self.body.logit_bias) + len(self.body.allowed_token_ids or ()) + sum(map(len, self.bad_words))
        return self.num_queued_tokens + _TOKENS_A_CHOICE * self.num_choices + num_ruled


def build_requests(
    plan: GenerationPlan, engine: Engine, settings: ServerSettings, account: Account, access: CacheAccess
) -> list[Request]:
    """Return one engine request per choice of every prompt. Raises RequestError for invalid sampling parameters."""
    from ssd.engine import Request  # by now loaded by the engine's thread

    body, context = plan.body, engine.max_model_len
    prefix = f"{plan.answer_id}-{secrets.token_hex(8)}"  # the client may use a request id twice
    shares_noise = body.n > 1 and bool(engine.config.coupled_streams)
    # Prompts may have many lengths, and the parameters many token ids.
    sampling_within = cache(partial(_sampling_within, plan, settings, context))
    requests: list[Request] = []
    for number, prompt in enumerate(plan.prompts):
        streams = engine.draw_streams(body.n) if shares_noise else [None] * body.n  # so that choices differ
        room = max(0, context - len(prompt))
        sampling = sampling_within(min(room, body.default_max_tokens or room))
        _require_logprobs(sampling, context, room, plan.num_choices)
        requests += [
            Request(
                request_id=f"{prefix}-{number}-{choice}",
                prompt_token_ids=prompt,
                sampling=sampling,
                choice_index=choice,
                noise_stream=stream,
                namespace=access.namespace,
                namespace_policy=access.policy,
                priority=body.priority,
                cache_salt=body.cache_salt,
                tenant=account.payer,
                max_running=account.tenant.quotas.max_running,
                prefix_scope=settings.namespace_of(body.model) if settings.share_prefix_cache else None,
                num_speculative_tokens=body.num_speculative_tokens,
                prediction_token_ids=plan.prediction or (),
                adapter=settings.adapter_of(body.model),
                learn=body.store is not False,
                record_steps=settings.spec_decode_metrics != "none",
            )
            for choice, stream in enumerate(streams)
        ]
    return requests


def _sampling_within(plan: GenerationPlan, settings: ServerSettings, context: int, room: int) -> SamplingParams:
    sampling = replace(
        plan.body.sampling(settings.sampling_defaults, room=room),
        bad_words=plan.bad_words,
        structured_output=plan.answer.output,
        shown_special_ids=plan.answer.shown_special_ids,
    )
    sampling = _bounded(sampling, context, room, plan.num_choices)
    _ = sampling.rules  # computed here, so that the engine's thread need not
    return sampling


def _bounded(sampling: SamplingParams, context: int, room: int, num_choices: int) -> SamplingParams:
    """Lower a default ``max_tokens``, so that the response has at most ``_MAX_LOGPROBS`` log-probabilities."""
    if sampling.max_tokens is not None or sampling.logprobs is None:
        return sampling
    of_prompt = 0 if sampling.prompt_logprobs is None else (context - room) * (1 + sampling.prompt_logprobs)
    most = (_MAX_LOGPROBS // num_choices - of_prompt) // (1 + sampling.logprobs)
    return replace(sampling, max_tokens=most) if 0 < most < room else sampling


def _require_logprobs(sampling: SamplingParams, context: int, room: int, num_choices: int) -> None:
    """Raise RequestError if the response could have more than ``_MAX_LOGPROBS`` log-probabilities."""
    entries = 0
    if sampling.logprobs is not None:
        entries += (sampling.max_tokens or room) * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        entries += (context - room) * (1 + sampling.prompt_logprobs)
    if entries * num_choices > _MAX_LOGPROBS:
        raise RequestError(
            f"the response would have {entries * num_choices} log-probabilities, but the limit is {_MAX_LOGPROBS}: "
            "lower max_tokens, n or logprobs",
            param="logprobs" if sampling.logprobs is not None else "prompt_logprobs",
        )
