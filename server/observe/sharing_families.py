"""What replicas share, as metric families: the log as a whole, each namespace of it, and what refused it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric

from server.observe.families import Families
from server.observe.namespaces import NamespaceFamilies
from server.running.latencies import LABELS

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
