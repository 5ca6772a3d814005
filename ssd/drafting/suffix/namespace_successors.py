"""The tables of successors that one drafter keeps: one a namespace, and one for a request that shares with nobody."""

from __future__ import annotations

import numpy as np

from ssd.compiled.addresses import address
from ssd.compiled.records import dtype_of
from ssd.drafting.protocol import ScoredPass
from ssd.drafting.suffix.namespace_tables import MOST_TABLES, NamespaceTables
from ssd.drafting.suffix.successors import SuccessorTable, learn_successors
from ssd.retrieval.segment_store import LearnedState


class _Table:
    """Memory of zeros, which the system gives as far as it is written."""

    def __init__(self) -> None:
        self._memory = np.zeros(1, dtype_of(SuccessorTable))
        self.address = address(self._memory)


class NamespaceSuccessors:
    """Tables by namespace, and of requests that have none by request. No locks: owned by the drafter's thread.

    What one namespace said is drafted in no other, not where its index is lent either. A request without a namespace
    learns from itself alone, and is forgotten when it ends; one that is not to be learned from drafts from what its
    namespace knows and adds nothing. Nothing is kept on disk: a few passes make it anew. All tables of namespaces
    take 63 MB at most, as far as they are written, and there are as many again of requests of their own.
    """

    def __init__(self) -> None:
        self._tables = NamespaceTables(_Table)
        self._own: dict[str, _Table] = {}

    def of(self, learned: LearnedState | None, request_id: str) -> int:
        """Address of what a request drafts from, 0 for nothing; holds until the next ``learn`` or ``ended``. O(1)."""
        found = self._own.get(request_id) if learned is None else self._tables.get(learned)
        return 0 if found is None else found.address

    def learn(self, scored: ScoredPass) -> None:
        """Enter what a pass said, each row in the table that its request drafts from. O(positions)."""
        self._tables.begin_pass()
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
        table = self._tables.used(learned)
        return 0 if table is None else table.address
