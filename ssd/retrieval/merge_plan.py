"""Which neighbouring segments are merged next."""

from __future__ import annotations

import math
from collections.abc import Collection

from ssd.config import IndexConfig
from ssd.retrieval.segment import Segment

Segments = tuple[Segment, ...]


class MergePolicy:
    """Size-tiered merging, as in Lucene.

    A segment's class is log of its size to the base ``merge_fanout``; a segment with a larger, newer neighbour counts
    as that one's class, or small ones between large ones would stay forever. Where ``merge_fanout`` or more neighbours
    are of one class, those of them are merged that cost least: the fewest tokens sorted for each that is not of the
    largest. Classes then never grow with position, so there are fewer than ``merge_fanout`` segments in each, but for
    those whose sum would exceed ``max_segment_tokens``. A token is sorted again about log(capacity / seal_tokens)
    times, also when sealing is far ahead of merging.
    """

    def __init__(self, config: IndexConfig, max_segment_tokens: int) -> None:
        self._seal_tokens = config.seal_tokens
        self._fanout = config.merge_fanout
        self._max_segment_tokens = max_segment_tokens

    def plan(self, segments: Segments, apart: Collection[str]) -> Segments | None:
        """Neighbours in ``segments`` to be merged next, none of the ids ``apart``; None where nothing is due.

        O(number of segments).
        """
        best, best_cost = None, math.inf
        stop = len(segments)
        while stop > 0:
            run_class, start = self._size_class(segments[stop - 1]), stop - 1
            if segments[start].segment_id in apart:
                stop = start
                continue
            while (
                start > 0
                and self._size_class(segments[start - 1]) <= run_class
                and segments[start - 1].segment_id not in apart
            ):
                start -= 1
            if stop - start >= self._fanout:
                plan, cost = self._cheapest_that_fits(segments[start:stop])
                if cost < best_cost:
                    best, best_cost = plan, cost
            stop = start
        return best

    def _size_class(self, segment: Segment) -> int:
        return int(math.log(max(1.0, len(segment) / self._seal_tokens), self._fanout) + 1e-9)

    def _cheapest_that_fits(self, run: Segments) -> tuple[Segments | None, float]:
        """Two to ``merge_fanout`` neighbours in ``run`` whose sum is within the limit of a segment, and their cost."""
        best, best_cost = None, math.inf
        for first in range(len(run) - 1):
            total = most = len(run[first])
            for stop in range(first + 1, min(first + self._fanout, len(run))):
                size = len(run[stop])
                total, most = total + size, max(most, size)
                if total > self._max_segment_tokens:
                    break
                if total / (total - most) < best_cost:
                    best, best_cost = run[first : stop + 1], total / (total - most)
        return best, best_cost
