"""What each tenant used, for Prometheus; by name, never by key."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.tenants.account import REFUSALS
from server.tenants.registry import Tenants

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
