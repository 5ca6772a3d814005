"""What generates: completions, chat completions, responses and messages, whole and as streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from server.admission.gate import account_of
from server.answers.sending import ClientGone
from server.base.errors import ApiError
from server.endpoints.service import Service
from server.schema.anthropic import AnthropicBody
from server.schema.body import renaming
from server.schema.chat import ChatBody, ChatForm
from server.schema.generate import CompletionBody, StreamOptions
from server.schema.responses import ResponsesBody

_BODIES: dict[str, tuple[str, type[CompletionBody | ChatBody | ResponsesBody | AnthropicBody]]] = {
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
"""What OpenAI answers from its store, by path and methods."""
_CLIENT_CLOSED_REQUEST = 499


def add_generation(app: FastAPI, service: Service) -> None:
    """All of them; nothing is stored."""
    for path, (name, schema) in _BODIES.items():
        app.add_api_route(path, _generates(service, schema), methods=["POST"], name=name)
    options: dict[str, Any] = {"include_in_schema": False}
    for path, methods in _STORED.items():
        app.add_api_route(path, _nothing_stored, methods=list(methods), **options)


def _generates(
    service: Service, schema: type[CompletionBody | ChatBody | ResponsesBody | AnthropicBody]
) -> Callable[[Request], Awaitable[Response]]:
    async def generate(request: Request) -> Response:
        asked = await service.read(request, schema)
        body = asked.chat if isinstance(asked, ChatForm) else asked
        with renaming(asked.chat_names):
            answer = await service.start(body, account_of(request.scope), asked)
        if body.stream:
            options = asked.events if isinstance(asked, ChatForm) else body.stream_options
            return service.answers.stream(answer, options or StreamOptions())
        try:
            return await service.answers.whole(answer, request.receive)
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            answer.generation.close()

    return generate


async def _nothing_stored(_request: Request) -> Response:
    raise ApiError(
        404,
        "this server stores no responses and no chat completions: send the whole conversation with each request",
        code="not_stored",
    )
