"""Options of what an operator sees: logs, spans, what answers tell of their drafts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from server.base.settings import SPEC_DECODE_METRICS, SpecDecodeMetrics
from server.observe.logs import LOG_FORMATS, LogFormat
from ssd.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """Checked."""

    log_level: str
    log_format: LogFormat
    logs_requests: bool
    otlp_traces_endpoint: str | None
    spec_decode_metrics: SpecDecodeMetrics


def add_observe_options(parser: argparse.ArgumentParser) -> None:
    """The group "logs and traces"."""
    add = parser.add_argument_group("logs and traces").add_argument
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="(default: %(default)s)")
    add(
        "--log-format", default="text", choices=LOG_FORMATS,
        help="lines for people, or one JSON object a line; neither holds any text of a request (default: %(default)s)",
    )  # fmt: skip
    add(
        "--no-access-log", "--disable-log-requests", action="store_true",
        help="no line for each request (default: one; of probes, metrics and the page's counters at --log-level debug)",
    )  # fmt: skip
    add(
        "--otlp-traces-endpoint", metavar="URL",
        help="send a span of each generation to this OpenTelemetry collector, by HTTP; needs the extra telemetry",
    )  # fmt: skip
    add(
        "--per-request-spec-decode-metrics", default="none", choices=SPEC_DECODE_METRICS,
        help="answers of one choice say how their drafts fared, detailed: each draft; that tells their reader what the "
        "cache holds (default: %(default)s)",
    )  # fmt: skip


def observe_options_of(found: argparse.Namespace) -> ObserveOptions:
    """What was asked for; raises ConfigError where answers would tell what obfuscation hides."""
    if found.per_request_spec_decode_metrics != "none" and found.obfuscation == "always":
        raise ConfigError("--per-request-spec-decode-metrics tells what --obfuscation always hides: leave one out")
    return ObserveOptions(
        log_level=found.log_level,
        log_format=found.log_format,
        logs_requests=not found.no_access_log,
        otlp_traces_endpoint=found.otlp_traces_endpoint,
        spec_decode_metrics=found.per_request_spec_decode_metrics,
    )
