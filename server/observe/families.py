"""Metric families made of plain numbers at each scrape: of engine, HTTP, tenants, caches, and what replicas share."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.admission.account import REFUSALS
from server.admission.registry import Tenants
from server.base.settings import VERSION
from server.observe.access import HttpCounts
from server.observe.logs import num_dropped_lines
from server.running.generation import LABELS

if TYPE_CHECKING:
    from ssd.engine import Engine, EngineMetrics


class Histogram(Protocol):
    """Numbers counted by the bounds they are not above; one count more than bounds."""

    counts: list[int]
    total: float

    @property
    def bounds(self) -> Sequence[float]:
        """Ascending."""
        ...


class Families:
    """Makes families whose samples all have the labels of one model."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self.labels = labels

    def counter(self, name: str, text: str, value: float) -> Metric:
        """A count that only grows; the exposition adds ``_total`` to its name."""
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.labels, value)
        return family

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """A number that goes up and down."""
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.labels, value)
        return family

    def info(self, name: str, text: str, **facts: str) -> Metric:
        """Facts, as the labels of a gauge that is 1."""
        family = GaugeMetricFamily(name, text, labels=[*LABELS, *facts])
        family.add_metric([*self.labels, *facts.values()], 1.0)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Numbers by bounds."""
        counts = list(accumulate(histogram.counts))
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.labels, list(zip(bounds, map(float, counts), strict=True)), histogram.total)
        return family


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


FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Ours to vLLM's."""


def engine_families(engine: Engine, families: Families) -> Iterator[Metric]:
    """All of a loaded engine."""
    target, config = engine.target, engine.config
    yield families.info(
        "ssd:target_info", "How the model is driven.", way=target.way, speculates=str(target.can_roll_back).lower()
    )
    yield families.info(
        "vllm:cache_config_info",
        "The KV cache: a block is a slot, which holds one sequence of up to the context's length.",
        block_size=str(engine.max_model_len),
        num_gpu_blocks=str(target.num_slots),
        enable_prefix_caching=str(config.enable_prefix_caching),
    )
    counts = engine.metrics
    yield from _speculation(counts, families)
    yield from _load(counts, families)
    yield from _histograms(counts, families)


def _speculation(counts: EngineMetrics, families: Families) -> Iterator[Metric]:
    counter = families.counter
    yield counter("vllm:spec_decode_num_drafts", "Drafts that were not empty.", counts.num_drafts)
    yield counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", counts.num_draft_tokens)
    yield counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens emitted.", counts.num_accepted_tokens)
    per_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens emitted, by place.", labels=[*LABELS, "position"]
    )
    for position, accepted in enumerate(list(counts.accepted_per_position)):
        per_position.add_metric([*families.labels, str(position)], accepted)
    yield per_position
    for name, text in (
        ("num_draft_tokens", "Drafted tokens, by source."),
        ("num_accepted_tokens", "Draft tokens emitted, by source."),
    ):
        by_source = CounterMetricFamily(f"ssd:source_{name.removeprefix('num_')}", text, labels=[*LABELS, "source"])
        for source, drafted in dict(counts.by_source).items():
            by_source.add_metric([*families.labels, source], getattr(drafted, name))
        yield by_source
    yield counter("ssd:verify_steps", "Rows verified, with a draft or without.", counts.num_verify_steps)
    yield counter("ssd:drafter_failures", "Steps that went on without a failed drafter.", counts.drafter_failures)


def _load(counts: EngineMetrics, families: Families) -> Iterator[Metric]:
    counter, gauge = families.counter, families.gauge
    yield counter("vllm:prompt_tokens", "Prompt tokens.", counts.prompt_tokens)
    yield counter("vllm:generation_tokens", "Generated tokens.", counts.generation_tokens)
    queries, hits = counts.prefix_cache_queries, counts.prefix_cache_hits
    yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up among keys and values kept.", queries)
    yield counter("vllm:prefix_cache_hits", "Prompt tokens that were not computed again.", hits)
    yield counter("vllm:num_preemptions", "Requests that made room for more urgent ones.", counts.num_preemptions)
    yield counter("ssd:failed_passes", "Passes that failed and were computed again.", counts.num_failed_passes)
    yield counter("ssd:integrity_violations", "Faults found in the idle engine.", counts.integrity_violations)
    success = CounterMetricFamily(
        "vllm:request_success", "Choices that ended, by reason.", labels=[*LABELS, "finished_reason"]
    )
    finished = dict(counts.num_requests_finished)
    for reason, name in FINISHED_REASONS.items():
        success.add_metric([*families.labels, name], finished.get(reason, 0))
    yield success
    coupled = counts.num_coupled_requests
    yield counter("ssd:coupled_requests", "Choices that ended, drawn with noise that others share.", coupled)
    yield gauge("vllm:num_requests_running", "Choices in a slot.", counts.num_running)
    yield gauge("vllm:num_requests_waiting", "Choices that wait for a slot.", counts.num_waiting)
    yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 is all.", counts.kv_usage)


def _histograms(counts: EngineMetrics, families: Families) -> Iterator[Metric]:
    found = counts.histograms
    for name, text, histogram in (
        ("request_queue_time_seconds", "From submission to the first slot, of ended choices.", found.queue),
        ("request_prefill_time_seconds", "From the first slot to the first token, of ended choices.", found.prefill),
        ("request_decode_time_seconds", "From the first token to the last, of ended choices.", found.decode),
        ("request_inference_time_seconds", "From the first slot to the last token, of ended choices.", found.inference),
        ("inter_token_latency_seconds", "Between two passes that gave a choice tokens.", found.inter_token),
        ("request_prompt_tokens", "Prompt tokens of an ended choice.", found.prompt_tokens),
        ("request_generation_tokens", "Tokens generated for an ended choice.", found.generation_tokens),
        ("request_params_max_tokens", "Most tokens that an ended choice might have had.", found.max_tokens),
        ("iteration_tokens_total", "Prompt tokens computed and tokens generated in a step.", found.step_tokens),
    ):  # fmt: skip
        yield families.histogram(f"vllm:{name}", text, histogram)


MOST_NAMED = 64
"""Namespaces that have labels of their own: each is a time series for every number."""
OTHERS = "(others)"
"""No namespace is called so: brackets are refused."""

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
        "lag_seconds",
    }
)
"""Statistics that may shrink; all others only grow."""

_GREATEST = frozenset({"lag_seconds"})
"""Of the other namespaces together, the greatest and not the sum."""


class NamespaceFamilies:
    """Makes families of the namespaces' statistics, dataclasses of one kind; ``num_x`` becomes ``x``.

    Fields that are no numbers are left out.

    The first 64 namespaces that are seen keep their names for the life of the process. What grows is added up for the
    others, so that one that is deleted takes nothing back. To be asked by one thread at a time.
    """

    def __init__(self, prefix: str, texts: Mapping[str, str], labels: tuple[str, str]) -> None:
        """``texts`` : what each number is, by the name of its field."""
        self._prefix, self._texts, self._labels = prefix, texts, labels
        self._named: set[str] = set()
        self._seen: dict[tuple[str, str], float] = {}
        self._grown: dict[str, float] = {}

    def collect(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        """One family for each number, and how many namespaces there are. O(namespaces)."""
        number = GaugeMetricFamily(f"{self._prefix}_namespaces", "Namespaces that are open.", labels=LABELS)
        number.add_metric(self._labels, len(stats))
        yield number
        for namespace in stats:
            if len(self._named) < MOST_NAMED:
                self._named.add(namespace)
        named = {namespace: counts for namespace, counts in stats.items() if namespace in self._named}
        others = {namespace: counts for namespace, counts in stats.items() if namespace not in self._named}
        for each in fields(next(iter(stats.values()))) if stats else ():
            if not isinstance(getattr(next(iter(stats.values())), each.name), int | float):
                continue
            is_size = each.name in _SIZES
            kind = GaugeMetricFamily if is_size else CounterMetricFamily
            name = f"{self._prefix}_{each.name.removeprefix('num_').removeprefix('is_')}"
            family = kind(name, self._texts.get(each.name, each.name), labels=[*LABELS, "namespace"])
            for namespace, counts in named.items():
                family.add_metric([*self._labels, namespace], float(getattr(counts, each.name)))
            values = {namespace: float(getattr(counts, each.name)) for namespace, counts in others.items()}
            if values or each.name in self._grown:
                if each.name in _GREATEST:
                    total = max(values.values(), default=0.0)
                else:
                    total = sum(values.values()) if is_size else self._grow(each.name, values)
                family.add_metric([*self._labels, OTHERS], total)
            yield family
        self._seen = {key: value for key, value in self._seen.items() if key[0] in others}

    def _grow(self, name: str, values: Mapping[str, float]) -> float:
        for namespace, value in values.items():
            before = self._seen.get((namespace, name), 0.0)
            self._grown[name] = self._grown.get(name, 0.0) + (value - before if value >= before else value)
            self._seen[namespace, name] = value
        return self._grown.get(name, 0.0)


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
    "num_taken_tokens": "Tokens stored that others had published, not from the log.",
    "num_heads": "Times this server published the whole of a namespace.",
}


_STREAM_TEXTS = {
    "num_sent": "Entries written to the log of a namespace.",
    "num_sent_bytes": "Bytes of entries written to the log of a namespace.",
    "num_received": "Entries of other replicas that were stored, by namespace.",
    "num_received_bytes": "Bytes of all entries read, by namespace.",
    "lag_seconds": "How long it is not known that all the log holds was read, beyond half a second; 0 if all is well.",
}


class SharingFamilies:
    """Of the whole log ``ssd:sharing_``, of each namespace that is open ``ssd:stream_``."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._log = NamespaceFamilies("ssd:sharing", _SHARING_TEXTS, families.labels)
        self._streams = NamespaceFamilies("ssd:stream", _STREAM_TEXTS, families.labels)

    def collect(
        self, stats: Mapping[str, Any], by_label: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> Iterator[Metric]:
        """``stats`` : of the log, by the one namespace it is named after. ``by_label`` : names what may be shown."""
        yield from self._log.collect(by_label(stats))
        for log in stats.values():
            yield from self._streams.collect(by_label(log.streams))
            yield self._families.histogram(
                "ssd:sharing_delay_seconds",
                "From when an entry of another replica was appended to when it was stored here, by Redis' clock.",
                log.delays,
            )
            refusals = CounterMetricFamily(
                "ssd:sharing_refusals", "Calls that failed and entries that were skipped, by reason.",
                labels=[*LABELS, "reason"],
            )  # fmt: skip
            for reason, count in log.refusals.items():
                refusals.add_metric([*self._families.labels, reason], count)
            yield refusals


_COUNTERS = {
    "requests": "HTTP requests of a tenant that were let in.",
    "prompt_tokens": "Prompt tokens of a tenant.",
    "output_tokens": "Generated tokens of a tenant.",
}


class TenantFigures(Collector):
    """Counts of the tenants there are now."""

    def __init__(self, tenants: Tenants, labels: dict[str, str]) -> None:
        """``labels`` : of every series, by name."""
        self._tenants = tenants
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """All families; none where there are no tenants."""
        accounts = self._tenants.accounts()
        if not accounts:
            return
        names, values = [*self._labels, "tenant"], list(self._labels.values())
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"ssd:tenant_{name}", text, labels=names)
            for account in accounts:
                counter.add_metric([*values, account.name], getattr(account.use, f"num_{name}"))
            yield counter
        refused = CounterMetricFamily(
            "ssd:tenant_refused", "Requests that were answered 429, by what was used up.", labels=[*names, "reason"]
        )
        in_flight = GaugeMetricFamily("ssd:tenant_in_flight", "Choices that wait or run.", labels=names)
        for account in accounts:
            in_flight.add_metric([*values, account.name], account.use.num_in_flight)
            for reason in REFUSALS:
                refused.add_metric([*values, account.name, reason], account.use.num_refused[reason])
        yield refused
        yield in_flight
