"""The tables of keyed choices that one drafter keeps, one a namespace, and what goes into them."""

from __future__ import annotations

from ssd.drafting.protocol import DraftRequest
from ssd.drafting.sequence_noise import SequenceNoise
from ssd.drafting.suffix.keyed_choices import KeyedChoices, learn_choices
from ssd.drafting.suffix.namespace_tables import NamespaceTables
from ssd.retrieval.segment_store import LearnedState


class NamespaceChoices:
    """Keyed choices by namespace, 128 MB at most. No locks: owned by the drafter's thread.

    A request that draws with coupled noise drafts from what its namespace knows; one that may not teach adds nothing.
    Nothing is kept on disk.
    """

    def __init__(self) -> None:
        self._tables = NamespaceTables(KeyedChoices)
        self._running: dict[str, tuple[SequenceNoise, LearnedState, bool]] = {}

    def begin_pass(self) -> None:
        """Another call for drafts begins."""
        self._tables.begin_pass()

    def of(self, request: DraftRequest) -> int:
        """Address of what a request drafts from, 0 for nothing; its noise, if it has one, is held until it ends. O(1).

        Holds until the next ``begin_pass`` or ``ended``.
        """
        sampling, learned = request.sampling, request.learned
        if sampling is None or learned is None or not sampling.noise.is_coupled:
            return 0
        self._running[request.request_id] = sampling.noise, learned, request.may_teach
        table = self._table_for(learned, request.may_teach)
        return 0 if table is None else table.address

    def ended(self, request_id: str) -> None:
        """Take up what a request was told last and forget it."""
        found = self._running.pop(request_id, None)
        if found is None:
            return
        noise, learned, may_teach = found
        table = self._table_for(learned, may_teach)
        if table is not None:
            learn_choices(table.address, noise.address, may_teach)

    def _table_for(self, learned: LearnedState, may_teach: bool) -> KeyedChoices | None:
        table = self._tables.used(learned) if may_teach else self._tables.get(learned)
        if table is not None:
            table.make_room()
        return table
