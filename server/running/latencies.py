"""What clients wait for, observed as it happens."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram

LABELS = ["model_name", "engine"]
"""Of every family."""

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


class Latencies:
    """Histograms of what a client waits for, in seconds, one observation per choice; and of how many it asked for."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(f"vllm:{name}_seconds", text, LABELS, buckets=tuple(buckets), registry=registry)
            return family.labels(*labels)

        self.num_choices = Histogram(
            "vllm:request_params_n", "The field n of a request that was submitted.", LABELS,
            buckets=(1, 2, 5, 10, 20), registry=registry,
        ).labels(*labels)  # fmt: skip
        self.time_to_first_token = histogram(
            "time_to_first_token", "From the arrival of a request to the first token of a choice.", _SECONDS
        )
        self.end_to_end = histogram(
            "e2e_request_latency", "From the arrival of a request to the last token of a choice.", _SECONDS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token", "Mean time per token of a choice after the first.", _TOKEN_SECONDS
        )
