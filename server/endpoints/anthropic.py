"""/v1/messages and /v1/messages/count_tokens, for Anthropic's clients."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.answers.bodies import Bodies
from server.endpoints.completions import generate
from server.endpoints.service import Service
from server.intake.gate import tenant_of
from server.running.generation import Generation
from server.schema.anthropic_body import CHAT_NAMES, AnthropicBody, CountTokensBody
from server.schema.renaming import renaming
from server.tenants.account import Account


def add_anthropic(app: FastAPI, service: Service) -> None:
    """Messages, and how many tokens they are."""

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        body = await service.read(request, AnthropicBody)
        return await generate(request, service, body.chat, start(body, tenant_of(request.scope)), body.events)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await service.read(request, CountTokensBody)
        with renaming(CHAT_NAMES):
            counted = await service.tokenize(body.chat)
        return JSONResponse({"input_tokens": counted["count"]})

    async def start(body: AnthropicBody, tenant: Account | None) -> tuple[Generation, Bodies]:
        with renaming(CHAT_NAMES):
            return await service.chat(body.chat, tenant, body)
