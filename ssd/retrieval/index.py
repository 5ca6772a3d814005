"""The index of one namespace: the memtable (newest text, in the ring buffer), and the segments flushed from it."""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Collection, Sequence
from itertools import groupby, takewhile

from ssd.config import IndexConfig
from ssd.retrieval.dedup import PromptDeduplicator, split_sequence
from ssd.retrieval.files import is_retained
from ssd.retrieval.reuse import EvictionPass, OutputSpans, compile_reuse_kernels
from ssd.retrieval.ring import TokenRing
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens
from ssd.retrieval.snapshot import SegmentTable, Snapshot
from ssd.retrieval.suffix_array import MAX_SEGMENT_TOKENS

Segments = tuple[Segment, ...]


def plan_merge(segments: Segments, excluded: Collection[str], config: IndexConfig, max_tokens: int) -> Segments | None:
    """Choose neighbouring segments to merge next, by a size-tiered policy as in Lucene; None if no merge is due.

    The size class of a segment is the logarithm of its size to the base ``merge_fanout``. A segment with a larger,
    newer neighbour is in that neighbour's class, because small segments between large ones would otherwise never be
    merged. If at least ``merge_fanout`` neighbours are in one class, the cheapest merge of some of them is due, see
    `_cheapest_that_fits`. So each class has fewer than ``merge_fanout`` segments, except segments whose sum would
    exceed ``max_tokens``, and a token is sorted about log(capacity / flush_tokens) times.

    ``segments`` are in order, oldest first. Segments whose ids are in ``excluded`` are not merged.
    """
    classes = [
        int(math.log(max(1.0, len(segment) / config.flush_tokens), config.merge_fanout) + 1e-9) for segment in segments
    ]
    best, best_cost = None, math.inf
    stop = len(segments)
    while stop > 0:
        start = stop - 1
        if segments[start].segment_id in excluded:
            stop = start
            continue
        while start > 0 and classes[start - 1] <= classes[stop - 1] and segments[start - 1].segment_id not in excluded:
            start -= 1
        if stop - start >= config.merge_fanout:
            plan, cost = _cheapest_that_fits(segments[start:stop], config.merge_fanout, max_tokens)
            if cost < best_cost:
                best, best_cost = plan, cost
        stop = start
    return best


def _cheapest_that_fits(run: Segments, fanout: int, max_tokens: int) -> tuple[Segments | None, float]:
    """Return the cheapest merge of 2 to ``fanout`` neighbours with at most ``max_tokens`` tokens, and its cost.

    The cost is the total size of the merged segments, divided by the total size without the largest of them. It is high
    if a merge sorts a large segment again only to add a few tokens.
    """
    best, best_cost = None, math.inf
    for first in range(len(run) - 1):
        total = largest = len(run[first])
        for stop in range(first + 1, min(first + fanout, len(run))):
            size = len(run[stop])
            total, largest = total + size, max(largest, size)
            if total > max_tokens:
                break
            if total / (total - largest) < best_cost:
                best, best_cost = run[first : stop + 1], total / (total - largest)
    return best, best_cost


_RING_FLUSHES = 16  # the ring buffer has room for this many flushes before a delayed flush loses tokens,
_RING_TOKENS = 1 << 18  # and for at least this many tokens, so that a very long prompt fits
_RETAINED_SHARE = 0.5  # of the capacity


class SuffixIndex:
    """The stored text of a namespace, at most ``capacity_tokens``, ready to search. No threads, no files, no sorting.

    One owner calls every method except ``snapshot``, which is safe from any thread. A token is in one of these places::

        shared segments      segments of another namespace, which maintains them; outside the capacity
        prebuilt segments    made by ``ssd-cache build``; outside the capacity, never evicted
        retained segments    [oldest position, recent)      reused text of evicted segments, in order of position
        ring segments        [recent position, flushed)     immutable, in order of position, evicted oldest first
        memtable             [flushed, written)             in the ring buffer

    Flushing, merging and retaining are split into two calls each: ``memtable_to_flush`` and ``install_flushed``,
    ``plan_merge`` and ``install_merged``, ``eviction_pass`` and ``install_retained``. Between the two calls, the owner
    sorts on another thread, without its lock.

    If room is needed, the oldest ring segment is evicted. If later outputs repeated parts of its text, these parts
    become a retained segment, which is placed before all ring segments and is not examined for reuse again. Retained
    segments have at most half of the capacity. If they exceed this half, or if there are no ring segments to evict, the
    oldest retained segments are dropped. So new text always has half of the capacity, and text that is never reused
    evicts only text that is not reused either.
    """

    def __init__(
        self,
        config: IndexConfig,
        segments: Sequence[Segment] = (),
        next_position: int = 0,
        gaps: Sequence[int] = (),
    ) -> None:
        """Create an index of the ring-buffer ``segments`` of a directory, oldest first, with an empty memtable.

        ``gaps`` are ring-buffer positions, in order, across which segments are not merged.
        """
        self._gaps = gaps
        self.config = config
        self.max_segment_tokens = max(2, min(config.capacity_tokens // 8, MAX_SEGMENT_TOKENS))
        limit = min(config.capacity_tokens, max(_RING_FLUSHES * config.flush_tokens, _RING_TOKENS))
        self.max_piece_tokens = min(self.max_segment_tokens, max(2, limit // 2)) - 1
        self.num_evicted_segments = 0
        self.num_evicted_tokens = 0
        self.num_dropped_tokens = 0
        """The number of tokens that were overwritten in the ring buffer before they were flushed, because flushing was
        too slow.
        """
        self.num_skipped_tokens = 0
        """The number of prompt tokens that were not stored because the same beginning of a prompt was stored already.
        """

        self._deduplicator = PromptDeduplicator(config.dedup_block_tokens, config.lead_in_tokens, follows_others=True)
        self._output_spans = OutputSpans()
        self._evicting: deque[Segment] = deque()
        compile_reuse_kernels()
        stops = [segment.stop or 0 for segment in segments]
        self._ring = TokenRing(limit, max([next_position, *stops]))
        self._flushing_stop = 0  # ``memtable_to_flush`` has copied the positions below it
        self.shared_segments: Segments = ()
        """The segments of another namespace, such as the shared one, that are searched too."""
        self._prebuilt: Segments = ()
        self.ring_segments: Segments = tuple(segments)
        """The segments made from the ring buffer, retained ones included, in order of position."""
        self._num_ring_tokens = sum(map(len, segments))
        self._num_retained = sum(1 for _ in takewhile(lambda segment: is_retained(segment.segment_id), segments))
        self._generation = 0
        self._trim_retained()
        self._evict(0)
        self._publish_segments()

    def snapshot(self) -> Snapshot:
        return self._snapshot

    @property
    def next_position(self) -> int:
        return self._ring.memtable_stop

    @property
    def recent_position(self) -> int:
        """The first ring-buffer position that has not been evicted. Before it, only retained text is still stored."""
        recent = self.ring_segments[self._num_retained :]
        return recent[0].start or 0 if recent else self._ring.memtable_start

    @property
    def num_retained_tokens(self) -> int:
        return sum(map(len, self.ring_segments[: self._num_retained]))

    @property
    def num_memtable_tokens(self) -> int:
        return len(self._ring)

    def has_room(self) -> bool:
        """Return whether unflushed text takes less than half of the ring buffer; if not, replicated text must wait."""
        return 2 * len(self._ring) < self._ring.limit

    # Appending

    def append(self, tokens: Tokens, *, prompt_length: int = 0) -> list[Tokens]:
        """Store a sequence (prompt, then completion), which can be searched immediately; return the stored parts.

        The first ``prompt_length`` tokens are the prompt. Leading blocks of the prompt that are stored already are
        skipped. If the completion repeats stored text, this text counts as reused. The oldest segments are evicted, or
        the oldest unflushed sequences are dropped, to stay within the capacity.
        """
        new = self._deduplicator.new_pieces(tokens, prompt_length, self.next_position)
        self.num_skipped_tokens += len(tokens) - sum(map(len, new))
        pieces = [part for piece in new for part in self._add(piece, max(0, len(tokens) - prompt_length))]
        if pieces:
            self.publish()
        return pieces

    def add(self, tokens: Tokens) -> None:
        """Store text from another replica. It may become searchable only with the next ``publish``."""
        self._deduplicator.note_replicated(tokens, self.next_position)
        self._add(tokens, 0)

    def _add(self, tokens: Tokens, num_output: int) -> list[Tokens]:
        pieces = split_sequence(tokens, self.max_piece_tokens, self.config.lead_in_tokens)
        ring, num_dropped = self._ring, self.num_dropped_tokens
        begin, prompt = ring.memtable_stop, max(0, len(tokens) - num_output)
        for piece in pieces:
            if self._evict(len(piece) + 1):
                self._publish_segments()
            memtable_start = ring.memtable_start
            position = ring.append(piece)
            if ring.memtable_start > memtable_start:
                self.num_dropped_tokens += max(0, ring.memtable_start - max(memtable_start, self._flushing_stop))
            if num_output > 0 and len(piece) > prompt:
                self._output_spans.add(begin, position + prompt, ring.memtable_stop)
            prompt = max(0, prompt - len(piece) + min(self.config.lead_in_tokens, self.max_piece_tokens // 2))
        # Text dropped from the middle is not known by its position, so that every block must be forgotten then.
        has_dropped = self.num_dropped_tokens > num_dropped
        self._deduplicator.forget_before(ring.memtable_stop if has_dropped else self.recent_position)
        return pieces

    def publish(self) -> None:
        """Make everything stored so far searchable, in a new snapshot."""
        ring = self._ring
        self._generation += 1
        # One assignment of an immutable object, so that a reader gets either the old or the new snapshot.
        self._snapshot = Snapshot(self._generation, self._table, ring.tokens, ring.memtable_start, ring.memtable_stop)

    # Flushing

    def memtable_to_flush(self) -> tuple[int, Tokens] | None:
        """Return the position and a copy of the oldest memtable text, at most one segment; None if there is none."""
        if len(self._ring) == 0:
            return None
        start = self._ring.memtable_start
        self._flushing_stop = self._ring.end_of_sequences(self.max_segment_tokens)
        return start, self._ring.read(start, self._flushing_stop)

    def install_flushed(self, segment: Segment) -> None:
        """Replace the memtable text that ``memtable_to_flush`` returned by the segment sorted from it."""
        assert segment.stop is not None
        self._ring.release(segment.stop)
        self.ring_segments = (*self.ring_segments, segment)
        self._num_ring_tokens += len(segment)
        self._evict(0)
        self._publish_segments()

    # Merging

    def plan_merge(self, excluded: Collection[str] = ()) -> tuple[Segment, ...] | None:
        """Return neighbouring segments to merge next, none of them in ``excluded``; None if no merge is due."""
        retained, recent = self.ring_segments[: self._num_retained], self.ring_segments[self._num_retained :]
        parts = (
            tuple(part)
            for segments in (recent, retained)
            for _, part in groupby(segments, lambda segment: bisect(self._gaps, segment.start or 0))
        )
        plans = (plan_merge(part, excluded, self.config, self.max_segment_tokens) for part in parts)
        return next(filter(None, plans), None)

    def install_merged(self, inputs: Sequence[Segment], merged: Segment) -> bool:
        """Replace the segments ``inputs`` by ``merged``. Return False, without a change, if an input was removed."""
        first = next(
            (i for i, segment in enumerate(self.ring_segments) if segment is inputs[0]), len(self.ring_segments)
        )
        there = self.ring_segments[first : first + len(inputs)]
        if len(there) < len(inputs) or any(a is not b for a, b in zip(there, inputs, strict=True)):
            return False
        self.ring_segments = (*self.ring_segments[:first], merged, *self.ring_segments[first + len(inputs) :])
        if first < self._num_retained:
            self._num_retained -= len(inputs) - 1
        self._publish_segments()
        return True

    # Retaining

    def eviction_pass(self) -> EvictionPass | None:
        """Return the evicted segments, with the data needed to find their text that later outputs repeated.

        Returns None if no segment was evicted. Evicted segments are not searched any more; ``install_retained`` makes
        their reused text searchable again. See ``reuse.reused_texts``.
        """
        if not self._evicting:
            return None
        retained, newer = self.ring_segments[: self._num_retained], self.ring_segments[self._num_retained :]
        ring = self._ring
        memtable = ring.read(ring.memtable_start, ring.memtable_stop)
        return EvictionPass(
            tuple(self._evicting), retained, newer, ring.memtable_start, memtable, self._output_spans.spans()
        )

    def install_retained(self, evicted: Segments, retained: Sequence[tuple[Segment, Segment]]) -> None:
        """Free the ``evicted`` segments, and add the segments made of their reused text.

        ``retained`` are pairs of an evicted segment and the segment made of its reused text, in order. A pair is
        ignored if its evicted segment was freed meanwhile.
        """
        there = set(map(id, self._evicting))
        found = tuple(segment for source, segment in retained if id(source) in there)
        gone = set(map(id, evicted))
        self._evicting = deque(segment for segment in self._evicting if id(segment) not in gone)
        self.ring_segments = (
            *self.ring_segments[: self._num_retained],
            *found,
            *self.ring_segments[self._num_retained :],
        )
        self._num_retained += len(found)
        num_tokens = sum(map(len, found))
        self._num_ring_tokens += num_tokens
        self.num_evicted_tokens -= num_tokens
        self._trim_retained()
        self._evict(0)
        self._publish_segments()

    # Prebuilt and shared segments

    def add_prebuilt(self, segments: Sequence[Segment]) -> None:
        """Add prebuilt segments, which do not count against the capacity."""
        assert all(segment.start is None for segment in segments)
        self._prebuilt = (*self._prebuilt, *segments)
        self._publish_segments()

    def attach_shared(self, segments: tuple[Segment, ...]) -> None:
        """Set the segments of another namespace that are searched too. They replace those of an earlier call.

        The ``start`` of each segment must be None.
        """
        assert all(segment.start is None for segment in segments)
        self.shared_segments = segments
        self._publish_segments()

    def clear(self) -> None:
        self.shared_segments = self._prebuilt = self.ring_segments = ()
        self._num_ring_tokens = self._num_retained = 0
        self._evicting.clear()
        self._ring.release(self._ring.memtable_stop)
        self._ring.tokens[:] = SEPARATOR
        self._publish_segments()

    def _evict(self, num_new_tokens: int) -> bool:
        """Evict the oldest segments to make room. Retained segments are evicted only if there are no other segments."""
        capacity, before = self.config.capacity_tokens, len(self.ring_segments)
        while self.ring_segments and self._num_ring_tokens + len(self._ring) + num_new_tokens > capacity:
            self._drop(self._num_retained if self._num_retained < len(self.ring_segments) else 0)
        return len(self.ring_segments) < before

    def _trim_retained(self) -> None:
        while self.num_retained_tokens > _RETAINED_SHARE * self.config.capacity_tokens:
            self._drop(0)

    def _drop(self, number: int) -> None:
        segment, was_retained = self.ring_segments[number], number < self._num_retained
        self.ring_segments = (*self.ring_segments[:number], *self.ring_segments[number + 1 :])
        self._num_ring_tokens -= len(segment)
        self._num_retained -= was_retained
        self.num_evicted_segments += 1
        self.num_evicted_tokens += len(segment)
        if not was_retained:
            self._evicting.append(segment)
            while sum(map(len, self._evicting)) > 2 * self.max_segment_tokens:  # the owner does not retain
                self._evicting.popleft()

    def _publish_segments(self) -> None:
        self._table = SegmentTable((*self.shared_segments, *self._prebuilt, *self.ring_segments))
        oldest = self._evicting[0].start if self._evicting else None
        self._output_spans.forget_before(self.recent_position if oldest is None else oldest)
        self.publish()
