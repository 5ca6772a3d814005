"""Metric families made of plain numbers at each scrape; of few namespaces by name and of all others together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from server.running.generation import LABELS

COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily


class Families:
    """Makes families whose samples all have the labels of one model."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self.labels = labels

    def by(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, names: str | tuple[str, ...],
        values: Mapping[Any, float],
    ) -> Metric:  # fmt: skip
        """Numbers by one more label, or several. The exposition adds ``_total`` to the name of what only grows."""
        more = (names,) if isinstance(names, str) else names
        family = kind(name, text, labels=[*LABELS, *more])
        for each, value in values.items():
            family.add_metric([*self.labels, *((each,) if isinstance(each, str) else each)], value)
        return family

    def of(self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, value: float) -> Metric:
        return self.by(kind, name, text, (), {(): value})

    def info(self, name: str, text: str, **facts: str) -> Metric:
        """Facts, as the labels of a gauge that is 1."""
        return self.by(GAUGE, name, text, tuple(facts), {tuple(facts.values()): 1.0})

    def histogram(self, name: str, text: str, histogram: Any) -> Metric:
        """Numbers by ascending ``bounds`` they are not above; one more of ``counts``, and their ``total``."""
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        counts = map(float, accumulate(list(histogram.counts)))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.labels, list(zip(bounds, counts, strict=True)), histogram.total)
        return family


MOST_NAMED = 64
"""Namespaces that have labels of their own: each is a time series for every number."""
OTHERS = "(others)"
"""No namespace is called so: brackets are refused."""

_SIZES = frozenset({
    "num_tokens", "num_static_tokens", "num_borrowed_tokens", "num_kept_tokens", "num_tail_tokens", "num_segments",
    "generation", "is_connected", "num_queued", "lag_seconds",
})  # fmt: skip
"""Statistics that may shrink; all others only grow."""

_GREATEST = frozenset({"lag_seconds"})
"""Of the other namespaces together, the greatest and not the sum."""


class NamespaceFamilies:
    """Makes families of the namespaces' statistics, dataclasses of one kind; ``num_x`` becomes ``x``.

    Fields that are no numbers are left out.

    The first 64 namespaces that are seen keep their names for the life of the process. What grows is added up for the
    others, so that one that is deleted takes nothing back. To be asked by one thread at a time.
    """

    def __init__(self, prefix: str, texts: Mapping[str, str], families: Families) -> None:
        """``texts`` : what each number is, by the name of its field."""
        self._prefix, self._texts, self._families = prefix, texts, families
        self._named: set[str] = set()
        self._seen: dict[tuple[str, str], float] = {}
        self._grown: dict[str, float] = {}

    def collect(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        """One family for each number, and how many namespaces there are. O(namespaces)."""
        yield self._families.of(GAUGE, f"{self._prefix}_namespaces", "Namespaces that are open.", len(stats))
        self._named |= set([name for name in stats if name not in self._named][: MOST_NAMED - len(self._named)])
        first = next(iter(stats.values()), None)
        for name in [each.name for each in fields(first)] if first is not None else ():
            if not isinstance(getattr(first, name), int | float):
                continue
            values = {namespace: float(getattr(counts, name)) for namespace, counts in stats.items()}
            shown = {namespace: value for namespace, value in values.items() if namespace in self._named}
            others = {namespace: value for namespace, value in values.items() if namespace not in self._named}
            if others or name in self._grown:
                shown[OTHERS] = self._together(name, others)
            kind = GAUGE if name in _SIZES else COUNTER
            full = f"{self._prefix}_{name.removeprefix('num_').removeprefix('is_')}"
            yield self._families.by(kind, full, self._texts.get(name, name), "namespace", shown)
        self._seen = {key: value for key, value in self._seen.items() if key[0] in stats}

    def _together(self, name: str, values: Mapping[str, float]) -> float:
        if name in _SIZES:
            return max(values.values(), default=0.0) if name in _GREATEST else sum(values.values())
        for namespace, value in values.items():
            before = self._seen.get((namespace, name), 0.0)
            self._grown[name] = self._grown.get(name, 0.0) + (value - before if value >= before else value)
            self._seen[namespace, name] = value
        return self._grown.get(name, 0.0)
