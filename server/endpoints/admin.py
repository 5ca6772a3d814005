"""What operators do to tenants, and each tenant to its own cache."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from server.base.errors import ApiError
from server.endpoints.service import Service
from server.intake.gate import tenant_of
from ssd.errors import ConfigError


def add_admin(app: FastAPI, service: Service) -> None:
    """/admin, for operators' keys alone, and ``DELETE /v1/cache``."""
    tenants, lane = service.tenants, service.lanes.management

    def require_operator(request: Request) -> None:
        service.enter(request)
        account = tenant_of(request.scope)
        if account is None or not account.tenant.is_operator:
            raise ApiError(403, "this needs the key of an operator: see --tenants", code="not_an_operator")

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
            raise ApiError(409, f"all stays as it was: {error}", code="not_reloaded") from error

    @app.delete("/v1/cache")
    async def delete_own_cache(request: Request) -> dict[str, Any]:
        account = tenant_of(request.scope)
        if account is None:
            raise ApiError(403, "without API keys there is one cache for all, which nobody may delete here")
        service.enter(request)
        return await lane.run(tenants.delete_cache, account.name)
