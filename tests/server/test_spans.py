"""Spans, as a collector gets them; and collectors that are not there."""

from __future__ import annotations

import gzip
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from benchmarks.servers import free_port
from server.observe.spans import Spans, make_spans
from ssd.errors import ConfigError
from tests.server.client import post, wait_until
from tests.server.failing_engine import FailingEngine, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A small OTLP receiver on a port of its own."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        received = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                received.append((self.path, ExportTraceServiceRequest.FromString(body)))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def value(span: Any, name: str) -> Any:
    (found,) = [attribute.value for attribute in span.attributes if attribute.key == name]
    kind = found.WhichOneof("value")
    if kind == "array_value":
        return [each.string_value for each in found.array_value.values]
    return getattr(found, kind)


def served(spans: Spans, *requests: tuple[str, dict[str, Any], dict[str, str]]) -> None:
    """Answer requests with spans on, and send what waits."""
    with serving(lambda _: FailingEngine(step_s=0.002), span=spans) as running:
        for path, body, headers in requests:
            post(running.port, path, body, headers=headers)
    spans.close()


def test_a_generation_is_a_span_of_the_clients_trace(collector: Collector) -> None:
    before = time.time_ns()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "asked"}
    body = {"prompt": "a secret", "max_tokens": 5, "temperature": 0.5, "stop": ["never said"]}
    served(make_spans(collector.url), ("/v1/completions", body, headers))
    (span,) = collector.spans
    assert collector.requests[0][0] == "/v1/traces"
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=1")
    assert span.name == "text_completion test-model"
    assert value(span, "gen_ai.operation.name") == "text_completion"
    assert (value(span, "gen_ai.usage.input_tokens"), value(span, "gen_ai.usage.output_tokens")) == (8, 5)
    assert value(span, "gen_ai.response.finish_reasons") == ["length"]
    assert value(span, "gen_ai.request.temperature") == 0.5
    assert value(span, "ssd.request_id") == "asked"
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    resource = collector.requests[0][1].resource_spans[0].resource
    assert {a.key: a.value.string_value for a in resource.attributes}["service.name"] == "ssd"
    text = str(collector.requests)
    assert "secret" not in text and "never said" not in text


def test_a_chat_without_a_trace_begins_one_and_a_client_that_does_not_sample_has_none(collector: Collector) -> None:
    chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "n": 2, "stream": True}
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    refused = {"prompt": "abc", "n": 0}
    served(
        make_spans(f"{collector.url}/v1/traces"),
        ("/v1/chat/completions", chat, {}),
        ("/v1/completions", {"prompt": "abc"}, unsampled),
        ("/v1/completions", refused, {}),
    )
    (span,) = collector.spans
    assert span.name == "chat test-model" and not span.parent_span_id
    assert (value(span, "gen_ai.request.choice.count"), value(span, "gen_ai.request.stream")) == (2, True)


def test_a_collector_that_is_not_there_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    spans = make_spans(f"http://127.0.0.1:{free_port()}")
    with serving(lambda _: FailingEngine(), span=spans) as running:
        for _ in range(20):
            assert post(running.port, "/v1/completions", {"prompt": "abc"}).status == 200
    started = time.monotonic()
    spans.close()
    assert time.monotonic() - started < 10
    wait_until(lambda: any("do not reach 127.0.0.1" in message for message in caplog.messages))
    assert sum("do not reach" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be like http://"):
        make_spans(url)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'ssd-serving\[telemetry\]'"):
        make_spans("http://collector:4318")
