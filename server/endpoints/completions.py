"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from server.answers.bodies import Bodies
from server.answers.stream import ClientGone, EventStream, until_disconnect
from server.endpoints.service import Service
from server.intake.gate import tenant_of
from server.running.generation import Generation
from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.generate import GenerateBody, StreamOptions

_CLIENT_CLOSED_REQUEST = 499


def add_completions(app: FastAPI, service: Service) -> None:
    """Both, whole and as streams."""

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await service.read(request, CompletionBody)
        return await generate(request, service, body, service.completion(body, tenant_of(request.scope)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await service.read(request, ChatBody)
        return await generate(request, service, body, service.chat(body, tenant_of(request.scope)))


async def generate(
    request: Request,
    service: Service,
    body: GenerateBody,
    start: Coroutine[Any, Any, tuple[Generation, Bodies]],
    options: StreamOptions | None = None,
) -> Response:
    """Answer with what ``start`` begins. ``options`` : how a stream is written, where not as the body says."""
    generation, bodies = await start
    if body.stream:
        options = options or body.stream_options or StreamOptions()
        return EventStream(generation, service.answers.events(generation, bodies, options))
    try:
        await until_disconnect(request.receive, service.answers.finish(generation))
        return service.answers.response(await service.answers.whole(generation, bodies))
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        generation.close()
