"""Prometheus exposition: vLLM's names where the quantity is the same, ``ssd:`` where it is ours.

Quantities are read from the engine's plain counters when somebody asks; only latencies are observed as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.running.engine_thread import Worker, WorkerState
from server.running.latencies import LABELS, Latencies
from server.tenants.figures import TenantFigures
from server.tenants.registry import Tenants

if TYPE_CHECKING:
    from ssd.engine import EngineMetrics

NamespaceStats = Callable[[], Mapping[str, Any]]
"""Counts of each namespace: dataclasses of numbers."""

FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Ours to vLLM's."""

_SIZES = frozenset(
    {
        "num_tokens",
        "num_static_tokens",
        "num_borrowed_tokens",
        "num_kept_tokens",
        "num_tail_tokens",
        "num_segments",
        "generation",
        "is_connected",
        "num_queued",
    }
)
"""Statistics that may shrink; all others only grow."""


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
        labels = (model_name, "0")
        self.latencies = Latencies(self._registry, labels)
        self._registry.register(_EngineCollector(worker, labels, sharing_stats, tenants))
        if tenants is not None:
            self._registry.register(TenantFigures(tenants, dict(zip(LABELS, labels, strict=True))))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Turns plain counters into metric families at each scrape."""

    def __init__(
        self,
        worker: Worker,
        labels: tuple[str, str],
        sharing_stats: NamespaceStats | None,
        tenants: Tenants | None = None,
    ) -> None:
        self._worker = worker
        self._tenants = tenants
        self._sharing_stats = sharing_stats
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """All families; those of the engine once it is loaded."""
        yield self._gauge("ssd:ready", "1 while requests are taken.", float(self._worker.state is WorkerState.READY))
        engine = self._worker.loaded_engine
        if engine is None:
            return
        target = GaugeMetricFamily("ssd:target_info", "How the model is driven.", labels=[*LABELS, "way", "speculates"])
        target.add_metric([*self._labels, engine.target.way, str(engine.target.can_roll_back).lower()], 1.0)
        yield target
        yield from self._engine(engine.metrics)
        if engine.caches is not None:
            yield from self._by_namespace("ssd:cache", engine.caches.stats())
            yield self._counter(
                "ssd:cache_worker_restarts",
                "How often the process that merges had to be started again.",
                engine.caches.num_worker_restarts,
            )
        if self._sharing_stats is not None:
            yield from self._by_namespace("ssd:sharing", self._sharing_stats())

    def _engine(self, counts: EngineMetrics) -> Iterator[Metric]:
        counter = self._counter
        yield counter("vllm:spec_decode_num_drafts", "Drafts that were not empty.", counts.num_drafts)
        yield counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", counts.num_draft_tokens)
        yield counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens emitted.", counts.num_accepted_tokens)
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens emitted, by place.",
            labels=[*LABELS, "position"],
        )
        for position, accepted in enumerate(list(counts.accepted_per_position)):
            per_position.add_metric([*self._labels, str(position)], accepted)
        yield per_position
        for name, text in (
            ("num_draft_tokens", "Drafted tokens, by source."),
            ("num_accepted_tokens", "Draft tokens emitted, by source."),
        ):
            by_source = CounterMetricFamily(f"ssd:source_{name.removeprefix('num_')}", text, labels=[*LABELS, "source"])
            for source, drafted in dict(counts.by_source).items():
                by_source.add_metric([*self._labels, source], getattr(drafted, name))
            yield by_source
        yield counter("ssd:verify_steps", "Rows verified, with a draft or without.", counts.num_verify_steps)
        yield counter("ssd:drafter_failures", "Steps that went on without a failed drafter.", counts.drafter_failures)
        yield counter("vllm:prompt_tokens", "Prompt tokens.", counts.prompt_tokens)
        yield counter("vllm:generation_tokens", "Generated tokens.", counts.generation_tokens)
        queries, hits = counts.prefix_cache_queries, counts.prefix_cache_hits
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up among keys and values kept.", queries)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens that were not computed again.", hits)
        yield counter("vllm:num_preemptions", "Requests that made room for more urgent ones.", counts.num_preemptions)
        yield counter("ssd:failed_passes", "Passes that failed and were computed again.", counts.num_failed_passes)
        yield counter("ssd:integrity_violations", "Faults found in the idle engine.", counts.integrity_violations)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*LABELS, "finished_reason"]
        )
        finished = dict(counts.num_requests_finished)
        for reason, name in FINISHED_REASONS.items():
            success.add_metric([*self._labels, name], finished.get(reason, 0))
        yield success
        yield self._gauge("vllm:num_requests_running", "Requests in a slot.", counts.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", counts.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 is all.", counts.kv_usage)

    def _by_namespace(self, prefix: str, stats: Mapping[str, Any]) -> Iterator[Metric]:
        """Every number of the namespaces' statistics, which are dataclasses of one kind; ``num_x`` becomes ``x``."""
        labels = {} if self._tenants is None else self._tenants.labels()
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for namespace, counts in stats.items():
            for number in fields(counts):
                name = f"{prefix}_{number.name.removeprefix('num_').removeprefix('is_')}"
                if name not in families:
                    kind = GaugeMetricFamily if number.name in _SIZES else CounterMetricFamily
                    text = f"{number.name} of {type(counts).__name__}."
                    families[name] = kind(name, text, labels=[*LABELS, "namespace"])
                families[name].add_metric(
                    [*self._labels, labels.get(namespace, namespace)], float(getattr(counts, number.name))
                )
        yield from families.values()

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
