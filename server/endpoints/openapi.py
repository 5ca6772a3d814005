"""What /openapi.json says beside what the framework knows: bodies, which the endpoints read, errors, keys."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from server.schema.anthropic import AnthropicBody, CountTokensBody
from server.schema.body import Body
from server.schema.chat import ChatBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.schema.generate import CompletionBody
from server.schema.responses import ResponsesBody

_BODIES: dict[str, tuple[type[Body], ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/responses": (ResponsesBody,),
    "/v1/messages": (AnthropicBody,),
    "/v1/messages/count_tokens": (CountTokensBody,),
    "/tokenize": (TokenizeTextBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
}
_ABOUT = {
    "/v1/completions": "A text is continued.",
    "/v1/chat/completions": "A conversation is answered: tools, reasoning, structured output.",
    "/v1/responses": "The newer of OpenAI's interfaces for conversations. Nothing is stored.",
    "/v1/messages": "Anthropic's Messages API.",
    "/v1/messages/count_tokens": "How many tokens the prompt of a message has.",
    "/v1/models": "What is served: the model, and adapters with it as their parent.",
    "/v1/models/{name}": "One of them.",
    "/v1/cache": "All that was learned from the tenant of the key is forgotten.",
    "/tokenize": "The token ids of a text, or of a conversation as the chat template writes it.",
    "/detokenize": "The text of token ids.",
    "/live": "200 while the process answers.",
    "/health": "200 while requests are taken, 503 before and after.",
    "/version": "The version of the server.",
    "/metrics": "Metrics for Prometheus.",
}
_OPEN = frozenset({"/live", "/health", "/version", "/metrics"})
_PLACE = "#/components/schemas/{model}"


class _Said(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: _Said


class _AnthropicSaid(BaseModel):
    type: str
    message: str
    details: dict[str, Any] = {}


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: _AnthropicSaid
    request_id: str | None


def describe(app: FastAPI, *, needs_key: bool) -> None:
    """Have the application answer /openapi.json with the whole description."""

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _complete(found, needs_key)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]


def _complete(description: dict[str, Any], needs_key: bool) -> None:
    schemas: dict[str, Any] = {}
    for kind in (Error, AnthropicError):
        _reference(kind, schemas)
    components: dict[str, Any] = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in description["paths"].items():
        for operation in operations.values():
            if path in _BODIES:
                references = [_reference(kind, schemas) for kind in _BODIES[path]]
                schema = references[0] if len(references) == 1 else {"anyOf": references}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            operation["description"] = _ABOUT[path]
            operation["responses"] = _responses(path)
            if needs_key and path not in _OPEN:
                operation["security"] = [{"key": []}]
    description["components"] = components


def _reference(kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, str]:
    schema = kind.model_json_schema(ref_template=_PLACE)
    schemas |= schema.pop("$defs", {})
    schemas[kind.__name__] = schema
    return {"$ref": _PLACE.format(model=kind.__name__)}


def _responses(path: str) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: dict[str, Any] = {kind: {"schema": {"type": "string"} if path == "/metrics" else {"type": "object"}}}
    if path.endswith(("/completions", "/responses", "/messages")):
        content["text/event-stream"] = {}
    answers = {"200": {"description": "what was asked for", "content": content}}
    if path == "/health":
        return {**answers, "503": {"description": "no requests are taken now", "content": content}}
    model = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    error = {"application/json": {"schema": {"$ref": _PLACE.format(model=model)}}}
    return {**answers, "default": {"description": "why not", "content": error}}
