"""The tables of successors that one drafter keeps: one a namespace, and one for a request that shares with nobody."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from ssd.compiled.addresses import address
from ssd.compiled.records import dtype_of
from ssd.drafting.protocol import ScoredPass
from ssd.drafting.suffix.successors import SuccessorTable, learn_successors
from ssd.retrieval.learned_state import LearnedState

MOST_TABLES: Final = 16
"""Of namespaces: 63 MB at most, as far as they are written. As many again of requests of their own."""

IDLE_PASSES: Final = 64
"""Passes that a namespace must not have been part of before another's table takes the place of its own: were there a
few more busy namespaces than tables, all would lose theirs before they are read."""


class _Table:
    """Memory of zeros, which the system gives as far as it is written."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, dtype_of(SuccessorTable))
        self.address = address(self._memory)
        self.last_pass = 0


class NamespaceSuccessors:
    """Tables by namespace, and of requests that have none by request. No locks: owned by the drafter's thread.

    What one namespace said is drafted in no other, not where its index is lent either. A request without a namespace
    learns from itself alone, and is forgotten when it ends; one that is not to be learned from drafts from what its
    namespace knows and adds nothing. Nothing is kept on disk: a few passes make it anew.
    """

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[LearnedState, _Table] = WeakKeyDictionary()
        self._own: dict[str, _Table] = {}
        self._num_passes = self._full_until = 0

    def of(self, learned: LearnedState | None, request_id: str) -> int:
        """Address of what a request drafts from, 0 for nothing; holds until the next ``learn`` or ``ended``. O(1)."""
        found = self._own.get(request_id) if learned is None else self._tables.get(learned)
        return 0 if found is None else found.address

    def learn(self, scored: ScoredPass) -> None:
        """Enter what a pass said, each row in the table that its request drafts from. O(positions)."""
        self._num_passes += 1
        tables, table = list[int](), 0
        last: LearnedState | None = None
        for row in zip(scored.learned, scored.request_ids, scored.may_keep.tolist(), strict=True):
            learned, _, may_keep = row
            if (
                learned is None or not may_keep or learned is not last
            ):  # else as the row before: most are of one namespace
                table, last = self._table_for(*row), learned if may_keep else None
            tables.append(table)
        parents = scored.fed if scored.parents is None else scored.parents
        learn_successors(
            np.array(tables, np.int64),
            scored.before,
            scored.fed,
            scored.counts,
            parents,
            scored.parents is not None,
            scored.top_ids,
            scored.top_logits,
        )

    def ended(self, request_id: str) -> None:
        """Forget what is a request's own."""
        self._own.pop(request_id, None)

    def _table_for(self, learned: LearnedState | None, request_id: str, may_keep: bool) -> int:
        """Address of the table that a row is entered in, made if there is room; 0 for none."""
        if learned is None:
            own = self._own.get(request_id)
            if own is None and len(self._own) < MOST_TABLES:
                own = self._own[request_id] = _Table()
            return 0 if own is None else own.address
        if not may_keep:
            return 0
        table = self._tables.get(learned) or self._made_for(learned)
        if table is None:
            return 0
        table.last_pass = self._num_passes
        return table.address

    def _made_for(self, learned: LearnedState) -> _Table | None:
        if len(self._tables) >= MOST_TABLES:
            if self._num_passes < self._full_until:
                return None
            oldest = min(self._tables, key=lambda each: self._tables[each].last_pass)
            self._full_until = self._tables[oldest].last_pass + IDLE_PASSES
            if self._num_passes < self._full_until:
                return None
            del self._tables[oldest]
        table = self._tables[learned] = _Table()
        return table
