"""/ and /docs, the files that the pages there are made of, and /page/stats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.base.settings import ServerSettings
from server.intake.gate import tenant_of
from server.page.files import SECURITY_HEADERS, PageFile
from server.page.stats import page_stats
from server.running.engine_thread import Worker
from server.tenants.registry import Tenants
from server.tenants.turns import Lane


def add_files(app: FastAPI, files: Mapping[str, PageFile]) -> None:
    """Files of a page by their paths, open to everybody."""
    for path, file in files.items():
        app.add_route(path, _answers(file), methods=["GET", "HEAD"], include_in_schema=False)


def add_page(
    app: FastAPI,
    files: Mapping[str, PageFile],
    worker: Worker,
    settings: ServerSettings,
    tenants: Tenants,
    aside: Lane,
) -> None:
    """The page at / and its counters, which need a key where there are keys. ``aside`` : where they are read."""
    add_files(app, files)

    @app.get("/page/stats", include_in_schema=False)
    async def stats(request: Request) -> Response:
        found = await aside.run(page_stats, worker, settings, tenants, tenant_of(request.scope))
        return JSONResponse(found, headers={**SECURITY_HEADERS, "cache-control": "no-store"})


def _answers(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, media_type=file.media_type, headers=file.headers)

    return answer
