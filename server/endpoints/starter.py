"""From a checked body and its prompts to running requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from server.answers.bodies import Bodies
from server.base.record import current_record
from server.base.settings import ServerSettings
from server.intake.conversations import AnswerPlan
from server.intake.texts import Texts
from server.running.engine_thread import Worker
from server.running.generation import Generation
from server.running.latencies import Latencies
from server.schema.completions import CompletionBody
from server.schema.generate import GenerateBody
from server.tenants.account import Account, admit
from server.tenants.registry import CacheUse, Tenants
from server.tenants.turns import Budget, Lanes
from ssd.config import SamplingParams
from ssd.errors import RequestError
from ssd.text.grammar_compiler import expected_cost

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.engine import Request as EngineRequest

_FEW_TOKENS = 1 << 14
"""Requests of so many tokens over all choices are handed over on the event loop, in a few milliseconds."""
_TOKENS_A_CHOICE = 256
"""What a choice costs beside its prompt."""


class Starter:
    """Hands requests to the worker, within what the service and each tenant may have at once."""

    def __init__(
        self,
        worker: Worker,
        settings: ServerSettings,
        tenants: Tenants,
        texts: Texts,
        lanes: Lanes,
        latencies: Latencies,
    ) -> None:
        self._worker, self._settings, self._tenants = worker, settings, tenants
        self._texts, self._lanes, self._latencies = texts, lanes, latencies
        self._queued = Budget(settings.limits.max_queued_tokens, "prompt tokens")

    async def start(
        self,
        engine: Engine,
        body: GenerateBody,
        prompts: list[list[int]],
        bodies: Bodies,
        *,
        default_limit: int | None,
        tenant: Account | None,
        plan: AnswerPlan | None = None,
    ) -> Generation:
        """Start every choice of every prompt. ``default_limit`` : output tokens where the body does not say.

        Raises RequestError, QueueFull or TenantLimit; then nothing runs and nothing is taken.
        """
        if body.stream_options is not None and body.stream_options.include_drafts:
            self._require_draft_details()
        prediction = None if body.prediction is None else await self._texts.prediction(engine, body.prediction.text)
        bad_words = await self._texts.bad_words(engine, body.bad_words) if body.bad_words else ()
        plan = plan or AnswerPlan(None, body.structured_output())
        output = plan.output
        if output is not None and engine.grammars is not None:
            name = None if tenant is None else tenant.name
            if not engine.grammars.knows(output, name):
                await self._lanes.grammar(expected_cost(output)).run(engine.grammars.compile, output, name)
        num_tokens = body.n * sum(len(prompt) + len(prediction or ()) for prompt in prompts)
        self._latencies.num_choices.observe(body.n)
        record = current_record()
        record.response_id, record.is_stream = bodies.id, body.stream
        ticket = admit(
            tenant,
            self._queued.share(),
            num_tokens=num_tokens,
            num_choices=body.n * len(prompts),
            num_prompt_tokens=sum(map(len, prompts)),
            num_slots=engine.target.num_slots,
        )
        prompt_ids = [tuple(prompt) for prompt in prompts]
        generation = Generation(
            self._worker,
            self._latencies,
            prompt_ids,
            prediction,
            aside=self._lanes.answers,
            ticket=ticket,
            only_scores=body.only_scores,
        )
        generation.messages, generation.count_reasoning = plan.messages, plan.count_reasoning

        prefix = f"{bodies.id}-{secrets.token_hex(8)}"  # other requests may have been given the same id

        def submit() -> None:
            ruled = {
                "bad_words": bad_words,
                "structured_output": output,
                "shown_special_ids": plan.shown_special_ids,
            }
            sampling = self._sampling_of(engine, body, ruled, default_limit)
            cache_use = self._tenants.cache_use(tenant, self._settings.namespace_of(body.model), body.cache_salt)
            generation.submit(
                [
                    self._request(
                        body,
                        sampling(len(prompt)),
                        prompt,
                        prediction or (),
                        choice,
                        stream,
                        f"{prefix}-{i}",
                        tenant,
                        cache_use,
                    )
                    for i, prompt in enumerate(prompt_ids)
                    for choice, stream in enumerate(_streams(engine, body.n))
                ]
            )

        num_ruled = len(body.logit_bias) + len(body.allowed_token_ids or ()) + sum(map(len, bad_words))
        try:
            if num_tokens + _TOKENS_A_CHOICE * body.n * len(prompts) + num_ruled <= _FEW_TOKENS:
                submit()
            else:
                await self._lanes.answers.run(submit)
        except BaseException:
            generation.take_back()
            raise
        return generation

    def _require_draft_details(self) -> None:
        if not (self._settings.page or self._settings.allow_draft_details):
            raise RequestError(
                "include_drafts is not allowed here: the operator started the server with --no-page; "
                "--allow-draft-details allows it without the page",
                param="stream_options.include_drafts",
            )
        if self._settings.obfuscation == "always":
            raise RequestError(
                "include_drafts is not allowed here: the operator obfuscates all streams (--obfuscation always)",
                param="stream_options.include_drafts",
            )

    def _sampling_of(
        self, engine: Engine, body: GenerateBody, ruled: dict[str, Any], default_limit: int | None
    ) -> Callable[[int], SamplingParams]:
        """How to sample after a prompt of some length; made once for all prompts that leave the same limit.

        ``ruled`` : fields that the body alone does not give. What is asked for may have very many token ids, and a
        request prompts of very many lengths.
        """
        defaults, most = self._settings.sampling_defaults, self._settings.limits.max_logprob_entries
        num_choices = len(body.prompts()) * body.n if isinstance(body, CompletionBody) else body.n

        @cache
        def at(room: int) -> SamplingParams:
            found = replace(body.sampling(defaults, room=room, default_limit=default_limit), **ruled)
            _ = found.rules  # made here and not where others' tokens are computed
            return found

        def after(num_prompt: int) -> SamplingParams:
            room = max(0, engine.max_model_len - num_prompt)
            # More room than the default limit changes nothing.
            found = at(room if default_limit is None else min(room, default_limit))
            _require_logprobs(found, engine.max_model_len, room, num_choices, most)
            return found

        return after

    def _request(
        self,
        body: GenerateBody,
        sampling: SamplingParams,
        prompt: tuple[int, ...],
        prediction: tuple[int, ...],
        choice: int,
        stream: int | None,
        prefix: str,
        tenant: Account | None,
        cache_use: CacheUse,
    ) -> EngineRequest:
        from ssd.engine import Request  # by now loaded by the engine's thread

        shares_prefixes = self._settings.share_prefix_cache
        return Request(
            request_id=f"{prefix}-{choice}",
            prompt_token_ids=prompt,
            sampling=sampling,
            choice_index=choice,
            noise_stream=stream,
            namespace=cache_use.namespace,
            namespace_terms=cache_use.terms,
            priority=body.priority,
            cache_salt=body.cache_salt,
            tenant=None if tenant is None else tenant.name,
            max_running=None if tenant is None else tenant.tenant.quotas.max_running,
            prefix_scope=self._settings.namespace_of(body.model) if shares_prefixes else None,
            num_speculative_tokens=body.num_speculative_tokens,
            prediction_token_ids=prediction,
            adapter=self._settings.adapter_of(body.model),
            learn=body.store is not False,
            keeps_steps=self._settings.spec_decode_metrics != "none",
        )


def _streams(engine: Engine, num_choices: int) -> Sequence[int | None]:
    """The stream of noise of each choice of a prompt: none twice, so that choices differ as without coupling."""
    if num_choices == 1 or not engine.config.coupled_streams:
        return [None] * num_choices
    return engine.draw_streams(num_choices)


def _require_logprobs(sampling: SamplingParams, context: int, room: int, num_choices: int, most: int) -> None:
    """Refuse more log-probabilities than an answer may hold."""
    entries = 0
    if sampling.logprobs is not None:
        entries += (sampling.max_tokens or room) * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        entries += (context - room) * (1 + sampling.prompt_logprobs)
    if entries * num_choices > most:
        raise RequestError(
            f"the answer would hold {entries * num_choices} log-probabilities, at most {most} are made: lower "
            "max_tokens, n or logprobs",
            param="logprobs" if sampling.logprobs is not None else "prompt_logprobs",
        )
