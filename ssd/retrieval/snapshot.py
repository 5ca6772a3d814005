"""An immutable view of a namespace's index for lookups: the segments and the memtable."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Address, Int64, Record, Records, address, view_of, views_of
from ssd.retrieval.segment import GUARD_BYTES, Segment

_table_numbers = itertools.count(1)


class SegmentRecord(Record):
    """A segment of the retrieval cache in the form that numba kernels read.

    Attributes:
        text: The address of the packed text's first token.
        order: The address of the suffix array.
        width: Bytes per token.
    """

    text: Address
    order: Address
    sparse_index: Address
    num_tokens: Int64
    width: Int64


class SnapshotRecord(Record):
    """A snapshot of the retrieval cache in the form that numba kernels read.

    Attributes:
        segments: The address of SegmentRecord[num_segments], prebuilt segments first.
        table_number: The number of the ``SegmentTable``.
        ring: The address of the ring buffer, int32[ring_size].
        memtable_start: The first ring-buffer position of the memtable.
        memtable_stop: The ring-buffer position after the memtable.
    """

    segments: Address
    num_segments: Int64
    num_prebuilt: Int64
    table_number: Int64
    ring: Address
    ring_size: Int64
    memtable_start: Int64
    memtable_stop: Int64


segments_at = views_of(SegmentRecord)
snapshot_at = view_of(SnapshotRecord)


class SegmentTable:
    """The segments of a snapshot in the form that numba kernels read, valid as long as this object exists.

    Attributes:
        segments: The segments, prebuilt ones first.
        records: The kernels' records.
        number: A unique number; 0 for a table without segments.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.records = Records(SegmentRecord, len(segments))
        for at, segment in zip(self.records, segments, strict=True):
            at.text, at.order = address(segment.text) + GUARD_BYTES, address(segment.order)
            at.sparse_index = address(segment.sparse_index)
            at.num_tokens, at.width = len(segment), segment.width
        self.number = next(_table_numbers) if segments else 0
        self.num_prebuilt = sum(segment.start is None for segment in segments)


class Snapshot:
    """An immutable view of a namespace's index at one time, safe to read from any thread.

    Segments never change. The memtable is in the ring buffer, which is overwritten after about ``len(ring)`` more
    tokens. A reader of an older snapshot reads newer tokens there, but never anything that was not a token. Take a new
    snapshot for every lookup.

    Attributes:
        generation: A number that grows with every snapshot of the index.
        segments: The segments, prebuilt ones first, then ring segments, oldest first.
        ring: int32[power of two]. Absolute position p is at ``ring[p & (len(ring) - 1)]``.
        memtable_start: The first position of the memtable: stored whole sequences that are in no segment yet.
        memtable_stop: The position after the memtable.
        address: The address of the SnapshotRecord, for numba kernels.
    """

    __slots__ = (
        "_record",
        "address",
        "generation",
        "memtable_start",
        "memtable_stop",
        "ring",
        "segment_table",
        "segments",
    )

    def __init__(
        self, generation: int, table: SegmentTable, ring: npt.NDArray[np.int32], memtable_start: int, memtable_stop: int
    ) -> None:
        self.generation, self.segment_table, self.segments = generation, table, table.segments
        self.ring, self.memtable_start, self.memtable_stop = ring, memtable_start, memtable_stop
        self._record = Records(SnapshotRecord)
        self.address = self._record.address
        at = self._record[0]
        at.segments, at.num_segments = table.records.address, len(table.segments)
        at.num_prebuilt, at.table_number = table.num_prebuilt, table.number
        at.ring, at.ring_size = address(ring), len(ring)
        at.memtable_start, at.memtable_stop = memtable_start, memtable_stop

    @property
    def num_tokens(self) -> int:
        """The number of stored tokens that a lookup can match, separators included."""
        return sum(len(segment) for segment in self.segments) + self.memtable_stop - self.memtable_start
