"""The FastAPI application with all endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.admission.allowed_sites import KnownSites
from server.admission.auth_middleware import AuthMiddleware, account_of
from server.admission.quotas import RATE_HEADERS
from server.admission.registry import Tenants
from server.answers.sending import ClientDisconnected
from server.answers.wire import json_text
from server.base.errors import (
    RETRY_AFTER_S,
    ApiError,
    answer_error,
    answer_http_exception,
    model_not_found,
    uses_anthropic_api,
)
from server.base.settings import VERSION, ServerSettings
from server.endpoints.openapi import describe
from server.endpoints.service import Service
from server.observe.access import Access, SpanSink
from server.observe.metrics import NamespaceStats
from server.running.engine_thread import Worker, WorkerState
from server.schema.anthropic import AnthropicBody, CountTokensBody
from server.schema.body import ELSEWHERE, IGNORED, REFUSED, renamed_fields
from server.schema.chat import ChatBody, ChatForm, DetokenizeBody, parse_tokenize
from server.schema.generate import CompletionBody, StreamOptions
from server.schema.responses import ResponsesBody
from server.web_ui.routes import add_files, add_ui, docs_files, ui_files
from ssd.errors import ConfigError, SSDError

_GenerationBody = CompletionBody | ChatBody | ResponsesBody | AnthropicBody
_GENERATION: dict[str, tuple[str, type[_GenerationBody]]] = {
    "/v1/completions": ("completions", CompletionBody),
    "/v1/chat/completions": ("chat_completions", ChatBody),
    "/v1/responses": ("responses", ResponsesBody),
    "/v1/messages": ("messages", AnthropicBody),
}
_STORED: dict[str, tuple[str, ...]] = {
    "/v1/responses/{id}": ("GET", "DELETE"),
    "/v1/responses/{id}/cancel": ("POST",),
    "/v1/responses/{id}/input_items": ("GET",),
    "/v1/responses/compact": ("POST",),
    "/v1/chat/completions": ("GET",),
    "/v1/chat/completions/{id}": ("GET", "POST", "DELETE"),
    "/v1/chat/completions/{id}/messages": ("GET",),
}
"""Paths and methods of OpenAI's endpoints for stored responses and chat completions. Here they return error 404."""
_CLIENT_CLOSED_REQUEST = 499


def add_generation(app: FastAPI, service: Service) -> None:
    """Add the endpoints that generate text, and OpenAI's endpoints for stored responses, which answer 404 here."""
    for path, (name, schema) in _GENERATION.items():
        app.add_api_route(path, _generates(service, schema), methods=["POST"], name=name)
    options: dict[str, Any] = {"include_in_schema": False}
    for path, methods in _STORED.items():
        app.add_api_route(path, _nothing_stored, methods=list(methods), **options)


def _generates(service: Service, schema: type[_GenerationBody]) -> Callable[[Request], Awaitable[Response]]:
    async def generate(request: Request) -> Response:
        request_body: _GenerationBody = await service.read(request, schema.parse)
        body = request_body.chat if isinstance(request_body, ChatForm) else request_body
        with renamed_fields(request_body.chat_names):
            answer = await service.start(request_body, body, account_of(request.scope))
        if body.stream:
            options = request_body.events if isinstance(request_body, ChatForm) else body.stream_options
            return service.answers.stream(answer, options or StreamOptions())
        try:
            with renamed_fields(answer.names):
                return await service.answers.whole(answer, request.receive)
        except ClientDisconnected:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            answer.generation.close()

    return generate


async def _nothing_stored(_request: Request) -> Response:
    raise ApiError(
        404,
        "this server does not store responses or chat completions: send the whole conversation with each request",
        code="not_stored",
    )


def add_models(app: FastAPI, service: Service) -> None:
    settings = service.settings

    def model_body(name: str, *, is_anthropic: bool) -> dict[str, Any]:
        engine = service.worker.engine
        target = engine.target
        if is_anthropic:
            created_at = datetime.fromtimestamp(settings.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            most = engine.max_model_len
            return {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": created_at,
                "lifecycle": "active",
                "max_input_tokens": most,
                "max_tokens": most,
            }
        return {
            "id": name,
            "object": "model",
            "created": settings.created,
            "owned_by": "ssd",
            "root": settings.adapters.get(name, settings.model),
            "parent": settings.model_name if name in settings.adapters else None,
            "max_model_len": engine.max_model_len,
            "permission": [],
            "backend": target.backend,
            "can_speculate": target.can_roll_back,
            "speculation": engine.speculation._asdict(),
        }

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        is_anthropic, names = uses_anthropic_api(request.scope), settings.all_names
        data = [model_body(name, is_anthropic=is_anthropic) for name in names]
        if is_anthropic:
            return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": data}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        if not name:
            return await models(request)
        if name not in settings.all_names:
            raise model_not_found(name, settings.model_name)
        return model_body(name, is_anthropic=uses_anthropic_api(request.scope))


def add_tokenizer(app: FastAPI, service: Service) -> None:

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await answer(service.tokenize(await service.read(request, parse_tokenize)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await answer(service.detokenize(await service.read(request, DetokenizeBody.parse)))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await service.read(request, CountTokensBody.parse)
        with renamed_fields(body.chat_names):
            counted = await service.tokenize(body.chat)
        return JSONResponse({"input_tokens": counted["count"]})

    async def answer(work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        content = await service.lanes.answers.run(json_text, await work)
        return service.answers.response(content)


def add_state(app: FastAPI, service: Service) -> None:
    worker = service.worker

    @app.head("/live", include_in_schema=False)
    @app.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.head("/ping", include_in_schema=False)
    @app.get("/ping", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        engine = worker.loaded_engine
        if worker.state is WorkerState.READY and engine is not None:
            invariance = engine.target.batch_invariance
            why = {} if invariance.is_invariant else {"reason": str(invariance)}
            speculation = engine.speculation._asdict()
            return JSONResponse(
                {"status": "ok", "batch_invariant": invariance.is_invariant, **why, "speculation": speculation}
            )
        headers = {} if worker.state is WorkerState.FAILED else {"retry-after": str(RETRY_AFTER_S)}
        return JSONResponse({"status": worker.state.value}, 503, headers)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics")
    async def metrics() -> Response:
        content = await service.lanes.metrics.run(service.metrics.exposition)
        return Response(content, media_type=CONTENT_TYPE_LATEST)


def add_admin(app: FastAPI, service: Service) -> None:
    """Add ``DELETE /v1/cache`` and the endpoints under /admin. Those under /admin need an operator's API key."""
    tenants, lane = service.tenants, service.lanes.management

    def require_operator(request: Request) -> None:
        account_of(request.scope).enter()
        if not account_of(request.scope).tenant.is_operator:
            raise ApiError(403, "this endpoint requires an operator's API key: see --tenants", code="not_an_operator")

    @app.get("/admin/tenants", include_in_schema=False)
    async def list_tenants(request: Request) -> dict[str, Any]:
        require_operator(request)
        return {"object": "list", "data": await lane.run(tenants.describe)}

    @app.delete("/admin/tenants/{name}/cache", include_in_schema=False)
    async def delete_cache(request: Request, name: str) -> dict[str, Any]:
        require_operator(request)
        return await lane.run(tenants.delete_cache, name)

    @app.post("/admin/reload", include_in_schema=False)
    async def reload(request: Request) -> dict[str, Any]:
        require_operator(request)
        try:
            return {"object": "reload", "tenants": await lane.run(tenants.reload)}
        except ConfigError as error:
            raise ApiError(409, f"nothing was changed: {error}", code="not_reloaded") from error

    @app.delete("/v1/cache")
    async def delete_own_cache(request: Request) -> dict[str, Any]:
        account = account_of(request.scope)
        if not tenants.is_closed:
            raise ApiError(
                403,
                "this server has no API keys, so all clients share one cache, and no request can delete it: stop "
                "the server and remove its cache directory",
            )
        account.enter()
        return await lane.run(tenants.delete_cache, account.name)


_FIELDS = frozenset[str]().union(*(body.model_fields for _, body in _GENERATION.values()), IGNORED, REFUSED, ELSEWHERE)


def create_app(
    worker: Worker,
    settings: ServerSettings,
    tenants: Tenants,
    sharing_stats: NamespaceStats,
    span: SpanSink | None = None,
) -> FastAPI:
    """Create the FastAPI application. The caller starts and stops ``worker``, which runs the engine.

    /live is always answered immediately. /health and all paths under /v1 answer 503 until the engine accepts requests.
    ``sharing_stats`` returns the statistics of Redis replication, and ``span`` receives a trace span of each
    generation.
    """
    tenants.caches = lambda: None if worker.loaded_engine is None else worker.loaded_engine.caches
    service = Service(worker, settings, tenants, sharing_stats)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(service.metrics.watch_loop())
        yield
        watch.cancel()
        service.lanes.close()

    # FastAPI's own documentation pages would load scripts from another host.
    app = FastAPI(title="SSD", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.root_path = settings.root_path  # requests may have the prefix or not
    docs = docs_files()
    files = {} if settings.no_web_ui else ui_files()
    sites = KnownSites((*settings.allowed_hosts, settings.host), settings.allowed_origins)
    app.add_middleware(AuthMiddleware, tenants=tenants, sites=sites, open_paths=docs | files, admit=worker.admit)
    if settings.allowed_origins:  # outside of authentication, so that web pages can read rejections, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=("x-request-id", "retry-after", *RATE_HEADERS),
        )
    app.add_middleware(  # outside of all middleware that may reject requests
        Access, counts=service.metrics.http, fields=_FIELDS, writes_lines=not settings.no_access_log, span=span
    )
    for kind in (SSDError, ApiError):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    add_generation(app, service)
    add_models(app, service)
    add_tokenizer(app, service)
    add_state(app, service)
    add_files(app, docs)
    if not settings.no_web_ui:
        add_ui(app, files, worker, settings, tenants, service.lanes.answers)
    add_admin(app, service)
    describe(app, needs_key=tenants.is_closed)
    return app
