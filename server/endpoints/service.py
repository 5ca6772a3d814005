"""From a validated body to running requests: the text's way into the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from server.answers.anthropic_bodies import AnthropicBodies
from server.answers.bodies import Bodies, CompletionBodies
from server.answers.chat_bodies import ChatBodies
from server.answers.logprobs import LogprobsWriter
from server.answers.response_bodies import ResponseBodies
from server.base.errors import model_not_found
from server.base.record import current_record
from server.base.settings import ServerSettings
from server.endpoints.answers import Answers
from server.endpoints.starter import Starter
from server.intake.body_reader import BodyReader
from server.intake.chats import Chats
from server.intake.gate import tenant_of
from server.intake.learning import may_learn
from server.intake.texts import Texts, codec_of
from server.observe.metrics import NamespaceStats, ServerMetrics
from server.running.engine_thread import Worker
from server.running.generation import Generation
from server.schema.anthropic_body import AnthropicBody
from server.schema.body import Body
from server.schema.chat import ChatBody
from server.schema.completions import COMPLETION_MAX_TOKENS, CompletionBody
from server.schema.generate import GenerateBody
from server.schema.responses import ResponsesBody
from server.schema.tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.tenants.account import Account
from server.tenants.registry import Tenants
from server.tenants.turns import Lanes
from ssd.text.token_text import TokenTexts

if TYPE_CHECKING:
    from ssd.engine import Engine

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

    async def completion(self, body: CompletionBody, tenant: Account | None) -> tuple[Generation, Bodies]:
        """Start every choice of every prompt. ``tenant`` : whose request it is."""
        asked, limit = body.prompts(), COMPLETION_MAX_TOKENS
        engine = self._engine_for(body, tenant, len(asked))
        prompts = await self._texts.prompts(engine, asked, special=body.add_special_tokens)
        echo = await self._texts.echoes(engine, asked) if body.echo else None
        bodies = CompletionBodies(self._named(body), echo=echo, **await self._body_options(engine, body))
        return await self._starter.start(engine, body, prompts, bodies, default_limit=limit, tenant=tenant), bodies

    async def chat(
        self, body: ChatBody, tenant: Account | None, asked: ResponsesBody | AnthropicBody | None = None
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
