"""The steps from a validated request body to running engine requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from server.running.generation_plan import GenerationPlan, build_requests
from server.running.tokenization import Tokenization, codec_of
from server.schema.anthropic import AnthropicBody
from server.schema.body import Body
from server.schema.chat import ChatBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.schema.generate import CompletionBody
from server.schema.responses import ResponsesBody
from ssd.config import StructuredOutput
from ssd.errors import RequestError
from ssd.text.codec import TokenTexts
from ssd.text.grammar_compiler import expected_cost

if TYPE_CHECKING:
    from ssd.engine import Engine

B = TypeVar("B", bound=Body)

_CHATS: dict[type[Body], type[ChatAnswer]] = {ResponsesBody: ResponseAnswer, AnthropicBody: AnthropicAnswer}
"""Maps the request bodies of other APIs to the classes that serialize their responses."""
_FEW_TOKENS = 1 << 14
"""Requests with at most this estimated cost (`GenerationPlan.cost`, in prompt tokens) are submitted on the event loop,
which takes some milliseconds. Others are submitted on a thread pool.
"""


class Service:
    """Functions that several endpoints share: read request bodies, tokenize on other threads, start generations."""

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
        """Count a request against its tenant's quota, then receive and parse its body.

        ``parse`` validates the decoded JSON, e.g. ``CompletionBody.parse``.

        Raises ServerNotReady or EngineFailed if there is no running engine, ApiError if the quota is used up, and the
        errors of `BodyReader.read`, e.g. RequestError for an invalid body.
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
            return await self._chats.tokenize(engine, body)
        return await self._texts.tokenize(engine, body)

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        return {"prompt": await self._texts.detokenize(self._engine_for(body), body.tokens)}

    async def start(self, asked: Body, body: CompletionBody | ChatBody, account: Account) -> Answer:
        """Tokenize the prompts of a request, submit its choices to the engine, and return the response's serializer.

        ``asked`` is the request body as the client sent it. ``body`` is the equivalent completion or chat completion.
        If an exception is raised, no choice is running.
        """
        engine, texts = self._engine_for(body), body.prompts() if isinstance(body, CompletionBody) else [""]
        account.check_quota(body.n * len(texts), engine.target.num_slots)  # before any other work
        answer: Answer
        if isinstance(body, CompletionBody):
            prompts = await self._texts.prompts(engine, texts, special=body.add_special_tokens)
            echo = await self._texts.echoes(engine, texts) if body.echo else None
            answer = CompletionAnswer(self.settings, asked, echo=echo, **await self._token_options(engine, body))
            answer_plan = AnswerPlan(None, body.structured_output())
        else:
            prompt, answer_plan = await self._chats.prepare(engine, body)
            kind, prompts = _CHATS.get(type(asked), ChatAnswer), [prompt]
            answer = kind(
                self.settings, asked, messages=answer_plan.messages, **await self._token_options(engine, body)
            )
        if body.stream_options is not None and body.stream_options.include_drafts:
            _require_draft_details(self.settings)
        plan = GenerationPlan(
            body=body,
            answer_id=answer.id,
            prompts=prompts,
            answer=answer_plan,
            prediction=await self._texts.prediction(engine, body.prediction.text) if body.prediction else None,
            bad_words=await self._texts.bad_words(engine, body.bad_words) if body.bad_words else (),
        )
        await self._compile_grammar(engine, answer_plan.output, account)
        answer.generation = await self._submit(engine, plan, account)
        return answer

    async def _compile_grammar(self, engine: Engine, output: StructuredOutput | None, account: Account) -> None:
        if output is not None and engine.grammars is not None and not engine.grammars.knows(output, account.payer):
            lane = self.lanes.grammar(expected_cost(output))
            await lane.run(engine.grammars.compile, output, account.payer)

    async def _submit(self, engine: Engine, plan: GenerationPlan, account: Account) -> Generation:
        """Reserve budget and quotas for a request and submit its choices. An exception releases everything."""
        self.metrics.latencies.num_choices.observe(plan.body.n)
        reservation = self._queued.reserve(plan.num_queued_tokens)
        generation = Generation(self.worker, self.metrics.latencies, plan, self.lanes.answers, reservation)

        def submit() -> None:
            namespace = self.settings.namespace_of(plan.body.model)
            access = self.tenants.cache_use(account, namespace, plan.body.cache_salt)
            generation.submit(build_requests(plan, engine, self.settings, account, access))

        try:
            reservation.charge(account, plan.num_choices, plan.num_prompt_tokens, engine.target.num_slots)
            if plan.cost <= _FEW_TOKENS:
                submit()
            else:
                await self.lanes.answers.run(submit)
        except BaseException:
            generation.close()
            raise
        return generation

    async def _token_options(self, engine: Engine, body: CompletionBody | ChatBody) -> dict[str, Any]:
        """Return the arguments of `Answer` that put token ids and log-probabilities into the response."""
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


def _require_draft_details(settings: ServerSettings) -> None:
    if settings.no_web_ui or settings.obfuscation == "always":
        why = "started the server with --no-web-ui"
        if not settings.no_web_ui:
            why = "obfuscates all streams (--obfuscation always)"
        message = f"include_drafts is not allowed: the operator {why}"
        raise RequestError(message, param="stream_options.include_drafts")
