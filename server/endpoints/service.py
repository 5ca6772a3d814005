"""The steps from a validated request body to running engine requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from server.admission.auth_middleware import account_of, allows_caching
from server.admission.connections import BodyReader
from server.admission.fair_executor import FairExecutors
from server.admission.quotas import Account, SharedBudget
from server.admission.registry import Tenants
from server.answers.answer import Answer, CompletionAnswer
from server.answers.anthropic import AnthropicAnswer
from server.answers.chat import ChatAnswer
from server.answers.responses import ResponseAnswer
from server.answers.sending import Answers
from server.answers.tokens import LogprobsWriter
from server.base.errors import model_not_found
from server.base.request_record import current_record
from server.base.settings import ServerSettings
from server.observe.metrics import NamespaceStats, ServerMetrics
from server.running.chat_preparation import AnswerPlan, ChatPreparer
from server.running.engine_thread import Worker
from server.running.generation import Generation
from server.running.tokenization import Tokenization, codec_of
from server.schema.anthropic import AnthropicBody
from server.schema.body import Body
from server.schema.chat import ChatBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.schema.generate import COMPLETION_MAX_TOKENS, CompletionBody, GenerateBody
from server.schema.responses import ResponsesBody
from ssd.config import SamplingParams
from ssd.errors import RequestError
from ssd.text.codec import TokenTexts
from ssd.text.grammar_compiler import expected_cost

if TYPE_CHECKING:
    from ssd.engine import Engine

B = TypeVar("B", bound=Body)

_CHATS: dict[type[Body], type[ChatAnswer]] = {ResponsesBody: ResponseAnswer, AnthropicBody: AnthropicAnswer}
"""Maps the request bodies of other APIs to the classes that serialize their responses."""
_FEW_TOKENS = 1 << 14
"""Requests with up to this many tokens over all choices are submitted on the event loop, within milliseconds."""
_MOST_LOGPROBS = 1 << 20
"""The maximum number of log-probabilities in a response, including those of alternative tokens."""
_TOKENS_A_CHOICE = 256
"""The estimated cost of submitting one choice in addition to its prompt, in tokens."""


class Service:
    """Functions that several endpoints use: read request bodies, tokenize on other threads, and start generations."""

    def __init__(
        self, worker: Worker, settings: ServerSettings, tenants: Tenants, sharing_stats: NamespaceStats
    ) -> None:
        self.worker, self.settings, self.tenants = worker, settings, tenants
        self.metrics = ServerMetrics(worker, settings.model_name, sharing_stats, tenants)
        self.lanes = FairExecutors()
        self.answers = Answers(worker, settings, self.lanes)
        self._bodies = BodyReader(settings.limits, self.lanes)
        self._texts = Tokenization(self.lanes, settings)
        self._chats = ChatPreparer(self._texts, self.lanes, settings)
        self._queued = SharedBudget(settings.limits.max_queued_tokens, "prompt tokens")
        self._token_texts: TokenTexts | None = None

    async def read(self, request: Request, parse: Callable[..., B]) -> B:
        """Receive, parse and count a request.

        ``parse`` validates the decoded JSON, e.g. ``CompletionBody.parse``. Raises RequestError, ApiError, QueueFull,
        ServerNotReady or EngineFailed.
        """
        learns = allows_caching(request.headers)
        context = self.worker.engine.max_model_len  # raises before the body is read if there is no engine
        account_of(request.scope).enter()
        limits, ignores_unknown = self.settings.limits, self.settings.ignore_unknown_fields
        check = partial(parse, limits=limits, ignores_unknown=ignores_unknown)
        body = await self._bodies.read(request, check, max_values=max(limits.max_body_values, 2 * context))
        if not learns:
            body.disable_caching()
        return body

    def _engine_for(self, body: Body) -> Engine:
        """Return the engine. Raises ApiError (404) if the request names a model that is not served."""
        if body.model is not None and body.model not in self.settings.all_names:
            raise model_not_found(body.model, self.settings.model_name)
        current_record().model = body.model or self.settings.model_name
        return self.worker.engine

    async def tokenize(self, body: TokenizeTextBody | TokenizeChatBody) -> dict[str, Any]:
        engine = self._engine_for(body)
        if isinstance(body, TokenizeChatBody):
            tokens, texts = await self._chats.tokenize(engine, body)
        else:
            tokens, texts = await self._texts.tokenize(engine, body)
        return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        return {"prompt": await self._texts.detokenize(self._engine_for(body), body.tokens)}

    async def start(self, body: CompletionBody | ChatBody, account: Account, asked: Body) -> Answer:
        """Tokenize a request's prompts, submit one engine request per choice, and return its response serializer.

        ``body`` is the request as a completion or chat completion, ``asked`` the same request in the client's API. If
        an exception is raised, no choice is running.
        """
        engine, texts = self._engine_for(body), body.prompts() if isinstance(body, CompletionBody) else [""]
        account.check_quota(body.n * len(texts), engine.target.num_slots)  # before any other work
        if isinstance(body, CompletionBody):
            prompts = await self._texts.prompts(engine, texts, special=body.add_special_tokens)
            echo = await self._texts.echoes(engine, texts) if body.echo else None
            answer: Answer = CompletionAnswer(self._named(body), echo=echo, **await self._shown(engine, body))
            plan = AnswerPlan(None, body.structured_output())
        else:
            prompt, plan = await self._chats.prepare(engine, body)
            prompts, options = [prompt], await self._shown(engine, body)
            answer = _CHATS.get(type(asked), ChatAnswer)(self._named(body), asked, messages=plan.messages, **options)
        answer.names = asked.chat_names
        answer.generation = await self._submit(engine, body, prompts, answer.id, plan, account)
        return answer

    async def _submit(
        self,
        engine: Engine,
        body: GenerateBody,
        prompts: list[list[int]],
        answer_id: str,
        plan: AnswerPlan,
        account: Account,
    ) -> Generation:
        default_limit = COMPLETION_MAX_TOKENS if isinstance(body, CompletionBody) else None
        if body.stream_options is not None and body.stream_options.include_drafts:
            self._require_draft_details()
        prediction = None if body.prediction is None else await self._texts.prediction(engine, body.prediction.text)
        bad_words = await self._texts.bad_words(engine, body.bad_words) if body.bad_words else ()
        output = plan.output
        if output is not None and engine.grammars is not None and not engine.grammars.knows(output, account.payer):
            lane = self.lanes.grammar(expected_cost(output))
            await lane.run(engine.grammars.compile, output, account.payer)
        num_choices = body.n * len(prompts)
        num_tokens = body.n * sum(len(prompt) + len(prediction or ()) for prompt in prompts)
        self.metrics.latencies.num_choices.observe(body.n)
        record = current_record()
        record.response_id, record.is_stream = answer_id, body.stream
        share = self._queued.share()
        share.grow(num_tokens)
        ticket = account.admit(
            num_choices=num_choices,
            num_prompt_tokens=sum(map(len, prompts)),
            num_slots=engine.target.num_slots,
            share=share,
        )
        generation = Generation(
            self.worker,
            self.metrics.latencies,
            [tuple(prompt) for prompt in prompts],
            prediction,
            plan,
            aside=self.lanes.answers,
            ticket=ticket,
            only_scores=body.only_scores,
        )

        def submit() -> None:
            from ssd.engine import Request as EngineRequest  # by now loaded by the engine's thread

            settings = self.settings
            namespace = settings.namespace_of(body.model)
            cache_use = self.tenants.cache_use(account, namespace, body.cache_salt)

            @cache  # prompts may have many lengths, and the parameters many token ids
            def sampling(room: int) -> SamplingParams:
                found = replace(
                    body.sampling(settings.sampling_defaults, room=room, default_limit=default_limit),
                    bad_words=bad_words,
                    structured_output=output,
                    shown_special_ids=plan.shown_special_ids,
                )
                found = _bounded(found, engine.max_model_len, room, num_choices)
                _ = found.rules  # computed here, so that the engine's thread need not
                return found

            def sampling_after(num_prompt: int) -> SamplingParams:
                room = max(0, engine.max_model_len - num_prompt)
                # More room than the default limit changes nothing.
                found = sampling(room if default_limit is None else min(room, default_limit))
                _require_logprobs(found, engine.max_model_len, room, num_choices)
                return found

            def streams() -> Sequence[int | None]:
                """Return a noise stream for each choice of a prompt (see coupled sampling), so that choices differ."""
                is_shared = body.n > 1 and engine.config.coupled_streams
                return engine.draw_streams(body.n) if is_shared else [None] * body.n

            prefix = f"{answer_id}-{secrets.token_hex(8)}"  # the client may use a request id twice
            generation.submit(
                [
                    EngineRequest(
                        request_id=f"{prefix}-{number}-{choice}",
                        prompt_token_ids=prompt,
                        sampling=sampling_after(len(prompt)),
                        choice_index=choice,
                        noise_stream=stream,
                        namespace=cache_use.namespace,
                        namespace_policy=cache_use.policy,
                        priority=body.priority,
                        cache_salt=body.cache_salt,
                        tenant=account.payer,
                        max_running=account.tenant.quotas.max_running,
                        prefix_scope=namespace if settings.share_prefix_cache else None,
                        num_speculative_tokens=body.num_speculative_tokens,
                        prediction_token_ids=prediction or (),
                        adapter=settings.adapter_of(body.model),
                        learn=body.store is not False,
                        record_steps=settings.spec_decode_metrics != "none",
                    )
                    for number, prompt in enumerate(generation.prompts)
                    for choice, stream in enumerate(streams())
                ]
            )

        num_ruled = len(body.logit_bias) + len(body.allowed_token_ids or ()) + sum(map(len, bad_words))
        try:
            if num_tokens + _TOKENS_A_CHOICE * num_choices + num_ruled <= _FEW_TOKENS:
                submit()
            else:
                await self.lanes.answers.run(submit)
        except BaseException:
            generation.close()
            raise
        ticket.begin()
        return generation

    def _require_draft_details(self) -> None:
        if not self.settings.no_web_ui and self.settings.obfuscation != "always":
            return
        why = "started the server with --no-web-ui"
        if not self.settings.no_web_ui:
            why = "obfuscates all streams (--obfuscation always)"
        message = f"include_drafts is not allowed: the operator {why}"
        raise RequestError(message, param="stream_options.include_drafts")

    async def _shown(self, engine: Engine, body: CompletionBody | ChatBody) -> dict[str, Any]:
        """Return the arguments of `Answer` for token ids and log-probabilities in the response."""
        options: dict[str, Any] = {"return_token_ids": body.return_token_ids}
        wanted = {"logprobs": body.num_logprobs(), "prompt_logprobs": body.prompt_logprobs}
        if names := [name for name, number in wanted.items() if number is not None]:
            if self._token_texts is None:  # reads the whole vocabulary
                self._token_texts = await self.lanes.answers.run(TokenTexts, codec_of(engine))
            as_ids = body.return_tokens_as_token_ids
            # Clients that request ids expect one per token, and evaluations count the tokens after an echo.
            every_token = as_ids or body.return_token_ids or body.echo
            writer = LogprobsWriter(self._token_texts, as_token_ids=as_ids, every_token=every_token)
            options |= dict.fromkeys(names, writer)
        return options

    def _named(self, body: GenerateBody) -> ServerSettings:
        adapter = self.settings.adapter_of(body.model)
        return self.settings if adapter is None else replace(self.settings, model_names=(adapter,))


def _bounded(sampling: SamplingParams, context: int, room: int, num_choices: int) -> SamplingParams:
    """Limit the default of ``max_tokens`` so that the response has at most ``_MOST_LOGPROBS`` log-probabilities."""
    if sampling.max_tokens is not None or sampling.logprobs is None:
        return sampling
    of_prompt = 0 if sampling.prompt_logprobs is None else (context - room) * (1 + sampling.prompt_logprobs)
    most = (_MOST_LOGPROBS // num_choices - of_prompt) // (1 + sampling.logprobs)
    return replace(sampling, max_tokens=most) if 0 < most < room else sampling


def _require_logprobs(sampling: SamplingParams, context: int, room: int, num_choices: int) -> None:
    """Raise RequestError if the response could have more than ``_MOST_LOGPROBS`` log-probabilities."""
    entries = 0
    if sampling.logprobs is not None:
        entries += (sampling.max_tokens or room) * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        entries += (context - room) * (1 + sampling.prompt_logprobs)
    if entries * num_choices > _MOST_LOGPROBS:
        raise RequestError(
            f"the response would have {entries * num_choices} log-probabilities, but the limit is {_MOST_LOGPROBS}: "
            "lower max_tokens, n or logprobs",
            param="logprobs" if sampling.logprobs is not None else "prompt_logprobs",
        )
