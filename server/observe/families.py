"""Metric families made of plain numbers at each scrape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from server.running.latencies import LABELS


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
