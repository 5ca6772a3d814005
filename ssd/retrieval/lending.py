"""What other namespaces search beside their own text: segments of the set's first one, the same objects."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from ssd.retrieval.namespace import Namespace
from ssd.retrieval.segment import Segment
from ssd.retrieval.suffix_cache import SuffixCache


class Lending:
    """Segments of ``owner`` for others: those of warm-up directories for all, what it sealed for its readers.

    Segments never change, so lending one costs no memory; a tail is lent once it is sealed. Borrowers get new tuples
    when the owner's segments have changed. Safe from any thread.
    """

    def __init__(self, owner: SuffixCache) -> None:
        self._owner = owner
        self._lock = threading.Lock()  # held while one namespace gets what there is for it
        self._warm_ids: frozenset[str] = frozenset()
        self._table = -1
        self._warm: tuple[Segment, ...] = ()
        self._all: tuple[Segment, ...] = ()

    def lend_to_all(self, segment_ids: frozenset[str]) -> None:
        """These segments of the owner are for every namespace."""
        with self._lock:
            self._warm_ids |= segment_ids
            self._table = -1

    def refresh(self, namespace: Namespace, cache: SuffixCache) -> None:
        """Give ``cache`` of ``namespace`` what there is by now on its terms, if that is new to it. O(segments)."""
        if cache is self._owner:
            return
        with self._lock:
            if self._owner.snapshot().segment_table.number != self._table:
                self._collect()
            lent = self._all if namespace.terms.reads_shared else self._warm
            if cache.borrowed is not lent:
                cache.borrow(lent)

    def _collect(self) -> None:
        """Tuples that stay the same objects while what they hold does."""
        snapshot = self._owner.snapshot()
        self._table = snapshot.segment_table.number
        known = {segment.segment_id: segment for segment in self._all}
        found = []
        for segment in snapshot.segments:
            lent = known.get(segment.segment_id)
            # The same arrays, and to the kernels a segment outside the ring: its positions are not the borrower's.
            found.append(lent if lent is not None and lent.text is segment.text else replace(segment, start=None))
        warm = [segment for segment in found if segment.segment_id in self._warm_ids]
        self._all = self._all if _are_same(found, self._all) else tuple(found)
        self._warm = self._warm if _are_same(warm, self._warm) else tuple(warm)


def _are_same(some: Sequence[Segment], others: Sequence[Segment]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
