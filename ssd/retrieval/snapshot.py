"""What a lookup sees: immutable segments and the part of the ring that no segment holds yet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Address, Int64, Record, Records, address, view_of, views_of
from ssd.retrieval.segment import GUARD_BYTES, Segment

_table_numbers = itertools.count(1)


class SegmentRecord(Record):
    """A segment as kernels find it.

    ``text`` : of the first code. ``order``, ``fence`` : of the segment's arrays. ``width`` : bytes of a code.
    """

    text: Address
    order: Address
    fence: Address
    num_tokens: Int64
    width: Int64


class SnapshotRecord(Record):
    """A snapshot as kernels find it.

    ``segments`` : SegmentRecord[num_segments], the first ``num_static`` of which are static. ``table_number`` : of the
    ``SegmentTable``. ``ring`` : int32[ring_size].
    """

    segments: Address
    num_segments: Int64
    num_static: Int64
    table_number: Int64
    ring: Address
    ring_size: Int64
    tail_start: Int64
    tail_stop: Int64


segments_at = views_of(SegmentRecord)
snapshot_at = view_of(SnapshotRecord)


class SegmentTable:
    """Segments as kernels find them; valid while this is alive.

    ``segments`` : static ones first, ``num_static`` of them. ``number`` : no other table has it; 0 of one without
    segments.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.records = Records(SegmentRecord, len(segments))
        for at, segment in zip(self.records, segments, strict=True):
            at.text, at.order = address(segment.text) + GUARD_BYTES, address(segment.order)
            at.fence = address(segment.fence)
            at.num_tokens, at.width = len(segment), segment.width
        self.number = next(_table_numbers) if segments else 0
        self.num_static = sum(segment.start is None for segment in segments)


class Snapshot:
    """One generation of an index. Immutable, safe to read from any thread.

    Segments never change. The tail lies in the ring, which is overwritten about ``len(ring)`` tokens later: a snapshot
    held that long reads newer tokens there, never anything that was not a token. Take a fresh one for every lookup.

    ``segments`` : static ones first, then those of the ring, oldest first.
    ``segment_table`` : of ``segments``, for the kernels.
    ``ring`` : int32[power of two]. Absolute position p lies at ``ring[p & (len(ring) - 1)]``. Positions
        [tail_start, tail_stop) are the tail: stored, whole sequences, in no segment yet.
    ``address`` : of the record by which a kernel finds all this.
    """

    __slots__ = (
        "_record", "address", "generation", "ring", "segment_table", "segments", "tail_start", "tail_stop",
    )  # fmt: skip

    def __init__(
        self, generation: int, table: SegmentTable, ring: npt.NDArray[np.int32], tail_start: int, tail_stop: int
    ) -> None:
        self.generation, self.segment_table, self.segments = generation, table, table.segments
        self.ring, self.tail_start, self.tail_stop = ring, tail_start, tail_stop
        self._record = Records(SnapshotRecord)
        self.address = self._record.address
        at = self._record[0]
        at.segments, at.num_segments = table.records.address, len(table.segments)
        at.num_static, at.table_number = table.num_static, table.number
        at.ring, at.ring_size, at.tail_start, at.tail_stop = address(ring), len(ring), tail_start, tail_stop

    @property
    def num_tokens(self) -> int:
        """Tokens that can be matched, separators included."""
        return sum(len(segment) for segment in self.segments) + self.tail_stop - self.tail_start
