"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from server.base.json_text import json_text
from server.endpoints.service import Service
from server.schema.tokenize import DetokenizeBody


def add_tokenizer(app: FastAPI, service: Service) -> None:
    """Both."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await answer(service.tokenize(await service.read_tokenize(request)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await answer(service.detokenize(await service.read(request, DetokenizeBody)))

    async def answer(work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        content = await service.lanes.answers.run(json_text, await work)
        return service.answers.response(content)
