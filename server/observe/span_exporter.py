"""An exporter of spans that says once that its collector is away, and once that it is back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)


class ToldOnce(SpanExporter):
    """Passes spans on to ``exporter``. ``name`` : the collector's, for the log."""

    def __init__(self, exporter: SpanExporter, name: str) -> None:
        self._exporter = exporter
        self._name = name
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some; where that fails they are lost."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # whatever the library raises, tracing ends no thread
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                log.info("spans reach %s again; %d were lost", self._name, self._num_lost)
            self._num_lost = 0
        else:
            if not self._num_lost:
                log.warning("spans do not reach %s; requests are served without", self._name)
            self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return self._exporter.force_flush(timeout_millis)
