"""The application: all endpoints behind one gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from server.base.errors import ApiError, answer_error, answer_http_exception
from server.base.settings import VERSION, Cors, ServerSettings
from server.endpoints.admin import add_admin
from server.endpoints.anthropic import add_anthropic
from server.endpoints.completions import add_completions
from server.endpoints.models import add_models
from server.endpoints.openapi import describe
from server.endpoints.responses import add_responses
from server.endpoints.service import Service
from server.endpoints.state import add_state
from server.endpoints.tokenizer import add_tokenizer
from server.intake.admission import Admission
from server.intake.gate import Gate
from server.intake.root_path import RootPath
from server.observe.access import Access, SpanSink
from server.observe.loop_lag import watch_loop
from server.observe.metrics import NamespaceStats
from server.page.files import docs_files, page_files
from server.page.routes import add_files, add_page
from server.running.engine_thread import Worker
from server.schema.anthropic_body import AnthropicBody
from server.schema.chat import ChatBody
from server.schema.completions import CompletionBody
from server.schema.fields import ELSEWHERE, IGNORED, REFUSED
from server.schema.responses import ResponsesBody
from server.tenants.account import RATE_HEADERS
from server.tenants.opening import tenants_of
from server.tenants.registry import Tenants
from ssd.errors import SSDError

_BODIES = (ChatBody, CompletionBody, AnthropicBody, ResponsesBody)
_FIELDS = frozenset[str]().union(*(body.model_fields for body in _BODIES), IGNORED, REFUSED, ELSEWHERE)


def create_app(
    worker: Worker,
    settings: ServerSettings,
    sharing_stats: NamespaceStats | None = None,
    tenants: Tenants | None = None,
    span: SpanSink | None = None,
) -> FastAPI:
    """The application over a worker that the caller starts and stops.

    ``sharing_stats`` : for /metrics. ``tenants`` : who may come in; None makes each key of the settings a tenant of its
    own. ``span`` : takes a span of each generation.

    Answers /live at once, /health with 200 once the worker takes requests, and everything under /v1 with 503 before.
    """
    if tenants is None:
        tenants = tenants_of(settings)
    tenants.caches = lambda: None if worker.loaded_engine is None else worker.loaded_engine.caches
    service = Service(worker, settings, tenants, sharing_stats)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(watch_loop(service.metrics.loop_lag.observe))
        yield
        watch.cancel()
        service.close()

    # Its own pages of the API would have browsers load scripts from another host.
    app = FastAPI(title="SSD", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Admission, worker=worker)
    docs = docs_files()
    files = page_files() if settings.page else {}
    app.add_middleware(Gate, tenants=tenants, open_paths=docs | files)
    _allow_other_sites(app, settings.cors)  # around the gate: pages may read refusals too
    app.add_middleware(  # around all that may refuse
        Access,
        counts=service.metrics.http,
        paths=lambda: [path for route in app.routes if (path := getattr(route, "path", None))],
        fields=_FIELDS,
        writes_lines=settings.logs_requests,
        span=span,
    )
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)
    for kind in (SSDError, ApiError):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    add_completions(app, service)
    add_responses(app, service)
    add_anthropic(app, service)
    add_models(app, service)
    add_tokenizer(app, service)
    add_state(app, service)
    add_files(app, docs)
    if settings.page:
        add_page(app, files, worker, settings, tenants, service.lanes.answers)
    add_admin(app, service)
    describe(app, needs_key=tenants.is_closed)
    return app


def _allow_other_sites(app: FastAPI, cors: Cors) -> None:
    if cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=("x-request-id", "retry-after", *RATE_HEADERS),
        )
