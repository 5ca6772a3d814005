"""Prometheus exposition: vLLM's names where the quantity is the same, ``ssd:`` where it is ours.

Quantities are read from plain counters when somebody asks; only what HTTP clients wait for is observed as it happens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.admission.registry import Tenants
from server.observe.access import HttpCounts
from server.observe.families import (
    Families,
    NamespaceFamilies,
    SharingFamilies,
    TenantFigures,
    engine_families,
    http_families,
)
from server.running.engine_thread import Worker, WorkerState
from server.running.generation import LABELS, Latencies

INTERVAL_S = 0.25


async def watch_loop(observe: Callable[[float], None]) -> None:
    """Give ``observe`` the seconds by which the loop was late, four times a second, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        observe(max(0.0, loop.time() - due))


NamespaceStats = Callable[[], Mapping[str, Any]]
"""Counts of each namespace: dataclasses of numbers."""

_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

_CACHE_TEXTS = {
    "num_tokens": "Learned tokens that can be drafted from.",
    "num_kept_tokens": "Of those, what stays for having been of use.",
    "num_static_tokens": "Tokens of warm-up directories that can be drafted from.",
    "num_borrowed_tokens": "Tokens of the shared cache that can be drafted from.",
    "num_tail_tokens": "Learned tokens that no segment holds yet.",
    "num_segments": "Segments that are searched.",
    "generation": "Number of the newest snapshot.",
    "num_appended_tokens": "Tokens given to the cache, those of other replicas included.",
    "num_skipped_tokens": "Of those, prompt tokens that were stored already.",
    "num_sealed": "Times the tail became a segment.",
    "num_merged": "Segments merged into larger ones.",
    "num_failed_merges": "Merges that failed; each is tried again.",
    "num_damaged_segments": "Segments given up because their bytes changed.",
    "num_evicted_segments": "Segments that left for newer text.",
    "num_evicted_tokens": "Tokens that left for newer text.",
    "num_dropped_tokens": "Tokens lost because sealing could not keep up.",
    "num_failures": "Refused appends, files that could not be read or written, failed merges.",
}


class ServerMetrics:
    """A registry of our own with everything this process exports."""

    def __init__(
        self,
        worker: Worker,
        model_name: str,
        sharing_stats: NamespaceStats | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        self._scraping = threading.Lock()
        labels = (model_name, "0")
        self.http = HttpCounts()
        self.latencies = Latencies(self._registry, labels)
        self.loop_lag = Histogram(
            "ssd:event_loop_lag_seconds", "By how much the event loop was late, four times a second.", LABELS,
            buckets=_LAG_SECONDS, registry=self._registry,
        ).labels(*labels)  # fmt: skip
        ProcessCollector(registry=self._registry)
        self._registry.register(_Collector(worker, self.http, Families(labels), sharing_stats, tenants))
        if tenants is not None:
            self._registry.register(TenantFigures(tenants, dict(zip(LABELS, labels, strict=True))))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        with self._scraping:  # what namespaces grew by is added up at each scrape
            return generate_latest(self._registry)


class _Collector(Collector):
    """Turns plain counters into metric families at each scrape."""

    def __init__(
        self,
        worker: Worker,
        http: HttpCounts,
        families: Families,
        sharing_stats: NamespaceStats | None,
        tenants: Tenants | None,
    ) -> None:
        self._worker = worker
        self._http = http
        self._families = families
        self._tenants = tenants
        self._sharing_stats = sharing_stats
        self._caches = NamespaceFamilies("ssd:cache", _CACHE_TEXTS, families.labels)
        self._sharing = SharingFamilies(families)

    def collect(self) -> Iterator[Metric]:
        """All families; those of the engine once it is loaded."""
        families = self._families
        is_ready = self._worker.state is WorkerState.READY
        yield families.gauge("ssd:ready", "1 while requests are taken.", float(is_ready))
        yield from http_families(self._http, families)
        engine = self._worker.loaded_engine
        if engine is None:
            return
        yield from engine_families(engine, families)
        if engine.caches is not None:
            yield from self._caches.collect(self._by_label(engine.caches.stats()))
            yield families.counter(
                "ssd:cache_worker_restarts",
                "How often the process that merges had to be started again.",
                engine.caches.num_worker_restarts,
            )
        if self._sharing_stats is not None:
            yield from self._sharing.collect(self._sharing_stats(), self._by_label)

    def _by_label(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Of tenants' own namespaces by the tenants' names."""
        labels = {} if self._tenants is None else self._tenants.labels()
        return {labels.get(namespace, namespace): counts for namespace, counts in stats.items()}
