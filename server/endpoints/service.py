"""From a validated body to running requests: the text's way into the engine."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.admission.account import Account, admit
from server.admission.bodies import BodyReader
from server.admission.gate import may_learn, tenant_of
from server.admission.lanes import Budget, Lanes, Share
from server.admission.registry import CacheUse, Tenants
from server.answers.anthropic import AnthropicBodies, AnthropicEventWriter
from server.answers.bodies import Bodies, CompletionBodies, LogprobsWriter, json_text
from server.answers.chat import ChatBodies
from server.answers.obfuscation import EvenPieces, Pace, finish_at_a_tick, obfuscated_events, padded
from server.answers.responses import ResponseBodies, ResponseEventWriter
from server.answers.stream import DraftWriter, EventWriter, events
from server.base.errors import model_not_found
from server.base.record import current_record
from server.base.settings import ServerSettings
from server.observe.metrics import NamespaceStats, ServerMetrics
from server.running.conversations import AnswerPlan, Chats
from server.running.engine_thread import Worker
from server.running.generation import Generation, Latencies
from server.running.texts import Texts, codec_of
from server.schema.anthropic import AnthropicBody
from server.schema.body import Body
from server.schema.chat import ChatBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.schema.generate import COMPLETION_MAX_TOKENS, CompletionBody, GenerateBody, StreamOptions
from server.schema.responses import ResponsesBody
from ssd.config import SamplingParams
from ssd.errors import RequestError
from ssd.text.grammar_compiler import expected_cost
from ssd.text.stream import TextStream
from ssd.text.token_text import TokenTexts

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.engine import Request as EngineRequest


_PIECE_BYTES = 1 << 18
"""Of a whole answer so much is handed to the connection at once: what it holds beyond that is paid for."""


class _PaidAnswer(Response):
    """A long answer, sent as it is taken: who reads slowly holds a share of what all may."""

    def __init__(self, content: bytes, share: Share) -> None:
        super().__init__(media_type="application/json", headers={"content-length": str(len(content))})
        self._content, self._share = content, share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the share is given back at the end, whatever that is."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, len(self._content), _PIECE_BYTES):
                piece = self._content[at : at + _PIECE_BYTES]
                more = at + _PIECE_BYTES < len(self._content)
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self._share.give_back()


class Answers:
    """Writes them, as evenly and as late as the operator wants."""

    def __init__(self, worker: Worker, settings: ServerSettings, lanes: Lanes) -> None:
        self._worker, self._settings, self._lanes = worker, settings, lanes
        self._unsent = Budget(settings.limits.max_answers_bytes, "long answers")

    def events(self, generation: Generation, bodies: Bodies, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        settings, engine = self._settings, self._worker.loaded_engine
        asked = options.include_obfuscation
        is_declined = asked is False or options.include_drafts  # which tell what obfuscation hides
        if settings.obfuscation == "always" or (settings.obfuscation == "default" and not is_declined):
            options = options.model_copy(update={"include_obfuscation": True})

        def spelling() -> TextStream:
            assert engine is not None and generation.sampling is not None  # every generation was submitted
            return TextStream.following(codec_of(engine), generation.sampling)

        if isinstance(bodies, ResponseBodies):
            writer: EventWriter = ResponseEventWriter(generation, bodies, options)
        elif isinstance(bodies, AnthropicBodies):
            writer = AnthropicEventWriter(generation, bodies, options)
        else:
            writer = EventWriter(generation, bodies, options, DraftWriter(spelling) if options.include_drafts else None)
        if not writer.pad or engine is None:
            return events(generation, bodies, writer, settings.keep_alive_s)
        pieces = EvenPieces([spelling() for _ in generation.choices], settings.obfuscation_tokens)
        return obfuscated_events(generation, writer, pieces, self._pace(), settings.keep_alive_s)

    async def finish(self, generation: Generation) -> None:
        """Wait for the end of a generation whose answer is not streamed."""
        if self._settings.obfuscation == "always":
            await finish_at_a_tick(generation, self._pace(), self._settings.obfuscation_tokens)
        else:
            await generation.finish()

    def _pace(self) -> Pace:
        return Pace(self._settings.obfuscation_interval_s, lambda: self._worker.hurries)

    async def whole(self, generation: Generation, bodies: Bodies) -> bytes:
        """The JSON of an answer that is not streamed."""

        def write() -> bytes:
            content = json_text(bodies.whole(generation))
            return padded(content) if self._settings.obfuscation == "always" else content

        return write() if bodies.is_short(generation) else await self._lanes.answers.run(write)

    def response(self, content: bytes) -> Response:
        """An answer of JSON; raises QueueFull where too many long ones wait to be taken."""
        if len(content) <= _PIECE_BYTES:
            return Response(content, media_type="application/json")
        share = self._unsent.share()
        share.grow(len(content))
        return _PaidAnswer(content, share)


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


B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Service:
    """What the endpoints share: bodies are read, prompts tokenised beside the event loop, generations started."""

    def __init__(
        self, worker: Worker, settings: ServerSettings, tenants: Tenants, sharing_stats: NamespaceStats | None = None
    ) -> None:
        self.worker = worker
        self.settings = settings
        self.tenants = tenants
        self.metrics = ServerMetrics(worker, settings.model_name, sharing_stats, tenants)
        self.lanes = Lanes()
        self.bodies = BodyReader(settings.limits, self.lanes)
        self._texts = Texts(
            self.lanes,
            settings.limits,
            trust_request_chat_template=settings.trust_request_chat_template,
            allow_special_tokens=settings.allow_special_tokens,
        )
        self._chats = Chats(self._texts, self.lanes, settings)
        self.answers = Answers(worker, settings, self.lanes)
        self._starter = Starter(worker, settings, tenants, self._texts, self.lanes, self.metrics.latencies)
        self._token_texts: TokenTexts | None = None

    def close(self) -> None:
        """End the threads."""
        self.lanes.close()

    async def read(self, request: Request, schema: type[B]) -> B:
        """The checked body of a request; raises RequestError, ApiError, QueueFull, or why there is no engine."""
        learns = may_learn(request.headers)
        body = await self._read(request, lambda content: self._parse(schema, content))
        if not learns:
            body.keep_out_of_cache()
        return body

    async def read_tokenize(self, request: Request) -> TokenizeTextBody | TokenizeChatBody:
        """The body of /tokenize, which has one of two forms."""

        def parse(content: Any) -> TokenizeTextBody | TokenizeChatBody:
            is_chat = isinstance(content, dict) and content.get("messages") is not None
            return self._parse(TokenizeChatBody, content) if is_chat else self._parse(TokenizeTextBody, content)

        return await self._read(request, parse)

    def _parse(self, schema: type[B], content: Any) -> B:
        return schema.parse(content, self.settings.limits, ignores_unknown=self.settings.ignore_unknown_fields)

    async def _read(self, request: Request, check: Callable[[Any], T]) -> T:
        context = self.worker.engine.max_model_len  # before anything is read: without an engine nothing can be done
        self.enter(request)
        most = max(self.settings.limits.max_body_values, 2 * context)
        return await self.bodies.read(request, check, max_values=most)

    def enter(self, request: Request) -> None:
        """Count a request that is to be worked on; raises TenantLimit where its key may send no more now."""
        if (tenant := tenant_of(request.scope)) is not None:
            tenant.enter()

    def engine_for(self, body: Body) -> Engine:
        """The engine, once it is known to serve the model a body names; without a name it is the one there is."""
        if body.model is not None and body.model not in self.settings.all_names:
            raise model_not_found(body.model, self.settings.model_name)
        current_record().model = body.model or self.settings.model_name
        return self.worker.engine

    def _engine_for(self, body: GenerateBody, tenant: Account | None, num_prompts: int = 1) -> Engine:
        """The same, for a tenant that has a place for all choices now: nothing was done yet."""
        engine = self.engine_for(body)
        if tenant is not None:
            tenant.require_place(body.n * num_prompts, engine.target.num_slots)
        return engine

    async def start(
        self, body: CompletionBody | ChatBody, tenant: Account | None, asked: Body
    ) -> tuple[Generation, Bodies]:
        """Start every choice of every prompt."""
        if isinstance(body, CompletionBody):
            return await self.completion(body, tenant)
        return await self.chat(body, tenant, asked)

    async def completion(self, body: CompletionBody, tenant: Account | None) -> tuple[Generation, Bodies]:
        """Start every choice of every prompt. ``tenant`` : whose request it is."""
        asked, limit = body.prompts(), COMPLETION_MAX_TOKENS
        engine = self._engine_for(body, tenant, len(asked))
        prompts = await self._texts.prompts(engine, asked, special=body.add_special_tokens)
        echo = await self._texts.echoes(engine, asked) if body.echo else None
        bodies = CompletionBodies(self._named(body), echo=echo, **await self._body_options(engine, body))
        return await self._starter.start(engine, body, prompts, bodies, default_limit=limit, tenant=tenant), bodies

    async def chat(
        self, body: ChatBody, tenant: Account | None, asked: Body | None = None
    ) -> tuple[Generation, Bodies]:
        """Start every choice of a conversation's next message.

        tenant : whose request it is. asked : what the conversation was made of, and is answered as.
        """
        engine = self._engine_for(body, tenant)
        prompt, plan = await self._chats.prepare(engine, body)
        options = {"messages": plan.messages, **await self._body_options(engine, body)}
        settings = self._named(body)
        if isinstance(asked, ResponsesBody):
            bodies: ChatBodies = ResponseBodies(settings, asked, **options)
        elif isinstance(asked, AnthropicBody):
            bodies = AnthropicBodies(settings, **options)
        else:
            bodies = ChatBodies(settings, as_function_call=bool(body.functions), **options)
        generation = await self._starter.start(
            engine, body, [prompt], bodies, default_limit=None, tenant=tenant, plan=plan
        )
        return generation, bodies

    async def tokenize(self, body: TokenizeTextBody | TokenizeChatBody) -> dict[str, Any]:
        """The answer of /tokenize."""
        engine = self.engine_for(body)
        if isinstance(body, TokenizeChatBody):
            tokens, texts = await self._chats.tokenize(engine, body)
        else:
            tokens, texts = await self._texts.tokenize(engine, body)
        return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """The answer of /detokenize."""
        return {"prompt": await self._texts.detokenize(self.engine_for(body), body.tokens)}

    async def _body_options(self, engine: Engine, body: GenerateBody) -> dict[str, Any]:
        """What the answer is to hold beside the text."""
        options: dict[str, Any] = {"return_token_ids": body.return_token_ids}
        wanted = {"logprobs": body.num_logprobs(), "prompt_logprobs": body.prompt_logprobs}
        if names := [name for name, number in wanted.items() if number is not None]:
            if self._token_texts is None:  # reads the whole vocabulary
                self._token_texts = await self.lanes.answers.run(TokenTexts, codec_of(engine))
            writer = LogprobsWriter(self._token_texts, as_token_ids=body.return_tokens_as_token_ids)
            options |= dict.fromkeys(names, writer)
        return options

    def _named(self, body: GenerateBody) -> ServerSettings:
        """Settings for an answer, which names the adapter where a request did."""
        adapter = self.settings.adapter_of(body.model)
        return self.settings if adapter is None else replace(self.settings, model_names=(adapter,))
