"""What a lookup sees: immutable segments and the part of the ring that no segment holds yet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.compiled.addresses import address
from ssd.compiled.records import Address, Int64, Record, Records, view_of, views_of
from ssd.errors import SegmentCorrupt
from ssd.retrieval.packed import GUARD_BYTES, unpack

SEPARATOR = -1
"""Ends every stored sequence. Never a token id, so no match and no continuation runs across it."""

FENCE_STEP = 32
"""One post of a segment's fence for this many positions: a quarter byte a token."""

_table_numbers = itertools.count(1)


class SharedBytes(Protocol):
    """Memory whose bytes somebody else can change: a file, ``path``, that is mapped."""

    @property
    def path(self) -> Path:
        """Where it was opened."""
        ...

    def has_changed(self) -> bool:
        """Whether they are no longer what they were when they were checked; O(1), and once True, always."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Immutable text with the suffix array of its reversal; the arrays may lie in a file that is mapped.

    ``text`` : uint8, whole sequences, each closed by ``SEPARATOR``, packed in ``width`` bytes a token (see ``packed``).
    ``order`` : int32[n], the positions 1..n of the text ordered by what stands before them, read backwards from the
        position. Positions preceded by the same tokens are neighbours, and the more tokens agree the nearer they are.
    ``fence`` : uint64[ceil(n / FENCE_STEP)], the eight bytes of packed text before every FENCE_STEP-th position of the
        order: a search begins there, in memory that lies together.
    ``start`` : absolute ring position of the first token, or None for a static segment, which the ring never evicts.
    ``segment_id`` : unique name within its directory.
    ``checksum`` : xxh3-64 of ``text`` when it was built or read; what is made of the text later is made of these bytes.
    ``shared`` : what the arrays lie in, None for memory that is this process's own.
    """

    text: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int32]
    fence: npt.NDArray[np.uint64]
    width: int
    start: int | None
    segment_id: str
    checksum: int | None = None
    shared: SharedBytes | None = None

    def __len__(self) -> int:
        return len(self.order)

    @property
    def stop(self) -> int | None:
        """One past the last absolute ring position, or None for a static segment."""
        return None if self.start is None else self.start + len(self.order)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32[n], unpacked: a new array at every call. O(n)."""
        return unpack(self.text, len(self.order), self.width)


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


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """Segments as kernels find them; valid while these are alive.

    ``number`` : no other table has it; 0 of one without segments. ``num_static`` : how many, the first, are static.
    """

    records: Records[SegmentRecord]
    number: int
    num_static: int

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One generation of an index. Safe to read from any thread.

    Segments never change. The tail lies in the ring, which is overwritten about ``len(ring)`` tokens later: a snapshot
    held that long reads newer tokens there, never anything that was not a token. Take a fresh one for every lookup.

    ``segments`` : static ones first, then those of the ring, oldest first.
    ``segment_table`` : of ``segments``, for the kernels.
    ``ring`` : int32[power of two]. Absolute position p lies at ``ring[p & (len(ring) - 1)]``. Positions
        [tail_start, tail_stop) are the tail: stored, whole sequences, in no segment yet.
    ``record`` : what a kernel needs to find all this; it lies at ``address``.
    """

    generation: int
    segments: tuple[Segment, ...]
    segment_table: SegmentTable
    ring: npt.NDArray[np.int32]
    tail_start: int
    tail_stop: int
    record: Records[SnapshotRecord]
    address: int

    @property
    def num_tokens(self) -> int:
        """Tokens that can be matched, separators included."""
        return sum(len(segment) for segment in self.segments) + self.tail_stop - self.tail_start


def make_snapshot(
    generation: int,
    segments: tuple[Segment, ...],
    table: SegmentTable,
    ring: npt.NDArray[np.int32],
    tail_start: int,
    tail_stop: int,
) -> Snapshot:
    """A snapshot of these; ``table`` is ``segment_table(segments)``."""
    record = Records(SnapshotRecord)
    at = record[0]
    at.segments, at.num_segments, at.num_static = table.records.address, len(table), table.num_static
    at.table_number = table.number
    at.ring, at.ring_size, at.tail_start, at.tail_stop = address(ring), len(ring), tail_start, tail_stop
    return Snapshot(generation, segments, table, ring, tail_start, tail_stop, record, record.address)


def concatenate(segments: Sequence[Segment]) -> npt.NDArray[np.int32]:
    """int32: the tokens of ``segments``, one after the other. O(their sum).

    Raises SegmentCorrupt when a text is not what its checksum says: what is made of it would have a right one.
    """
    tokens = np.empty(sum(map(len, segments)), np.int32)
    start = 0
    for segment in segments:
        text = checked_text(segment)
        unpack(text, len(segment), segment.width, tokens[start : start + len(segment)])
        start += len(segment)
    return tokens


def checked_text(segment: Segment) -> npt.NDArray[np.uint8]:
    """The segment's text, or a copy where others can change it; raises SegmentCorrupt when it was changed. O(n)."""
    text = segment.text if segment.shared is None else segment.text.copy()  # what is checked is what is used
    if segment.checksum is not None and text_checksum(text) != segment.checksum:
        raise SegmentCorrupt(
            f"the text of segment {segment.segment_id} was changed in memory after it was checked: it is not used "
            "any more. If its file was not written to, suspect the machine's memory"
        )
    return text


def text_checksum(text: npt.NDArray[np.uint8]) -> int:
    """xxh3-64 of a packed text, its guards included."""
    return xxhash.xxh3_64_intdigest(text.data)


def segment_table(segments: Sequence[Segment]) -> SegmentTable:
    """The table of ``segments``, static ones first."""
    records = Records(SegmentRecord, len(segments))
    for at, segment in zip(records, segments, strict=True):
        at.text, at.order, at.fence = (
            address(segment.text) + GUARD_BYTES,
            address(segment.order),
            address(segment.fence),
        )
        at.num_tokens, at.width = len(segment), segment.width
    number = next(_table_numbers) if segments else 0
    return SegmentTable(records, number, sum(segment.start is None for segment in segments))
