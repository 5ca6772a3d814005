"""OpenTelemetry trace spans of generations, created when a request has ended and sent to a collector."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from server.base.request_record import RequestRecord, seconds_between
from server.base.settings import VERSION
from ssd.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

OPTION = "--otlp-traces-endpoint"
_TIMEOUT_S = 5.0
"""The seconds after which an attempt to send spans to the collector, with its retries, is given up."""
_PATIENCE_S = 2.0
"""The maximum time in seconds for which the process waits at exit, so that queued spans are sent."""
_DEFAULT_PATH = "/v1/traces"

_OPERATIONS = {"/v1/completions": "text_completion"}
"""Maps URL paths to OpenTelemetry's ``gen_ai.operation.name``; all other paths are "chat"."""


class Spans:
    """Creates a trace span for each generation, with OpenTelemetry's and vLLM's attributes, but without any text.

    ``exporter`` sends the spans on its own thread.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.version": VERSION})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # $OTEL_SERVICE_NAME is not set
            resource = resource.merge(Resource({"service.name": "ssd"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ssd", VERSION)

    def __call__(self, record: RequestRecord, path: str, ended_s: float) -> tuple[str, str]:
        """Queue the span of a finished request and return the hexadecimal ids of its trace and of the span."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        offset_ns = time.time_ns() - int(time.perf_counter() * 1e9)

        def at(moment_s: float) -> int:
            return int(moment_s * 1e9) + offset_ns

        operation = _OPERATIONS.get(path, "chat")
        span = self._tracer.start_span(
            f"{operation} {record.model}",
            context=TraceContextTextMapPropagator().extract(record.trace),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, path, operation, ended_s),
            start_time=at(record.received_s),
        )
        for name, moment in (
            ("queue", record.submitted_s),
            ("prefill", record.started_s),
            ("decode", record.first_token_s),
            ("last_token", record.last_token_s),
        ):
            if moment:
                span.add_event(name, timestamp=at(moment))
        if record.refusal is not None:
            span.set_status(Status(StatusCode.ERROR, record.refusal))
        span.end(end_time=at(ended_s))
        context = span.get_span_context()
        return f"{context.trace_id:032x}", f"{context.span_id:016x}"

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_PATIENCE_S)


def make_spans(endpoint: str) -> Spans:
    """Create `Spans` that are sent to a collector. Raises ConfigError if the URL is invalid or a library is missing."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{OPTION} must be like http://collector:4318{_DEFAULT_PATH}, got {endpoint!r:.200}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    except ImportError as error:
        raise ConfigError(f"{OPTION} needs more packages: pip install 'ssd-serving[telemetry]' ({error})") from error
    if parts.path in ("", "/"):
        endpoint = parts._replace(path=_DEFAULT_PATH).geturl()
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `_log_once` logs once instead
    return Spans(_log_once(OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S), f"{parts.hostname}"))


def _log_once(exporter: SpanExporter, name: str) -> SpanExporter:
    """Wrap an exporter so that it logs once when its collector becomes unreachable, and once when it is back."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    export_once, num_lost = exporter.export, 0

    def export(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        nonlocal num_lost
        try:
            result = export_once(spans)
        except Exception:  # no error of the library may end the thread
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            if num_lost:
                log.info("trace spans reach %s again; %d spans were lost", name, num_lost)
            num_lost = 0
        else:
            if not num_lost:
                log.warning(
                    "trace spans do not reach %s, so requests are served without tracing: check the collector", name
                )
            num_lost += len(spans)
        return result

    exporter.export = export  # type: ignore[method-assign]
    return exporter


def _attributes(record: RequestRecord, path: str, operation: str, ended_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": record.status,
        "error.type": record.refusal or ("client_gone" if record.is_gone else None),
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "ssd",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.request.choice.count": record.num_choices if record.num_choices != 1 else None,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": list(record.finish_reasons) or None,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.latency.e2e": ended_s - record.received_s,
        "gen_ai.latency.time_in_queue": seconds_between(record.submitted_s, record.started_s),
        "gen_ai.latency.time_to_first_token": seconds_between(record.received_s, record.first_token_s),
        "gen_ai.latency.time_in_model_prefill": seconds_between(record.started_s, record.first_token_s),
        "gen_ai.latency.time_in_model_decode": seconds_between(record.first_token_s, record.last_token_s),
        "gen_ai.latency.time_in_model_inference": seconds_between(record.started_s, record.last_token_s),
        "ssd.request_id": record.request_id,
        "ssd.passes": record.num_steps,
        "ssd.draft_tokens": record.num_draft_tokens,
        "ssd.accepted_tokens": record.num_accepted_tokens,
        "ssd.coupled": record.is_coupled or None,
    }
    if record.sampling is not None:
        found |= {
            "gen_ai.request.max_tokens": record.sampling.max_tokens,
            "gen_ai.request.temperature": record.sampling.temperature,
            "gen_ai.request.top_p": record.sampling.top_p,
            "gen_ai.request.presence_penalty": record.sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": record.sampling.frequency_penalty,
        }
    return {name: value for name, value in found.items() if value is not None}
