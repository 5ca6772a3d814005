"""The routes of the web UI: /, /docs, their files, and /ui/stats."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.admission.auth_middleware import account_of
from server.admission.fair_executor import FairExecutor
from server.admission.quotas import Account
from server.admission.registry import Tenants
from server.base.settings import ServerSettings
from server.running.engine_thread import Worker

_STATIC = Path(__file__).parent / "static"
_DOCS = Path(__file__).parent / "docs"
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'"
)
"""The Content-Security-Policy header: scripts, styles and requests only from this origin, and no inline code."""

SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def ui_files() -> dict[str, Path]:
    files = {f"/ui/{path.name}": path for path in sorted(_STATIC.iterdir())}
    files["/"] = files.pop("/ui/index.html")
    files["/favicon.ico"] = files["/ui/icon.svg"]
    return files


def docs_files() -> dict[str, Path]:
    files = {f"/docs/{path.name}": path for path in sorted(_DOCS.iterdir())}
    files["/docs"] = files.pop("/docs/docs.html")
    files["/docs/icon.svg"] = _STATIC / "icon.svg"
    return files


def ui_stats(worker: Worker, settings: ServerSettings, tenants: Tenants, account: Account) -> dict[str, Any]:
    """Return counters, numbers of running and waiting requests, and cache sizes. Tenants see only their own cache."""
    found: dict[str, Any] = {
        "state": worker.state.value,
        "model": settings.model_name,
        "time_s": time.monotonic(),
        "namespaces": {},
    }
    engine = worker.loaded_engine
    if engine is None:
        return found
    counts = engine.metrics
    waited = counts.histograms.inter_token
    found |= {
        "since_s": max(0.0, time.time() - settings.created),
        "pass_s": waited.total / num_waits if (num_waits := sum(waited.counts)) else None,
        "has_chat": engine.codec is not None and engine.codec.chat_template() is not None,
        "max_model_len": engine.max_model_len,
        "is_drafting": engine.is_drafting,
        "running": counts.num_running,
        "waiting": counts.num_waiting,
        "tokens": counts.generation_tokens,
        "passes": counts.num_verify_steps,
        "drafted": counts.num_draft_tokens,
        "accepted": counts.num_accepted_tokens,
        "sources": {
            source: {"drafted": each.num_draft_tokens, "accepted": each.num_accepted_tokens}
            for source, each in dict(counts.by_source).items()
        },
    }
    if engine.caches is not None:
        labels = tenants.labels()
        own = None
        if tenants.is_closed and not account.tenant.is_operator:
            own = tenants.cache_use(account, settings.namespace, None).namespace
        found["namespaces"] = {
            labels.get(name, name): {
                "recent": cache.num_memtable_tokens,
                "cache": cache.num_tokens - cache.num_memtable_tokens - cache.num_retained_tokens,
                "retained": cache.num_retained_tokens,
                "prebuilt": cache.num_prebuilt_tokens,
            }
            for name, cache in engine.caches.stats().items()
            if own is None or name == own
        }
    return found


def add_files(app: FastAPI, files: Mapping[str, Path]) -> None:
    """Serve static files without an API key. Browsers may cache them, but must ask whether they have changed."""

    def answers(path: Path) -> Callable[[Request], Awaitable[Response]]:
        content, (kind, _) = path.read_bytes(), guess_type(path.name)
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": etag}

        async def answer(request: Request) -> Response:
            if etag in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(content, headers=headers, media_type=kind)

        return answer

    for path, file in files.items():
        app.add_route(path, answers(file), methods=["GET", "HEAD"], include_in_schema=False)


def add_ui(
    app: FastAPI,
    files: Mapping[str, Path],
    worker: Worker,
    settings: ServerSettings,
    tenants: Tenants,
    aside: FairExecutor,
) -> None:
    """Serve the web UI and its counters. The counters need an API key if the server has keys."""
    add_files(app, files)

    @app.get("/ui/stats", include_in_schema=False)
    async def stats(request: Request) -> Response:
        found = await aside.run(ui_stats, worker, settings, tenants, account_of(request.scope))
        return JSONResponse(found, headers={**SECURITY_HEADERS, "cache-control": "no-store"})
