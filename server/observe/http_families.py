"""What became of HTTP requests, and what the process is, as metric families."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import CounterMetricFamily, Metric

from server.base.settings import VERSION
from server.observe.access import HttpCounts
from server.observe.families import Families
from server.observe.logs import num_dropped_lines
from server.running.latencies import LABELS

_LIBRARIES = ("torch", "transformers")

REASONS = ("auth", "invalid", "not_found", "not_ready", "queue_full", "quota", "too_long", "too_slow")
"""Those that requests are usually refused for: exported from the start, so that the first one shows as an increase."""


def http_families(counts: HttpCounts, families: Families) -> Iterator[Metric]:
    """All of them."""
    requests = CounterMetricFamily(
        "http_requests", "HTTP requests that ended, by path, method and class of status.",
        labels=["handler", "method", "status"],
    )  # fmt: skip
    grouped: Counter[tuple[str, str, str]] = Counter()
    for (path, method, status), number in list(counts.requests.items()):
        grouped[path, method, f"{status[0]}xx"] += number
    for labels, number in grouped.items():
        requests.add_metric(labels, number)
    yield requests
    refused = CounterMetricFamily(
        "ssd:requests_refused", "HTTP requests answered with an error of the client's or of load, by reason.",
        labels=[*LABELS, "reason"],
    )  # fmt: skip
    by_reason = dict.fromkeys(REASONS, 0) | dict(counts.refused)
    for reason, number in by_reason.items():
        refused.add_metric([*families.labels, reason], number)
    yield refused
    yield families.gauge("ssd:http_requests_under_way", "HTTP requests being handled.", counts.num_under_way)
    yield families.counter("ssd:log_lines_dropped", "Log lines that nobody read fast enough.", num_dropped_lines())
    yield families.info("ssd:build_info", "What runs here.", **_build())


@cache
def _build() -> dict[str, str]:
    found = {"version": VERSION, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
