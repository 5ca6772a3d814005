"""From a validated body to running requests: the text's way into the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from server.answers.bodies import Bodies, ChatBodies, CompletionBodies
from server.answers.logprobs import LogprobsWriter
from server.answers.obfuscation import EvenPieces, Pace, obfuscated_events
from server.answers.stream import EventWriter, events
from server.base.budget import Budget
from server.base.errors import model_not_found
from server.base.json_text import json_text
from server.base.lanes import Lanes
from server.base.settings import ServerSettings
from server.intake.body_reader import BodyReader
from server.intake.texts import Texts, codec_of
from server.observe.metrics import NamespaceStats, ServerMetrics
from server.running.engine_thread import Worker, WorkerState
from server.running.generation import Generation
from server.schema.body import Body
from server.schema.chat import ChatBody
from server.schema.completions import COMPLETION_MAX_TOKENS, CompletionBody
from server.schema.generate import GenerateBody, StreamOptions
from server.schema.tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from ssd.config import SamplingParams
from ssd.errors import RequestError
from ssd.text.stream import TextStream
from ssd.text.token_text import TokenTexts

if TYPE_CHECKING:
    from ssd.engine import Engine
    from ssd.engine import Request as EngineRequest

B = TypeVar("B", bound=Body)
T = TypeVar("T")

_FEW_TOKENS = 1 << 14
"""Requests of so many tokens over all choices are handed over on the event loop, in a few milliseconds."""
_TOKENS_A_CHOICE = 256
"""What a choice costs beside its prompt."""


class Service:
    """Tokenises on threads beside the event loop, then submits to the worker."""

    def __init__(self, worker: Worker, settings: ServerSettings, sharing_stats: NamespaceStats | None = None) -> None:
        self.worker = worker
        self.settings = settings
        self.metrics = ServerMetrics(worker, settings.model_name, sharing_stats)
        self.lanes = Lanes()
        self.bodies = BodyReader(settings.limits, self.lanes)
        self._texts = Texts(
            self.lanes,
            settings.limits,
            trust_request_chat_template=settings.trust_request_chat_template,
            allow_special_tokens=settings.allow_special_tokens,
        )
        self._queued = Budget(settings.limits.max_queued_tokens, "prompt tokens")
        self._token_texts: TokenTexts | None = None

    def close(self) -> None:
        """End the threads."""
        self.lanes.close()

    async def read(self, request: Request, schema: type[B]) -> B:
        """The checked body of a request; raises RequestError, ApiError, QueueFull, or why there is no engine."""
        return await self._read(request, lambda content: schema.parse(content, self.settings.limits))

    async def read_tokenize(self, request: Request) -> TokenizeTextBody | TokenizeChatBody:
        """The body of /tokenize, which has one of two forms."""

        def parse(content: Any) -> TokenizeTextBody | TokenizeChatBody:
            is_chat = isinstance(content, dict) and content.get("messages") is not None
            schema = TokenizeChatBody if is_chat else TokenizeTextBody
            return schema.parse(content, self.settings.limits)

        return await self._read(request, parse)

    async def _read(self, request: Request, check: Callable[[Any], T]) -> T:
        context = self.worker.engine.max_model_len  # before anything is read: without an engine nothing can be done
        most = max(self.settings.limits.max_body_values, 2 * context)
        return await self.bodies.read(request, check, max_values=most)

    def engine_for(self, body: Body) -> Engine:
        """The engine, once it is known to serve the model a body names; without a name it is the one there is."""
        if body.model is not None and body.model not in self.settings.all_names:
            raise model_not_found(body.model, self.settings.model_name)
        return self.worker.engine

    async def completion(self, body: CompletionBody, tenant: str | None) -> tuple[Generation, Bodies]:
        """Start every choice of every prompt. ``tenant`` : whose request it is."""
        engine = self.engine_for(body)
        asked, limit = body.prompts(), COMPLETION_MAX_TOKENS
        prompts = await self._texts.prompts(engine, asked, special=body.add_special_tokens)
        echo = await self._texts.echoes(engine, asked) if body.echo else None
        bodies = CompletionBodies(self._named(body), echo=echo, **await self._body_options(engine, body))
        return await self._start(engine, body, prompts, bodies, default_limit=limit, tenant=tenant), bodies

    async def chat(self, body: ChatBody, tenant: str | None) -> tuple[Generation, Bodies]:
        """Start every choice of a conversation's next message. ``tenant`` : whose request it is."""
        engine = self.engine_for(body)
        prompt = await self._texts.messages(engine, body)
        bodies = ChatBodies(self._named(body), **await self._body_options(engine, body))
        return await self._start(engine, body, [prompt], bodies, default_limit=None, tenant=tenant), bodies

    def events(self, generation: Generation, bodies: Bodies, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        keep_alive_s = self.settings.keep_alive_s
        writer = EventWriter(generation, bodies, options)
        engine = self.worker.loaded_engine
        if not writer.pad or engine is None:
            return events(generation, bodies, writer, keep_alive_s)
        codec, stop = codec_of(engine), generation.stop
        streams = [TextStream(codec, stop=stop, include_stop=generation.include_stop) for _ in generation.choices]
        pace = Pace(self.settings.obfuscation_interval_s, lambda: self.worker.state is not WorkerState.READY)
        return obfuscated_events(generation, writer, EvenPieces(streams), pace, keep_alive_s)

    async def tokenize(self, body: TokenizeTextBody | TokenizeChatBody) -> dict[str, Any]:
        """The answer of /tokenize."""
        engine = self.engine_for(body)
        tokens, texts = await self._texts.tokenize(engine, body)
        return {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """The answer of /detokenize."""
        return {"prompt": await self._texts.detokenize(self.engine_for(body), body.tokens)}

    async def answer(self, generation: Generation, bodies: Bodies) -> bytes:
        """The JSON of an answer that is not streamed."""

        def write() -> bytes:
            return json_text(bodies.whole(generation))

        return write() if bodies.is_short(generation) else await self.lanes.answers.run(write)

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

    async def _start(
        self,
        engine: Engine,
        body: GenerateBody,
        prompts: list[list[int]],
        bodies: Bodies,
        *,
        default_limit: int | None,
        tenant: str | None,
    ) -> Generation:
        prediction = None if body.prediction is None else await self._texts.prediction(engine, body.prediction.text)
        bad_words = await self._texts.bad_words(engine, body.bad_words) if body.bad_words else ()
        output = body.structured_output()
        if output is not None and engine.grammars is not None:
            await self.lanes.grammars.run(engine.grammars.compile, output)  # and kept there
        num_tokens = body.n * sum(len(prompt) + len(prediction or ()) for prompt in prompts)
        share = self._queued.share()
        share.grow(num_tokens)
        prompt_ids = [tuple(prompt) for prompt in prompts]
        generation = Generation(
            self.worker, self.metrics.latencies, prompt_ids, prediction, aside=self.lanes.answers, share=share
        )

        def submit() -> None:
            sampling = self._sampling_of(engine, body, bad_words, default_limit)
            generation.submit(
                [
                    self._request(
                        body, sampling(len(prompt)), prompt, prediction or (), choice, f"{bodies.id}-{i}", tenant
                    )
                    for i, prompt in enumerate(prompt_ids)
                    for choice in range(body.n)
                ]
            )

        num_ruled = len(body.logit_bias) + len(body.allowed_token_ids or ()) + sum(map(len, bad_words))
        try:
            if num_tokens + _TOKENS_A_CHOICE * body.n * len(prompts) + num_ruled <= _FEW_TOKENS:
                submit()
            else:
                await self.lanes.answers.run(submit)
        except BaseException:
            generation.close()
            raise
        return generation

    def _sampling_of(
        self, engine: Engine, body: GenerateBody, bad_words: tuple[tuple[int, ...], ...], default_limit: int | None
    ) -> Callable[[int], SamplingParams]:
        """How to sample after a prompt of some length; made once for all prompts that leave the same limit.

        What is asked for may have very many token ids, and a request prompts of very many lengths.
        """
        defaults, most = self.settings.sampling_defaults, self.settings.limits.max_logprob_entries
        num_choices = len(body.prompts()) * body.n if isinstance(body, CompletionBody) else body.n

        @cache
        def at(room: int) -> SamplingParams:
            found = replace(body.sampling(defaults, room=room, default_limit=default_limit), bad_words=bad_words)
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
        prefix: str,
        tenant: str | None,
    ) -> EngineRequest:
        from ssd.engine import Request  # by now loaded by the engine's thread

        return Request(
            request_id=f"{prefix}-{choice}",
            prompt_token_ids=prompt,
            sampling=sampling,
            choice_index=choice,
            namespace=self._namespace(body),
            priority=body.priority,
            cache_salt=body.cache_salt,
            tenant=None if self.settings.share_prefix_cache else tenant,
            num_speculative_tokens=body.num_speculative_tokens,
            prediction_token_ids=prediction,
            adapter=self.settings.adapter_of(body.model),
        )

    def _named(self, body: GenerateBody) -> ServerSettings:
        """Settings for an answer, which names the adapter where a request did."""
        adapter = self.settings.adapter_of(body.model)
        return self.settings if adapter is None else replace(self.settings, model_names=(adapter,))

    def _namespace(self, body: GenerateBody) -> str | None:
        """Which cache a request uses. A salted one asks to share nothing, so it neither reads nor feeds one.

        Keys and values it shares with requests of its own salt.
        """
        return None if body.cache_salt is not None else self.settings.namespace_of(body.model)


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
