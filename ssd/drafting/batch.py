"""Rows for one kernel call: the requests of a batch that share a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.retrieval.search import Int64s, TokenIds, address
from ssd.retrieval.snapshot import Snapshot

MAX_DRAFT = 128
"""Longest draft; a greater limit is cut to it."""

_EMPTY = Snapshot(0, (), np.zeros((0, 3), np.int64), np.zeros(1, np.int32), 0, 0)


class Batch:
    """Preallocated rows and results, reused by every call; grows, never shrinks.

    ``rows`` : int64[n, 3], context address, length, limit. ``tokens`` : int32[n, MAX_DRAFT]. ``probabilities`` :
    float64 of that shape. ``results`` : int64[n, 3], see the kernels. ``biases`` : float64[n]. ``intervals`` :
    int64[2, segments].
    """

    def __init__(self) -> None:
        self.intervals: Int64s = np.empty((2, 64), np.int64)
        self._grow(16)

    def _grow(self, size: int) -> None:
        self.rows: Int64s = np.zeros((size, 3), np.int64)
        self.tokens: TokenIds = np.empty((size, MAX_DRAFT), np.int32)
        self.probabilities = np.empty((size, MAX_DRAFT), np.float64)
        self.results: Int64s = np.zeros((size, 3), np.int64)
        self.biases = np.zeros(size, np.float64)

    def fill(self, requests: Sequence[DraftRequest]) -> list[TokenIds]:
        """Write a row for every request. The result keeps the contexts alive: hold it until the kernel returns."""
        if len(requests) > len(self.rows):
            self._grow(2 * len(requests))
        contexts = []
        for i, request in enumerate(requests):
            context = request.context
            if context.dtype != np.int32 or not context.flags.c_contiguous:
                context = np.ascontiguousarray(context, np.int32)
            contexts.append(context)
            row = self.rows[i]
            row[0], row[1], row[2] = address(context), len(context), max(0, min(request.limit, MAX_DRAFT))
        return contexts

    def room_for(self, snapshot: Snapshot) -> None:
        """Make ``intervals`` wide enough for the segments of ``snapshot``."""
        if len(snapshot.segments) > self.intervals.shape[1]:
            self.intervals = np.empty((2, 2 * len(snapshot.segments)), np.int64)

    def draft(self, row: int) -> Draft:
        """The draft that the kernel wrote in ``row``."""
        size, match_length, own = self.results[row].tolist()
        if size == 0:
            return EMPTY_DRAFT
        return Draft(self.tokens[row, :size].copy(), match_length, "own" if own else "index")


def by_snapshot(requests: Sequence[DraftRequest]) -> Iterator[tuple[Snapshot, list[int]]]:
    """Group requests by the snapshot they look at; no snapshot is an empty one."""
    groups: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(id(request.snapshot), []).append(i)
    for members in groups.values():
        yield requests[members[0]].snapshot or _EMPTY, members
