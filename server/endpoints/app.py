"""The application: all endpoints behind one gate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from server.base.errors import ApiError, answer_error, answer_http_exception
from server.base.settings import VERSION, ServerSettings
from server.endpoints.admin import add_admin
from server.endpoints.completions import add_completions
from server.endpoints.models import add_models
from server.endpoints.openapi import describe
from server.endpoints.service import Service
from server.endpoints.state import add_state
from server.endpoints.tokenizer import add_tokenizer
from server.intake.gate import Gate
from server.observe.metrics import NamespaceStats
from server.running.engine_thread import Worker
from server.tenants.opening import tenants_of
from server.tenants.registry import Tenants
from ssd.errors import SSDError


def create_app(
    worker: Worker,
    settings: ServerSettings,
    sharing_stats: NamespaceStats | None = None,
    tenants: Tenants | None = None,
) -> FastAPI:
    """The application over a worker that the caller starts and stops; ``sharing_stats`` is for /metrics.

    ``tenants`` : who may come in; None makes each key of the settings a tenant of its own.

    Answers /live at once, /health with 200 once the worker takes requests, and everything under /v1 with 503 before.
    """
    if tenants is None:
        tenants = tenants_of(settings)
    tenants.caches = lambda: None if worker.loaded_engine is None else worker.loaded_engine.caches
    service = Service(worker, settings, tenants, sharing_stats)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="SSD", version=VERSION, lifespan=lifespan)
    app.add_middleware(Gate, tenants=tenants)
    for kind in (SSDError, ApiError):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    add_completions(app, service)
    add_models(app, service)
    add_tokenizer(app, service)
    add_state(app, service)
    add_admin(app, service)
    describe(app, needs_key=tenants.is_closed)
    return app
