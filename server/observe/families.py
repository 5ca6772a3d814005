"""Metric families made of plain numbers at each scrape; of few namespaces by name and of all others together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from server.running.generation import LABELS


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

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """Such counts by one more label."""
        family = CounterMetricFamily(name, text, labels=[*LABELS, label])
        for each, value in values.items():
            family.add_metric([*self.labels, each], value)
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
