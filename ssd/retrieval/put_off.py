"""Merges that failed: each is left alone for a while, so that others go on and nothing is tried in a hot loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ssd.retrieval.segment import Segment

FIRST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0


@dataclass(slots=True)
class _Failed:
    num_times: int
    again_at: float


class PutOff:
    """By the segments that were to be merged. Only maintenance uses it: one thread at a time."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, ...], _Failed] = {}

    def failed(self, inputs: Sequence[Segment]) -> None:
        """Merging ``inputs`` failed: they wait, twice as long each time, at most LONGEST_PAUSE_S."""
        key = tuple(segment.segment_id for segment in inputs)
        failed = self._failed.setdefault(key, _Failed(0, 0.0))
        failed.again_at = time.monotonic() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**failed.num_times)
        failed.num_times = min(failed.num_times + 1, 16)

    def waiting(self, segments: Sequence[Segment]) -> frozenset[str]:
        """Ids of those of ``segments`` that wait. Merges that can no longer be, because one is gone, are forgotten."""
        if not self._failed:
            return frozenset()
        there, now = {segment.segment_id for segment in segments}, time.monotonic()
        self._failed = {key: failed for key, failed in self._failed.items() if there.issuperset(key)}
        return frozenset(name for key, failed in self._failed.items() if failed.again_at > now for name in key)
