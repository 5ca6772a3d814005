"""The endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ssd.errors import SSDError

from .bodies import Bodies
from .engine_thread import Worker, WorkerState
from .errors import RETRY_AFTER_S, ApiError, answer_error, answer_http_exception, model_not_found
from .gate import Gate, tenant_of
from .generation import Generation
from .json_text import json_text
from .metrics import NamespaceStats
from .openapi import describe
from .schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    StreamOptions,
)
from .service import Service
from .settings import VERSION, ServerSettings
from .stream import ClientGone, EventStream, until_disconnect

_CLIENT_CLOSED_REQUEST = 499


def create_app(worker: Worker, settings: ServerSettings, sharing_stats: NamespaceStats | None = None) -> FastAPI:
    """The application over a worker that the caller starts and stops; ``sharing_stats`` is for /metrics.

    Answers /live at once, /health with 200 once the worker takes requests, and everything under /v1 with 503 before.
    """
    service = Service(worker, settings, sharing_stats)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="SSD", version=VERSION, lifespan=lifespan)
    app.add_middleware(Gate, api_keys=settings.api_keys)
    for kind in (SSDError, ApiError):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokenizer(app, service)
    _add_state(app, service)
    describe(app, needs_key=bool(settings.api_keys))
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await service.read(request, CompletionBody)
        return await _generate(request, service, body, service.completion(body, tenant_of(request.scope)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await service.read(request, ChatBody)
        return await _generate(request, service, body, service.chat(body, tenant_of(request.scope)))


async def _generate(
    request: Request, service: Service, body: GenerateBody, start: Coroutine[Any, Any, tuple[Generation, Bodies]]
) -> Response:
    generation, bodies = await start
    if body.stream:
        return EventStream(generation, service.events(generation, bodies, body.stream_options or StreamOptions()))
    try:
        await until_disconnect(request.receive, generation.finish())
        return Response(await service.answer(generation, bodies), media_type="application/json")
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        generation.close()


def _add_models(app: FastAPI, service: Service) -> None:
    settings = service.settings

    def model_body(name: str) -> dict[str, Any]:
        target = service.worker.engine.target
        return {
            "id": name, "object": "model", "created": settings.created, "owned_by": "ssd", "root": settings.model,
            "parent": None, "max_model_len": service.worker.engine.max_model_len, "permission": [],
            "decoding": target.way, "can_speculate": target.can_roll_back,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_body(name) for name in settings.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in settings.model_names:
            raise model_not_found(name, settings.model_name)
        return model_body(name)


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await answer(service.tokenize(await service.read_tokenize(request)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await answer(service.detokenize(await service.read(request, DetokenizeBody)))

    async def answer(work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        content = await service.lanes.answers.run(json_text, await work)
        return Response(content, media_type="application/json")


def _add_state(app: FastAPI, service: Service) -> None:
    worker = service.worker

    @app.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/health")
    async def health() -> Response:
        if worker.state is WorkerState.READY:
            return JSONResponse({"status": "ok"})
        headers = {} if worker.state is WorkerState.FAILED else {"retry-after": str(RETRY_AFTER_S)}
        return JSONResponse({"status": worker.state.value}, 503, headers)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics")
    async def metrics() -> Response:
        content = await service.lanes.answers.run(service.metrics.exposition)
        return Response(content, media_type=CONTENT_TYPE_LATEST)
