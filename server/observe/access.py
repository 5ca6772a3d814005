"""Report each finished HTTP request: a line in the access log, counters, and a trace span if configured."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.admission.auth_middleware import path_below_root
from server.admission.connections import TOO_MANY
from server.base.request_record import RequestRecord, create_record, seconds_between, trace_headers
from server.observe.logs import Fields

log = logging.getLogger(__name__)

PROBES = frozenset({"/live", "/health", "/ping", "/metrics", "/ui/stats"})
"""URL paths that health checks, Prometheus and the web UI request every few seconds. They are logged at level DEBUG."""

_PROBED = frozenset({200, 503})
"""The status codes that health checks normally get: 200 if the server is ready, 503 if it is not."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_CLIENT_LEFT = 499
_ELSEWHERE = re.compile(
    r"/(?:v1/|api/)?(?:audio|batches|chat|classify|embed|embeddings|files|fine_tuning|generate|images|infill|invocations|"
    r"load|moderations|pooling|props|rerank|score|slots|tags|threads)(?=/|$)"
)
"""Matches the beginnings of URL paths that other inference servers have. Only such a beginning of an unknown path is
logged, because the rest may contain private text.
"""


class HttpCounts:
    """Counters of HTTP requests for /metrics, written on the event loop and read by any thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """The number of requests by path, method and status class, e.g. "2xx". A request whose client disconnected
        before the response counts as "4xx".
        """
        self.refused: Counter[str] = Counter()
        """The number of rejected requests by reason (see `rejection_reason`). Internal errors (500) are not counted."""
        self.num_under_way = 0


SpanSink = Callable[[RequestRecord, str, float], tuple[str, str]]
"""A function that records the trace span of a finished request.

Its arguments are the request's record, the URL path and the end time (``time.perf_counter``). It returns the
hexadecimal ids of the trace and of the span.
"""


@dataclass(slots=True, kw_only=True)
class Access:
    """The outermost ASGI middleware: creates a record for each HTTP request, and logs the request at its end."""

    app: ASGIApp = field(kw_only=False)
    counts: HttpCounts
    fields: Container[str] = ()
    writes_lines: bool
    span: SpanSink | None
    _paths: frozenset[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = create_record()
        record.trace = trace_headers(scope["headers"])

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if TOO_MANY in scope.get("state", ()):
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        self.counts.num_under_way += 1
        try:
            await self.app(scope, receive, send_and_record)
        finally:
            self.counts.num_under_way -= 1
            self._report_request(scope, record)

    def _report_request(self, scope: Scope, record: RequestRecord) -> None:
        ended = time.perf_counter()
        path = self._path(scope)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        status = record.status or _CLIENT_LEFT
        record.is_gone |= status == _CLIENT_LEFT
        self.counts.requests[path, method, f"{status // 100}xx"] += 1
        if record.refusal is not None and record.refusal != "failed" and status >= 400:
            self.counts.refused[record.refusal] += 1
        ids: tuple[str, str] | None = None
        if self.span is not None and record.num_choices:
            ids = self.span(record, path, ended)
        elif record.trace:
            _, trace_id, parent_id, *_ = record.trace["traceparent"].split("-")
            ids = trace_id, parent_id
        level = logging.DEBUG if path in PROBES and status in _PROBED else logging.INFO
        if self.writes_lines and log.isEnabledFor(level):
            # The beginning of an unknown path and the invalid field are logged only if these are known names.
            beginning = _ELSEWHERE.match(path_below_root(scope)) if path == "other" else None
            param = None if record.param is None else re.split(r"[.\[]", record.param, maxsplit=1)[0]
            facts = {
                "method": method,
                "path": path,
                "status": status,
                "request_id": record.request_id,
                "tenant": record.tenant,
                "param": param if param is None or param in self.fields else "other",
                "path_prefix": None if beginning is None else beginning[0],
            }
            log.log(level, Fields("request", **facts, **_remaining_fields(record, ended, ids)))

    def _path(self, scope: Scope) -> str:
        """Return the URL path for logs and metrics; "other" for an unknown path, which may contain private text."""
        if self._paths is None:
            self._paths = frozenset(getattr(route, "path", "other") for route in scope["app"].routes)
        path = path_below_root(scope)
        if path in self._paths:
            return path
        template = getattr(scope.get("route"), "path", None)
        return template if template in self._paths else "other"


def _remaining_fields(record: RequestRecord, ended_s: float, ids: tuple[str, str] | None) -> dict[str, object]:
    given: dict[str, object] = {
        "total_s": ended_s - record.received_s,
        "reason": record.refusal,
        "disconnected": record.is_gone or None,
    }
    if ids is not None:
        given["trace_id"], given["span_id"] = ids
    if record.num_choices:
        given |= {
            "response_id": record.response_id,
            "model": record.model,
            "namespace": record.namespace,
            "stream": record.is_stream,
            "choices": record.num_choices,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "coupled": record.is_coupled or None,
            "queue_s": seconds_between(record.submitted_s, record.started_s),
            "ttft_s": seconds_between(record.received_s, record.first_token_s),
            "finish_reasons": sorted(set(record.finish_reasons)) or None,
            "passes": record.num_steps,
            "draft_tokens": record.num_draft_tokens,
            "accepted_tokens": record.num_accepted_tokens,
            "accepted_per_pass": record.num_accepted_tokens / record.num_steps if record.num_steps else None,
            "sources": dict(sorted(record.accepted_by_source.items())) or None,
        }
    return given
