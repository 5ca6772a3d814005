"""/v1/responses, and what stored responses and chat completions would be asked for."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from server.answers.bodies import Bodies
from server.base.errors import ApiError
from server.endpoints.completions import generate
from server.endpoints.service import Service
from server.intake.gate import tenant_of
from server.running.generation import Generation
from server.schema.renaming import renaming
from server.schema.responses import CHAT_NAMES, ResponsesBody
from server.tenants.account import Account

_STORED: dict[str, tuple[str, ...]] = {
    "/v1/responses/{id}": ("GET", "DELETE"),
    "/v1/responses/{id}/cancel": ("POST",),
    "/v1/responses/{id}/input_items": ("GET",),
    "/v1/responses/compact": ("POST",),
    "/v1/chat/completions": ("GET",),
    "/v1/chat/completions/{id}": ("GET", "POST", "DELETE"),
    "/v1/chat/completions/{id}/messages": ("GET",),
}
"""What OpenAI answers from its store, by path and methods."""


def add_responses(app: FastAPI, service: Service) -> None:
    """Responses are made, and not kept."""

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await service.read(request, ResponsesBody)
        return await generate(request, service, body.chat, start(body, tenant_of(request.scope)), body.events)

    async def start(body: ResponsesBody, tenant: Account | None) -> tuple[Generation, Bodies]:
        with renaming(CHAT_NAMES):
            return await service.chat(body.chat, tenant, body)

    async def nothing_stored(_request: Request) -> Response:
        raise ApiError(
            404,
            "this server stores no responses and no chat completions: send the whole conversation with each request",
            code="not_stored",
        )

    options: dict[str, Any] = {"include_in_schema": False}
    for path, methods in _STORED.items():
        app.add_api_route(path, nothing_stored, methods=list(methods), **options)
