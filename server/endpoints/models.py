"""/v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.base.errors import model_not_found
from server.endpoints.service import Service


def add_models(app: FastAPI, service: Service) -> None:
    """The list, and each by its name."""
    settings = service.settings

    def model_body(name: str) -> dict[str, Any]:
        target = service.worker.engine.target
        return {
            "id": name, "object": "model", "created": settings.created, "owned_by": "ssd",
            "root": settings.adapters.get(name, settings.model),
            "parent": settings.model_name if name in settings.adapters else None,
            "max_model_len": service.worker.engine.max_model_len, "permission": [],
            "decoding": target.way, "can_speculate": target.can_roll_back,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_body(name) for name in settings.all_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in settings.all_names:
            raise model_not_found(name, settings.model_name)
        return model_body(name)
