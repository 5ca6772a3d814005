"""The counters of SSD's drafter in prometheus_client's registry, so that vLLM's ``/metrics`` shows them.

vLLM serves ``/metrics`` in another process than that of the drafter. It collects the metrics of all processes if
``PROMETHEUS_MULTIPROC_DIR`` is set, as it is with several API servers (``--api-server-count``).
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any, Final

from ssd.integrations.retrieval_cache import RetrievalStats

_COUNTERS: Final = {
    "num_proposals": ("ssd:drafts_requested", "Number of drafts that vLLM requested from SSD."),
    "num_drafts": ("ssd:drafts", "Number of drafts with at least one token."),
    "num_draft_tokens": ("ssd:draft_tokens", "Number of tokens in SSD's drafts."),
    "num_stored": ("ssd:stored_requests", "Number of finished requests whose text was stored in the cache."),
    "num_failures": ("ssd:drafter_failures", "Number of exceptions in SSD's drafter."),
}
_GAUGES: Final = {
    "num_running": ("ssd:requests_running", "Number of requests that SSD drafts for."),
    "num_cached_tokens": ("ssd:cached_tokens", "Number of tokens in the cache."),
}


class MetricsExport:
    """Copies the counters of SSD's drafter to Prometheus metrics. ``update`` adds the increase since its last call."""

    def __init__(self) -> None:
        self._exported: dict[str, int] = {}

    def update(self, stats: RetrievalStats) -> None:
        values: dict[str, int] = asdict(stats)
        for name, metric in _metrics().items():
            if name in _GAUGES:
                metric.set(values[name])
            elif (increase := values[name] - self._exported.get(name, 0)) > 0:
                metric.inc(increase)
        self._exported = values


@cache
def _metrics() -> dict[str, Any]:
    """Return a mapping from fields of ``ProposerStats`` to this process's Prometheus metrics.

    The mapping is empty if prometheus_client is not installed.
    """
    try:
        from prometheus_client import Counter, Gauge
    except ImportError:
        return {}
    counters = {name: Counter(metric, text) for name, (metric, text) in _COUNTERS.items()}
    gauges = {name: Gauge(metric, text, multiprocess_mode="livesum") for name, (metric, text) in _GAUGES.items()}
    return counters | gauges
