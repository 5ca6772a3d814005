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
    """Creates Prometheus metric families. All their samples have the labels ``model_name`` and ``engine``."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self.labels = labels

    def labelled(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        names: str | tuple[str, ...],
        values: Mapping[Any, float],
    ) -> Metric:
        """Create a metric family with further labels (``names``). ``values`` maps the labels' values to numbers."""
        more = (names,) if isinstance(names, str) else names
        family = kind(name, text, labels=[*LABELS, *more])
        for each, value in values.items():
            family.add_metric([*self.labels, *((each,) if isinstance(each, str) else each)], value)
        return family

    def metric(self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: float) -> Metric:
        return self.labelled(kind, name, text, (), {(): value})

    def info(self, name: str, text: str, **facts: str) -> Metric:
        """Create a gauge with the value 1 whose labels are ``facts``, as Prometheus info metrics are."""
        return self.labelled(GAUGE, name, text, tuple(facts), {tuple(facts.values()): 1.0})

    def histogram(self, name: str, text: str, histogram: Any) -> Metric:
        """Create a Prometheus histogram from an object with ``bounds``, ``counts`` and ``total``."""
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        counts = map(float, accumulate(list(histogram.counts)))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.labels, list(zip(bounds, counts, strict=True)), histogram.total)
        return family


MAX_NAMED = 64
"""The maximum number of cache namespaces with labels of their own, because each label adds a time series per metric."""
OTHERS = "(others)"
"""The metric label under which all cache namespaces after the first ``MAX_NAMED`` are added up."""

_SIZES = frozenset(
    {
        "num_tokens",
        "num_prebuilt_tokens",
        "num_shared_tokens",
        "num_retained_tokens",
        "num_memtable_tokens",
        "num_segments",
        "generation",
        "is_connected",
        "num_queued",
        "lag_seconds",
    }
)
"""The names of those cache statistics whose values may decrease, so they are exported as gauges. All other cache
statistics are counters.
"""


class NamespaceFamilies:
    """Creates metric families from the statistics of cache namespaces. ``texts`` maps statistics to help texts.

    The first 64 namespaces have labels of their own. All other namespaces are added up, so that the counters do not
    decrease when a namespace is deleted. Not thread-safe.
    """

    def __init__(self, prefix: str, texts: Mapping[str, str], families: Families) -> None:
        self._prefix, self._texts, self._families = prefix, texts, families
        self._named: set[str] = set()
        self._seen: dict[tuple[str, str], float] = {}
        self._grown: dict[str, float] = {}

    def collect(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield a metric family for each statistic, and one for the number of namespaces. O(namespaces)."""
        yield self._families.metric(GAUGE, f"{self._prefix}_namespaces", "Open namespaces.", len(stats))
        self._named |= set([name for name in stats if name not in self._named][: MAX_NAMED - len(self._named)])
        for name, text in self._texts.items() if stats else ():
            values = {namespace: float(getattr(counts, name)) for namespace, counts in stats.items()}
            shown = {namespace: value for namespace, value in values.items() if namespace in self._named}
            others = {namespace: value for namespace, value in values.items() if namespace not in self._named}
            if others or name in self._grown:
                shown[OTHERS] = self._total(name, others)
            kind = GAUGE if name in _SIZES else COUNTER
            full = f"{self._prefix}_{name.removeprefix('num_').removeprefix('is_')}"
            yield self._families.labelled(kind, full, text, "namespace", shown)
        self._seen = {key: value for key, value in self._seen.items() if key[0] in stats}

    def _total(self, name: str, values: Mapping[str, float]) -> float:
        if name in _SIZES:
            return max(values.values(), default=0.0) if name == "lag_seconds" else sum(values.values())
        for namespace, value in values.items():
            before = self._seen.get((namespace, name), 0.0)
            self._grown[name] = self._grown.get(name, 0.0) + (value - before if value >= before else value)
            self._seen[namespace, name] = value
        return self._grown.get(name, 0.0)


NamespaceStats = Callable[[], Mapping[str, Any]]
"""A function that returns statistics for each cache namespace: a mapping of namespace names to dataclasses."""

LAG_INTERVAL_S = 0.25
_REASONS = ("auth", "invalid", "not_found", "not_ready", "queue_full", "quota", "too_long", "too_slow")
"""Reasons for rejecting requests. Their counters are exported as 0 before the first rejection, because Prometheus would
not see the first increase of a counter that did not exist.
"""
_FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Maps the engine's finish reasons to the finish reasons in vLLM's metrics."""

_ENGINE_COUNTERS = """\
vllm:spec_decode_num_drafts num_drafts Non-empty drafts.
vllm:spec_decode_num_draft_tokens num_draft_tokens Draft tokens.
vllm:spec_decode_num_accepted_tokens num_accepted_tokens Accepted draft tokens.
ssd:verify_steps num_verify_steps Sequences in decoding passes, with or without a draft.
ssd:drafter_failures drafter_failures Steps in which a drafter failed; they continued without its draft.
vllm:prompt_tokens prompt_tokens Prompt tokens.
vllm:generation_tokens generation_tokens Generated tokens.
vllm:prefix_cache_queries prefix_cache_queries Prompt tokens that were looked up in the prefix cache.
vllm:prefix_cache_hits prefix_cache_hits Prompt tokens that were found in the prefix cache.
vllm:num_preemptions num_preemptions Requests that were preempted by requests with a higher priority.
ssd:failed_passes num_failed_passes Forward passes that failed and were retried.
ssd:integrity_violations integrity_violations Internal inconsistencies found by the check of the idle engine.
ssd:coupled_requests num_coupled_requests Finished sequences that were sampled with shared noise (coupled sampling)."""
_ENGINE_GAUGES = """\
vllm:num_requests_running num_running Sequences that are running.
vllm:num_requests_waiting num_waiting Sequences that wait for a slot.
vllm:kv_cache_usage_perc kv_usage Used share of the KV cache; 1 is all of it."""
_ENGINE_HISTOGRAMS = """\
vllm:request_queue_time_seconds queue Time from submission until a slot is assigned, per finished sequence.
vllm:request_prefill_time_seconds prefill Time from the assignment of a slot to the first token, per finished sequence.
vllm:request_decode_time_seconds decode Time from the first to the last token, per finished sequence.
vllm:request_inference_time_seconds inference Time from the assignment of a slot to the last token, \
per finished sequence.
vllm:inter_token_latency_seconds inter_token Time between two forward passes that added tokens to a sequence.
vllm:request_prompt_tokens prompt_tokens Prompt tokens per finished sequence.
vllm:request_generation_tokens generation_tokens Generated tokens per finished sequence.
vllm:request_params_max_tokens max_tokens Value of max_tokens per finished sequence.
vllm:iteration_tokens_total step_tokens Prefilled and generated tokens per step."""
"""Metrics of the engine, one per line: the name, the attribute of `EngineMetrics`, and the help text."""
_TENANT_COUNTS = {
    "requests": "Admitted HTTP requests per tenant.",
    "prompt_tokens": "Prompt tokens per tenant.",
    "output_tokens": "Generated tokens per tenant.",
}
_CACHE_TEXTS = {
    "num_tokens": "Cached tokens from which drafts are made, without prebuilt and shared ones.",
    "num_retained_tokens": "Part of the cached tokens that is not evicted because outputs repeated it.",
    "num_prebuilt_tokens": "Tokens of prebuilt caches from which drafts are made.",
    "num_shared_tokens": "Tokens of the shared namespace from which drafts are made.",
    "num_memtable_tokens": "Cached tokens that are not in a segment yet.",
    "num_segments": "Segments that are searched for drafts.",
    "generation": "Number of the latest snapshot.",
    "num_appended_tokens": "Tokens appended to the cache, including those of other replicas.",
    "num_skipped_tokens": "Prompt tokens that were not appended because the cache contains them already.",
    "num_flushes": "Flushes of the memtable to a new segment.",
    "num_merges": "Merges of neighbouring segments.",
    "num_failed_merges": "Failed merges; each is retried.",
    "num_evicted_segments": "Evicted segments.",
    "num_evicted_tokens": "Evicted tokens.",
    "num_dropped_tokens": "Tokens lost because they were overwritten before they were flushed.",
    "num_failures": "Rejected appends, failed reads and writes of files, and failed merges.",
}
_REPLICATION_TEXTS = {
    "is_connected": "1 while Redis is connected, else 0.",
    "num_published": "Entries written to Redis.",
    "num_published_tokens": "Tokens written to Redis.",
    "num_queued": "Entries that wait to be written to Redis.",
    "num_received": "Entries of other replicas that were added to the cache.",
    "num_received_tokens": "Tokens of other replicas that were added to the cache.",
    "num_known": "Entries of other replicas that the cache contained already.",
    "num_dropped": "Entries that were never written to Redis because the queue was full.",
    "num_invalid": "Entries of other replicas that failed a check and were ignored.",
    "num_failures": "Failed Redis calls.",
    "num_reconnects": "Reconnections to Redis.",
}
_STREAM_TEXTS = {
    "lag_seconds": "Seconds since all entries in Redis were known to be read; 0 if less than half a second."
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
        self._replication = NamespaceFamilies("ssd:replication", _REPLICATION_TEXTS, families)
        self._streams = NamespaceFamilies("ssd:replication_stream", _STREAM_TEXTS, families)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def exposition(self) -> bytes:
        with self._scraping:  # `NamespaceFamilies` is not thread-safe
            return generate_latest(self._registry)

    async def watch_loop(self) -> None:
        """Measure four times a second, until cancelled, how late the event loop runs its timers."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.latencies.loop_lag.observe(max(0.0, loop.time() - due))

    def collect(self) -> Iterator[Metric]:
        metric, labelled, http = self._families.metric, self._families.labelled, self.http
        is_ready = self._worker.state is WorkerState.READY
        yield metric(GAUGE, "ssd:ready", "1 while requests are accepted, else 0.", float(is_ready))
        requests = CounterMetricFamily(
            "http_requests",
            "Finished HTTP requests by path, method and class of status code.",
            labels=["handler", "method", "status"],
        )
        for labels, number in dict(http.requests).items():
            requests.add_metric(labels, number)
        yield requests
        yield labelled(
            COUNTER,
            "ssd:requests_rejected",
            "HTTP requests that were rejected because of an error or the load, by reason.",
            "reason",
            dict.fromkeys(_REASONS, 0) | dict(http.refused),
        )
        yield metric(GAUGE, "ssd:http_requests_in_progress", "HTTP requests in progress.", http.num_under_way)
        yield metric(
            COUNTER,
            "ssd:log_lines_dropped",
            "Log lines that were dropped because the reader of the log was too slow.",
            num_dropped_lines(),
        )
        yield self._families.info("ssd:build_info", "Versions of the server and its libraries.", **_build())
        yield from self._collect_tenants()
        engine = self._worker.loaded_engine
        if engine is not None:
            yield from self._collect_engine(engine)
            shared = self._sharing_stats()  # one entry: the replication log of the server's namespace
            yield from self._replication.collect(self._name_tenants(shared))
            for log in shared.values():
                yield from self._streams.collect(self._name_tenants(log.streams))

    def _collect_engine(self, engine: Engine) -> Iterator[Metric]:
        families, target, counts = self._families, engine.target, engine.metrics
        status = engine.speculation
        speculative = str(engine.is_speculating).lower()
        yield families.info(
            "ssd:model_runner_info",
            "Backend that runs the model, and whether speculation is on.",
            backend=target.backend,
            speculative=speculative,
        )
        yield families.info(
            "vllm:cache_config_info",
            "Sizes of the KV cache. A block is a slot for one sequence of up to the maximum length.",
            block_size=str(engine.max_model_len),
            num_gpu_blocks=str(target.num_slots),
            enable_prefix_caching=str(engine.config.enable_prefix_caching),
        )
        text = "1 while drafts are verified; 0 if speculation is off, suspended or not ready. /health gives the reason."
        yield families.metric(GAUGE, "ssd:speculation_active", text, float(status.active))
        text = "Estimated duration of a forward pass of 16 tokens, relative to a pass of one token; 0 while unknown."
        yield families.metric(GAUGE, "ssd:pass_cost_16_tokens", text, engine.relative_pass_cost(16))
        for kind, table in ((COUNTER, _ENGINE_COUNTERS), (GAUGE, _ENGINE_GAUGES)):
            for name, count, text in _rows(table):
                yield families.metric(kind, name, text, getattr(counts, count))
        for name, histogram, text in _rows(_ENGINE_HISTOGRAMS):
            yield families.histogram(name, text, getattr(counts.histograms, histogram))
        by_source, finished = dict(counts.by_source), dict(counts.num_requests_finished)
        places = {str(place): number for place, number in enumerate(list(counts.accepted_per_position))}
        drafted = {source: each.num_draft_tokens for source, each in by_source.items()}
        accepted = {source: each.num_accepted_tokens for source, each in by_source.items()}
        ended = {name: finished.get(reason, 0) for reason, name in _FINISHED_REASONS.items()}
        for name, text, label, values in (
            (
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by position in the draft.",
                "position",
                places,
            ),
            ("ssd:source_draft_tokens", "Draft tokens by source.", "source", drafted),
            ("ssd:source_accepted_tokens", "Accepted draft tokens by source.", "source", accepted),
            ("vllm:request_success", "Finished sequences by finish reason.", "finished_reason", ended),
        ):
            yield families.labelled(COUNTER, name, text, label, values)
        if engine.caches is not None:
            yield from self._caches.collect(self._name_tenants(engine.caches.stats()))

    def _collect_tenants(self) -> Iterator[Metric]:
        accounts = {account.name: account for account in self._tenants.accounts()}
        if not accounts:
            return
        labelled = self._families.labelled
        for name, text in _TENANT_COUNTS.items():
            used = {tenant: getattr(account, f"num_{name}") for tenant, account in accounts.items()}
            yield labelled(COUNTER, f"ssd:tenant_{name}", text, "tenant", used)
        refused = {(tenant, reason): accounts[tenant].num_refused[reason] for tenant in accounts for reason in REFUSALS}
        text = "Requests that were rejected with 429, by the exhausted quota."
        yield labelled(COUNTER, "ssd:tenant_requests_rejected", text, ("tenant", "reason"), refused)
        in_flight = {tenant: account.num_in_flight for tenant, account in accounts.items()}
        yield labelled(
            GAUGE, "ssd:tenant_choices_in_progress", "Waiting and running sequences per tenant.", "tenant", in_flight
        )

    def _name_tenants(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the names of tenants' cache namespaces, which are secret, by the tenants' names."""
        labels = self._tenants.labels()
        return {labels.get(namespace, namespace): counts for namespace, counts in stats.items()}


def _rows(table: str) -> list[list[str]]:
    return [line.split(" ", 2) for line in table.splitlines()]


@cache
def _build() -> dict[str, str]:
    found = {"version": VERSION, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
