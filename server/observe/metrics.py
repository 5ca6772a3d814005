"""Prometheus metrics, with vLLM's names if the quantity is the same, else with the prefix ``ssd:``.

Most values are read from plain counters at each scrape; only latencies of HTTP requests are observed as they occur.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.admission.quotas import REFUSALS
from server.admission.registry import Tenants
from server.base.settings import VERSION
from server.observe.access import HttpCounts
from server.observe.logs import num_dropped_lines
from server.running.engine_thread import Worker, WorkerState
from server.running.generation import LABELS, Latencies

if TYPE_CHECKING:
    from ssd.engine import Engine

COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily


class Families:
    """Creates Prometheus metric families whose samples have the labels of the served model."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self.labels = labels

    def by(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, names: str | tuple[str, ...],
        values: Mapping[Any, float],
    ) -> Metric:  # fmt: skip
        """Create a metric family whose samples have additional labels. ``values`` maps label values to numbers."""
        more = (names,) if isinstance(names, str) else names
        family = kind(name, text, labels=[*LABELS, *more])
        for each, value in values.items():
            family.add_metric([*self.labels, *((each,) if isinstance(each, str) else each)], value)
        return family

    def of(self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: float) -> Metric:
        return self.by(kind, name, text, (), {(): value})

    def info(self, name: str, text: str, **facts: str) -> Metric:
        """Create a gauge with the value 1 whose labels are ``facts``, as Prometheus info metrics are."""
        return self.by(GAUGE, name, text, tuple(facts), {tuple(facts.values()): 1.0})

    def histogram(self, name: str, text: str, histogram: Any) -> Metric:
        """Create a Prometheus histogram from an object with ``bounds``, ``counts`` and ``total``."""
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        counts = map(float, accumulate(list(histogram.counts)))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.labels, list(zip(bounds, counts, strict=True)), histogram.total)
        return family


MOST_NAMED = 64
"""The maximum number of cache namespaces with labels of their own, because each label adds a time series per metric."""
OTHERS = "(others)"
"""The metric label for all cache namespaces after the first ``MOST_NAMED`` together; no namespace can have this name.
"""

_SIZES = frozenset({
    "num_tokens", "num_static_tokens", "num_borrowed_tokens", "num_kept_tokens", "num_tail_tokens", "num_segments",
    "generation", "is_connected", "num_queued", "lag_seconds",
})  # fmt: skip
"""The statistics of cache namespaces that may decrease and are exported as gauges; all others are counters."""


class NamespaceFamilies:
    """Creates metric families from the statistics of cache namespaces. ``texts`` maps statistics to help texts.

    The first 64 namespaces have labels of their own. All others are summed, in such a way that counters never decrease
    when a namespace is deleted. Not thread-safe.
    """

    def __init__(self, prefix: str, texts: Mapping[str, str], families: Families) -> None:
        self._prefix, self._texts, self._families = prefix, texts, families
        self._named: set[str] = set()
        self._seen: dict[tuple[str, str], float] = {}
        self._grown: dict[str, float] = {}

    def collect(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield one metric family per statistic, and the number of namespaces. O(namespaces)."""
        yield self._families.of(GAUGE, f"{self._prefix}_namespaces", "Namespaces that are open.", len(stats))
        self._named |= set([name for name in stats if name not in self._named][: MOST_NAMED - len(self._named)])
        for name, text in self._texts.items() if stats else ():
            values = {namespace: float(getattr(counts, name)) for namespace, counts in stats.items()}
            shown = {namespace: value for namespace, value in values.items() if namespace in self._named}
            others = {namespace: value for namespace, value in values.items() if namespace not in self._named}
            if others or name in self._grown:
                shown[OTHERS] = self._together(name, others)
            kind = GAUGE if name in _SIZES else COUNTER
            full = f"{self._prefix}_{name.removeprefix('num_').removeprefix('is_')}"
            yield self._families.by(kind, full, text, "namespace", shown)
        self._seen = {key: value for key, value in self._seen.items() if key[0] in stats}

    def _together(self, name: str, values: Mapping[str, float]) -> float:
        if name in _SIZES:
            return max(values.values(), default=0.0) if name == "lag_seconds" else sum(values.values())
        for namespace, value in values.items():
            before = self._seen.get((namespace, name), 0.0)
            self._grown[name] = self._grown.get(name, 0.0) + (value - before if value >= before else value)
            self._seen[namespace, name] = value
        return self._grown.get(name, 0.0)


NamespaceStats = Callable[[], Mapping[str, Any]]
"""A function that returns the statistics of each cache namespace, as dataclasses of numbers."""

LAG_INTERVAL_S = 0.25
_REASONS = ("auth", "invalid", "not_found", "not_ready", "queue_full", "quota", "too_long", "too_slow")
"""Reasons of rejections that are exported as 0 from the start, so that the first rejection shows as an increase."""
_FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Maps the engine's finish reasons to those of vLLM's metrics."""

_ENGINE_NUMBERS = {
    "vllm:spec_decode_num_drafts": (COUNTER, "num_drafts", "Drafts that were not empty."),
    "vllm:spec_decode_num_draft_tokens": (COUNTER, "num_draft_tokens", "Drafted tokens."),
    "vllm:spec_decode_num_accepted_tokens": (COUNTER, "num_accepted_tokens", "Draft tokens emitted."),
    "ssd:verify_steps": (COUNTER, "num_verify_steps", "Rows verified, with a draft or without."),
    "ssd:drafter_failures": (COUNTER, "drafter_failures", "Steps that went on without a failed drafter."),
    "vllm:prompt_tokens": (COUNTER, "prompt_tokens", "Prompt tokens."),
    "vllm:generation_tokens": (COUNTER, "generation_tokens", "Generated tokens."),
    "vllm:prefix_cache_queries": (
        COUNTER,
        "prefix_cache_queries",
        "Prompt tokens looked up among keys and values kept.",
    ),
    "vllm:prefix_cache_hits": (COUNTER, "prefix_cache_hits", "Prompt tokens that were not computed again."),
    "vllm:num_preemptions": (COUNTER, "num_preemptions", "Requests that made room for more urgent ones."),
    "ssd:failed_passes": (COUNTER, "num_failed_passes", "Passes that failed and were computed again."),
    "ssd:integrity_violations": (COUNTER, "integrity_violations", "Faults found in the idle engine."),
    "ssd:coupled_requests": (
        COUNTER,
        "num_coupled_requests",
        "Choices that ended, drawn with noise that others share.",
    ),
    "vllm:num_requests_running": (GAUGE, "num_running", "Choices in a slot."),
    "vllm:num_requests_waiting": (GAUGE, "num_waiting", "Choices that wait for a slot."),
    "vllm:kv_cache_usage_perc": (GAUGE, "kv_usage", "Share of the KV cache in use, 1 is all."),
}
_ENGINE_HISTOGRAMS = {
    "vllm:request_queue_time_seconds": ("queue", "From submission to the first slot, of ended choices."),
    "vllm:request_prefill_time_seconds": ("prefill", "From the first slot to the first token, of ended choices."),
    "vllm:request_decode_time_seconds": ("decode", "From the first token to the last, of ended choices."),
    "vllm:request_inference_time_seconds": ("inference", "From the first slot to the last token, of ended choices."),
    "vllm:inter_token_latency_seconds": ("inter_token", "Between two passes that gave a choice tokens."),
    "vllm:request_prompt_tokens": ("prompt_tokens", "Prompt tokens of an ended choice."),
    "vllm:request_generation_tokens": ("generation_tokens", "Tokens generated for an ended choice."),
    "vllm:request_params_max_tokens": ("max_tokens", "Most tokens that an ended choice might have had."),
    "vllm:iteration_tokens_total": ("step_tokens", "Prompt tokens computed and tokens generated in a step."),
}
_TENANT_COUNTS = {
    "requests": "HTTP requests of a tenant that were let in.",
    "prompt_tokens": "Prompt tokens of a tenant.",
    "output_tokens": "Generated tokens of a tenant.",
}
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
    "num_evicted_segments": "Segments that left for newer text.",
    "num_evicted_tokens": "Tokens that left for newer text.",
    "num_dropped_tokens": "Tokens lost because sealing could not keep up.",
    "num_failures": "Refused appends, files that could not be read or written, failed merges.",
}
_SHARING_TEXTS = {
    "is_connected": "1 while Redis answers.",
    "num_published": "Entries sent to the other replicas.",
    "num_published_tokens": "Tokens sent to the other replicas.",
    "num_queued": "Entries that wait to be sent.",
    "num_received": "Entries of other replicas that were stored.",
    "num_received_tokens": "Tokens of other replicas that were stored.",
    "num_known": "Entries read that were in the cache already.",
    "num_dropped": "Entries given up because Redis was away for longer than the queue could hold them.",
    "num_invalid": "Entries read that failed a check.",
    "num_failures": "Calls of Redis that failed.",
    "num_reconnects": "Times the connection was made again.",
}
_STREAM_TEXTS = {
    "lag_seconds": "How long it is not known that all the log holds was read, beyond half a second; 0 if all is well."
}


class ServerMetrics(Collector):
    """All Prometheus metrics of this process, read from plain counters at each scrape."""

    def __init__(self, worker: Worker, model_name: str, sharing_stats: NamespaceStats, tenants: Tenants) -> None:
        self._registry = CollectorRegistry()
        self._scraping = threading.Lock()
        labels = (model_name, "0")
        self.http = HttpCounts()
        self.latencies = Latencies(self._registry, labels)
        self._worker, self._tenants, self._sharing_stats = worker, tenants, sharing_stats
        self._families = families = Families(labels)
        self._caches = NamespaceFamilies("ssd:cache", _CACHE_TEXTS, families)
        self._sharing = NamespaceFamilies("ssd:sharing", _SHARING_TEXTS, families)
        self._streams = NamespaceFamilies("ssd:stream", _STREAM_TEXTS, families)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def exposition(self) -> bytes:
        with self._scraping:  # what namespaces grew by is added up at each scrape
            return generate_latest(self._registry)

    async def watch_loop(self) -> None:
        """Measure four times a second, until cancelled, how late the event loop runs its timers."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.latencies.loop_lag.observe(max(0.0, loop.time() - due))

    def collect(self) -> Iterator[Metric]:
        of, by, http = self._families.of, self._families.by, self.http
        is_ready = self._worker.state is WorkerState.READY
        yield of(GAUGE, "ssd:ready", "1 while requests are taken.", float(is_ready))
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests that ended, by path, method and class of status.",
            labels=["handler", "method", "status"],
        )  # fmt: skip
        for labels, number in dict(http.requests).items():
            requests.add_metric(labels, number)
        yield requests
        yield by(
            COUNTER, "ssd:requests_refused",
            "HTTP requests answered with an error of the client's or of load, by reason.", "reason",
            dict.fromkeys(_REASONS, 0) | dict(http.refused),
        )  # fmt: skip
        yield of(GAUGE, "ssd:http_requests_under_way", "HTTP requests being handled.", http.num_under_way)
        yield of(COUNTER, "ssd:log_lines_dropped", "Log lines that nobody read fast enough.", num_dropped_lines())
        yield self._families.info("ssd:build_info", "What runs here.", **_build())
        yield from self._of_tenants()
        engine = self._worker.loaded_engine
        if engine is not None:
            yield from self._of_engine(engine)
            shared = self._sharing_stats()  # of the log, by the one namespace it is named after
            yield from self._sharing.collect(self._by_label(shared))
            for log in shared.values():
                yield from self._streams.collect(self._by_label(log.streams))

    def _of_engine(self, engine: Engine) -> Iterator[Metric]:
        families, target, counts = self._families, engine.target, engine.metrics
        status = engine.speculation
        speculates = str(engine.is_speculating).lower()
        yield families.info(
            "ssd:target_info", "How the model is driven.", backend=target.backend, speculates=speculates
        )
        yield families.info(
            "vllm:cache_config_info",
            "The KV cache: a block is a slot, which holds one sequence of up to the context's length.",
            block_size=str(engine.max_model_len),
            num_gpu_blocks=str(target.num_slots),
            enable_prefix_caching=str(engine.config.enable_prefix_caching),
        )
        text = "1 while drafts are verified; 0 if speculation is off, withheld or not ready: /health says why."
        yield families.of(GAUGE, "ssd:speculation_active", text, float(status.active))
        text = "Estimated time of a pass of 16 tokens of one sequence, in single-token passes; 0 while unknown."
        yield families.of(GAUGE, "ssd:pass_cost_16_tokens", text, engine.relative_pass_cost(16))
        for name, (kind, count, text) in _ENGINE_NUMBERS.items():
            yield families.of(kind, name, text, getattr(counts, count))
        for name, (histogram, text) in _ENGINE_HISTOGRAMS.items():
            yield families.histogram(name, text, getattr(counts.histograms, histogram))
        by_source, finished = dict(counts.by_source), dict(counts.num_requests_finished)
        places = {str(place): number for place, number in enumerate(list(counts.accepted_per_position))}
        drafted = {source: each.num_draft_tokens for source, each in by_source.items()}
        accepted = {source: each.num_accepted_tokens for source, each in by_source.items()}
        ended = {name: finished.get(reason, 0) for reason, name in _FINISHED_REASONS.items()}
        for name, text, label, values in (
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens emitted, by place.", "position", places),
            ("ssd:source_draft_tokens", "Drafted tokens, by source.", "source", drafted),
            ("ssd:source_accepted_tokens", "Draft tokens emitted, by source.", "source", accepted),
            ("vllm:request_success", "Choices that ended, by reason.", "finished_reason", ended),
        ):
            yield families.by(COUNTER, name, text, label, values)
        if engine.caches is not None:
            yield from self._caches.collect(self._by_label(engine.caches.stats()))

    def _of_tenants(self) -> Iterator[Metric]:
        uses = {account.name: account.use for account in self._tenants.accounts()}
        if not uses:
            return
        by = self._families.by
        for name, text in _TENANT_COUNTS.items():
            used = {tenant: getattr(use, f"num_{name}") for tenant, use in uses.items()}
            yield by(COUNTER, f"ssd:tenant_{name}", text, "tenant", used)
        refused = {(tenant, reason): use.num_refused[reason] for tenant, use in uses.items() for reason in REFUSALS}
        text = "Requests that were answered 429, by what was used up."
        yield by(COUNTER, "ssd:tenant_refused", text, ("tenant", "reason"), refused)
        in_flight = {tenant: use.num_in_flight for tenant, use in uses.items()}
        yield by(GAUGE, "ssd:tenant_in_flight", "Choices that wait or run.", "tenant", in_flight)

    def _by_label(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the names of tenants' cache namespaces, which are secret, by the tenants' names."""
        labels = self._tenants.labels()
        return {labels.get(namespace, namespace): counts for namespace, counts in stats.items()}


@cache
def _build() -> dict[str, str]:
    found = {"version": VERSION, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
