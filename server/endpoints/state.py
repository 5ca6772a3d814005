"""How the service is: /live, /health (/ping is another name of it), /version, /metrics."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from server.base.errors import RETRY_AFTER_S
from server.base.settings import VERSION
from server.endpoints.service import Service
from server.running.engine_thread import WorkerState


def add_state(app: FastAPI, service: Service) -> None:
    """All four; those that are asked whether the service lives answer HEAD as well."""
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
            exactness = engine.target.exactness
            why = {} if exactness.holds else {"reason": str(exactness)}
            drafts = {} if engine.is_drafting else {"drafts": "their kernels are being compiled, once on each machine"}
            return JSONResponse({"status": "ok", "exact": exactness.holds, **why, **drafts})
        headers = {} if worker.state is WorkerState.FAILED else {"retry-after": str(RETRY_AFTER_S)}
        return JSONResponse({"status": worker.state.value}, 503, headers)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/metrics")
    async def metrics() -> Response:
        content = await service.lanes.answers.run(service.metrics.exposition)
        return Response(content, media_type=CONTENT_TYPE_LATEST)
