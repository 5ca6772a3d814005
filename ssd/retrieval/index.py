"""The index of one namespace: the ring's tail and the segments sealed from it."""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Collection, Sequence
from itertools import groupby, takewhile

from ssd.config import IndexConfig
from ssd.retrieval.files import is_kept
from ssd.retrieval.prefixes import PrefixFilter, split_sequence
from ssd.retrieval.ring import TokenRing
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens
from ssd.retrieval.snapshot import SegmentTable, Snapshot
from ssd.retrieval.suffix_array import MAX_SEGMENT_TOKENS
from ssd.retrieval.usage import Leaving, Outputs, warm_up_usage

Segments = tuple[Segment, ...]


def merge_plan(segments: Segments, apart: Collection[str], config: IndexConfig, most: int) -> Segments | None:
    """Neighbours in ``segments`` to be merged next, of at most ``most`` tokens and none of the ids ``apart``, or None.

    Size-tiered, as in Lucene. O(number of segments).

    A segment's class is log of its size to the base ``merge_fanout``; a segment with a larger, newer neighbour counts
    as that one's class, or small ones between large ones would stay forever. Where ``merge_fanout`` or more neighbours
    are of one class, those of them are merged that cost least: the fewest tokens sorted for each that is not of the
    largest. Classes then never grow with position, so there are fewer than ``merge_fanout`` segments in each, but for
    those whose sum would be too large. A token is sorted again about log(capacity / seal_tokens) times, also when
    sealing is far ahead of merging.
    """
    classes = [
        int(math.log(max(1.0, len(segment) / config.seal_tokens), config.merge_fanout) + 1e-9) for segment in segments
    ]
    best, best_cost = None, math.inf
    stop = len(segments)
    while stop > 0:
        start = stop - 1
        if segments[start].segment_id in apart:
            stop = start
            continue
        while start > 0 and classes[start - 1] <= classes[stop - 1] and segments[start - 1].segment_id not in apart:
            start -= 1
        if stop - start >= config.merge_fanout:
            plan, cost = _cheapest_that_fits(segments[start:stop], config.merge_fanout, most)
            if cost < best_cost:
                best, best_cost = plan, cost
        stop = start
    return best


def _cheapest_that_fits(run: Segments, fanout: int, most: int) -> tuple[Segments | None, float]:
    """Two to ``fanout`` neighbours in ``run`` of at most ``most`` tokens, and their cost."""
    best, best_cost = None, math.inf
    for first in range(len(run) - 1):
        total = largest = len(run[first])
        for stop in range(first + 1, min(first + fanout, len(run))):
            size = len(run[stop])
            total, largest = total + size, max(largest, size)
            if total > most:
                break
            if total / (total - largest) < best_cost:
                best, best_cost = run[first : stop + 1], total / (total - largest)
    return best, best_cost


_RING_SEALS = 16  # the ring holds the tail of this many seals before a lagging rebuild costs tokens ...
_RING_TOKENS = 1 << 18  # ... and no fewer than this, so that a very long prompt fits; untouched pages cost no memory
_KEPT_SHARE = 0.5  # of the capacity, for text that was of use


class SuffixIndex:
    """What is stored, at most ``capacity_tokens``, ready to be searched. No threads, no files, no sorting.

    One owner calls everything but ``snapshot``, which any thread may call. Where a token is::

        borrowed segments    of another namespace, which keeps them up to date; outside the capacity
        static segments      from the warm-up builder, outside the capacity, never evicted
        kept segments        [oldest position, recent)     what was of use of text that left; in order of position
        ring-born segments   [recent position, sealed)     immutable, in order of position, evicted oldest first
        tail                 [sealed, written)             in the ring

    Sealing, merging and keeping are in two halves, so that the owner may sort in between, elsewhere and without its
    lock: ``tail_to_seal`` ... ``install_sealed``, ``merge_plan`` ... ``install_merged``, and ``leaving`` ...
    ``install_kept``.

    The oldest segment leaves when room is needed; what of it a later output said again comes
    back as a segment of its own, before all those that have not left yet, and is not looked at again. Kept segments are
    at most half of the capacity: beyond, and where there are no others, the oldest of them leave. So the newest half of
    the capacity is always that of new text, and text that nobody said again pushes out only its own kind.
    """

    def __init__(
        self,
        config: IndexConfig,
        segments: Sequence[Segment] = (),
        next_position: int = 0,
        gaps: Sequence[int] = (),
    ) -> None:
        """Starts with ring-born ``segments``, oldest first, as a directory kept them; the tail is empty.

        ``gaps`` : positions, in order, across which nothing is merged.
        """
        self._gaps = gaps
        self.config = config
        self.max_segment_tokens = max(2, min(config.capacity_tokens // 8, MAX_SEGMENT_TOKENS))
        limit = min(config.capacity_tokens, max(_RING_SEALS * config.seal_tokens, _RING_TOKENS))
        self.max_piece_tokens = min(self.max_segment_tokens, max(2, limit // 2)) - 1
        self.num_evicted_segments = 0
        self.num_evicted_tokens = 0
        self.num_dropped_tokens = 0
        """Tokens that left the ring unsealed, because sealing was too slow."""
        self.num_skipped_tokens = 0
        """Tokens of prompts that were stored already."""

        self._filter = PrefixFilter(config.dedup_block_tokens, config.lead_in_tokens, follows_others=True)
        self._outputs = Outputs()
        self._leaving: deque[Segment] = deque()
        warm_up_usage()
        stops = [segment.stop or 0 for segment in segments]
        self._ring = TokenRing(limit, max([next_position, *stops]))
        self._sealing_stop = 0  # positions below it have been copied out by tail_to_seal
        self.borrowed: Segments = ()
        """Segments of another namespace that are searched too."""
        self._static: Segments = ()
        self.ring_born: Segments = tuple(segments)
        """Sealed segments, kept ones among them, in order of position."""
        self._num_ring_born_tokens = sum(map(len, segments))
        self._num_kept = sum(1 for _ in takewhile(lambda segment: is_kept(segment.segment_id), segments))
        self._generation = 0
        self._trim_kept()
        self._evict(0)
        self._publish_segments()

    def snapshot(self) -> Snapshot:
        """The index as it is now. O(1), from any thread."""
        return self._snapshot

    @property
    def next_position(self) -> int:
        """Where the next appended token will lie."""
        return self._ring.tail_stop

    @property
    def recent_position(self) -> int:
        """Of what was stored before this position, only what was of use may be stored still."""
        recent = self.ring_born[self._num_kept :]
        return recent[0].start or 0 if recent else self._ring.tail_start

    @property
    def num_kept_tokens(self) -> int:
        """Tokens that are stored because they were of use, though their age is over."""
        return sum(map(len, self.ring_born[: self._num_kept]))

    @property
    def num_tail_tokens(self) -> int:
        """Tokens in no segment yet."""
        return len(self._ring)

    def has_room(self) -> bool:
        """False while half the ring is unsealed."""
        return 2 * len(self._ring) < self._ring.limit

    # Appending

    def append(self, tokens: Tokens, *, prompt_length: int = 0) -> list[Tokens]:
        """Store a sequence (int32[n], ids >= 0), prompt then completion, and publish it. Returns the pieces stored.

        What of the first ``prompt_length`` tokens is stored already is not stored again; what is stored already of the
        others was of use. Evicts the oldest segments, or drops the oldest unsealed sequences, to stay within the
        capacity. O(n).
        """
        new = self._filter.pieces(tokens, prompt_length, self.next_position)
        self.num_skipped_tokens += len(tokens) - sum(map(len, new))
        pieces = [part for piece in new for part in self._add(piece, max(0, len(tokens) - prompt_length))]
        if pieces:
            self.publish()
        return pieces

    def add(self, tokens: Tokens) -> None:
        """Store a piece that another index stored. It may not be searched before the next ``publish``. O(n)."""
        self._filter.note(tokens, self.next_position)
        self._add(tokens, 0)

    def _add(self, tokens: Tokens, num_said: int) -> list[Tokens]:
        """``num_said`` : so many of the last tokens are an output's."""
        pieces = split_sequence(tokens, self.max_piece_tokens, self.config.lead_in_tokens)
        ring, num_dropped = self._ring, self.num_dropped_tokens
        begin, prompt = ring.tail_stop, max(0, len(tokens) - num_said)
        for piece in pieces:
            if self._evict(len(piece) + 1):
                self._publish_segments()
            tail_start = ring.tail_start
            position = ring.append(piece)
            if ring.tail_start > tail_start:
                self.num_dropped_tokens += max(0, ring.tail_start - max(tail_start, self._sealing_stop))
            if num_said > 0 and len(piece) > prompt:
                self._outputs.add(begin, position + prompt, ring.tail_stop)
            prompt = max(0, prompt - len(piece) + min(self.config.lead_in_tokens, self.max_piece_tokens // 2))
        # Positions say nothing about text dropped from the middle, so then every block is forgotten.
        has_dropped = self.num_dropped_tokens > num_dropped
        self._filter.forget_before(ring.tail_stop if has_dropped else self.recent_position)
        return pieces

    def publish(self) -> None:
        """All that was added can be searched from now on. O(1)."""
        ring = self._ring
        self._generation += 1
        # One assignment of an immutable object: a reader has either the old one or the new one, whole.
        self._snapshot = Snapshot(self._generation, self._table, ring.tokens, ring.tail_start, ring.tail_stop)

    # Sealing

    def tail_to_seal(self) -> tuple[int, Tokens] | None:
        """Position and a copy of the oldest whole sequences of the tail, at most a segment's; None if it is empty."""
        if len(self._ring) == 0:
            return None
        start = self._ring.tail_start
        self._sealing_stop = self._ring.sequences_within(self.max_segment_tokens)
        return start, self._ring.read(start, self._sealing_stop)

    def install_sealed(self, segment: Segment) -> None:
        """The text of ``tail_to_seal`` is in ``segment`` from now on. Publishes."""
        assert segment.stop is not None
        self._ring.release(segment.stop)
        self.ring_born = (*self.ring_born, segment)
        self._num_ring_born_tokens += len(segment)
        self._evict(0)
        self._publish_segments()

    # Merging

    def merge_plan(self, apart: Collection[str] = ()) -> tuple[Segment, ...] | None:
        """Neighbouring segments to be merged next, or None; none of the ids ``apart``. O(number of segments)."""
        kept, recent = self.ring_born[: self._num_kept], self.ring_born[self._num_kept :]
        parts = (
            tuple(part)
            for segments in (recent, kept)
            for _, part in groupby(segments, lambda segment: bisect(self._gaps, segment.start or 0))
        )
        plans = (merge_plan(part, apart, self.config, self.max_segment_tokens) for part in parts)
        return next(filter(None, plans), None)

    def install_merged(self, inputs: Sequence[Segment], merged: Segment) -> bool:
        """Put ``merged`` in the place of ``inputs`` and publish; False, changing nothing, if one of them is gone."""
        first = next((i for i, segment in enumerate(self.ring_born) if segment is inputs[0]), len(self.ring_born))
        there = self.ring_born[first : first + len(inputs)]
        if len(there) < len(inputs) or any(a is not b for a, b in zip(there, inputs, strict=True)):
            return False
        self.ring_born = (*self.ring_born[:first], merged, *self.ring_born[first + len(inputs) :])
        if first < self._num_kept:
            self._num_kept -= len(inputs) - 1
        self._publish_segments()
        return True

    # Keeping

    def leaving(self) -> Leaving | None:
        """The segments that have left, and what says which of their text was of use; None if none has. O(tail).

        They are not searched any more, until ``install_kept``. See ``usage.used_texts``.
        """
        if not self._leaving:
            return None
        kept, newer = self.ring_born[: self._num_kept], self.ring_born[self._num_kept :]
        ring = self._ring
        tail = ring.read(ring.tail_start, ring.tail_stop)
        return Leaving(tuple(self._leaving), kept, newer, ring.tail_start, tail, self._outputs.places())

    def install_kept(self, left: Segments, kept: Sequence[tuple[Segment, Segment]]) -> None:
        """``left`` is gone; what was of use of it is searched from now on. Publishes.

        ``kept`` : in order, each behind the one of ``left`` that it was made of; without effect for one that was given
        up meanwhile.
        """
        there = set(map(id, self._leaving))
        found = tuple(segment for of, segment in kept if id(of) in there)
        gone = set(map(id, left))
        self._leaving = deque(segment for segment in self._leaving if id(segment) not in gone)
        self.ring_born = (*self.ring_born[: self._num_kept], *found, *self.ring_born[self._num_kept :])
        self._num_kept += len(found)
        num_tokens = sum(map(len, found))
        self._num_ring_born_tokens += num_tokens
        self.num_evicted_tokens -= num_tokens
        self._trim_kept()
        self._evict(0)
        self._publish_segments()

    # Static segments

    def add_static(self, segments: Sequence[Segment]) -> None:
        """Search ``segments`` too, outside the capacity. Publishes."""
        assert all(segment.start is None for segment in segments)
        self._static = (*self._static, *segments)
        self._publish_segments()

    def borrow(self, segments: tuple[Segment, ...]) -> None:
        """Search ``segments`` of another namespace too, without a position, in place of those borrowed before."""
        assert all(segment.start is None for segment in segments)
        self.borrowed = segments
        self._publish_segments()

    def clear(self) -> None:
        """Nothing is stored any more, and nothing borrowed. Publishes."""
        self.borrowed = self._static = self.ring_born = ()
        self._num_ring_born_tokens = self._num_kept = 0
        self._leaving.clear()
        self._ring.release(self._ring.tail_stop)
        self._ring.tokens[:] = SEPARATOR
        self._publish_segments()

    def _evict(self, num_new_tokens: int) -> bool:
        """Drop the oldest segments until ``num_new_tokens`` more tokens fit; kept ones where there are no others."""
        capacity, before = self.config.capacity_tokens, len(self.ring_born)
        while self.ring_born and self._num_ring_born_tokens + len(self._ring) + num_new_tokens > capacity:
            self._drop(self._num_kept if self._num_kept < len(self.ring_born) else 0)
        return len(self.ring_born) < before

    def _trim_kept(self) -> None:
        """Drop the oldest kept segments until the others are no more than their share."""
        while self.num_kept_tokens > _KEPT_SHARE * self.config.capacity_tokens:
            self._drop(0)

    def _drop(self, number: int) -> None:
        """Take a segment out of the search; what is of use of a recent one may come back."""
        segment, was_kept = self.ring_born[number], number < self._num_kept
        self.ring_born = (*self.ring_born[:number], *self.ring_born[number + 1 :])
        self._num_ring_born_tokens -= len(segment)
        self._num_kept -= was_kept
        self.num_evicted_segments += 1
        self.num_evicted_tokens += len(segment)
        if not was_kept:
            self._leaving.append(segment)
            while sum(map(len, self._leaving)) > 2 * self.max_segment_tokens:  # nobody comes for them
                self._leaving.popleft()

    def _publish_segments(self) -> None:
        self._table = SegmentTable((*self.borrowed, *self._static, *self.ring_born))
        left = self._leaving[0].start if self._leaving else None
        self._outputs.forget_before(self.recent_position if left is None else left)
        self.publish()
