"""Who runs: requests wait for their turn, a slot each while they run."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable

from ssd.engine.prefix_reuse import PrefixReuse
from ssd.engine.sequence import Sequence

AGEING_STEPS = 64
"""A request that has waited this many steps longer counts as one priority more urgent."""


class Scheduler:
    """Slots, the sequences in them, and those that wait. Touched by the thread that steps the engine only.

    A request of priority p that arrives at step t has turn ``p * ageing_steps + t``, and the lowest turn goes first: by
    priority, first come first served within one, and of later requests whose priority is lower by d only those overtake
    it that arrive within ``d * ageing_steps`` steps. Turns never change, so nothing is sorted again as requests age.

    All slots and their memory are reserved, so nothing is ever preempted for lack of memory. Where no slot is free, the
    request whose turn it is takes the slot of the running one with the highest turn among those with a higher
    ``priority``, unless that one has waited its way past it. Who was preempted keeps its tokens and its turn; it goes
    on when it gets a slot again, and its output stays the same. Since turns are fixed, two requests never take the slot
    from each other in turn.
    """

    def __init__(self, num_slots: int, reuse: PrefixReuse, *, ageing_steps: int = AGEING_STEPS) -> None:
        self.waiting: list[Sequence] = []
        """In the order of their turns."""
        self.running: list[Sequence] = []
        """In the order of their slots."""
        self._free_slots = set(range(num_slots))
        self._reuse = reuse
        self._ageing_steps = ageing_steps
        self._num_steps = 0
        self._num_arrivals = 0

    @property
    def free_slots(self) -> frozenset[int]:
        """Slots that no sequence has."""
        return frozenset(self._free_slots)

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Let them wait for their turn. O(waiting) each."""
        for sequence in sequences:
            self._num_arrivals += 1
            sequence.turn = (sequence.request.priority * self._ageing_steps + self._num_steps, self._num_arrivals)
            insort(self.waiting, sequence, key=_turn)

    def admit(self) -> list[Sequence]:
        """Begin a step: give slots to those whose turn it is; returns the sequences that had to make room."""
        self._num_steps += 1
        if self.waiting and not self.running:
            self._reuse.reclaim()
        preempted = []
        while self.waiting:
            if not self._free_slots:
                victim = self._victim(self.waiting[0])
                if victim is None:
                    break
                self.release(victim)
                victim.num_preemptions += 1
                insort(self.waiting, victim, key=_turn)
                preempted.append(victim)
            sequence = self.waiting.pop(0)
            self._reuse.place(sequence, self._free_slots, self.running)
            self._free_slots.remove(sequence.slot)
            sequence.stats.started_s = sequence.stats.started_s or time.perf_counter()
            self.running.append(sequence)
        # In slot order: a batch of neighbouring slots needs no gather of keys and values.
        self.running.sort(key=lambda running: running.slot)
        return preempted

    def release(self, sequence: Sequence) -> None:
        """Take a sequence off its slot, which keeps what it holds."""
        self._reuse.keep(sequence)
        self.running.remove(sequence)
        self._free_slots.add(sequence.slot)
        sequence.slot = -1

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and empty its slot: what that holds is not known."""
        if sequence.slot < 0:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._free_slots.add(sequence.slot)
        slot, sequence.slot = sequence.slot, -1
        self._reuse.forget(slot)

    def remove(self, request_ids: set[str]) -> list[Sequence]:
        """Take these requests out, wherever they are; unknown ones are ignored."""
        found = [s for s in (*self.waiting, *self.running) if s.request.request_id in request_ids]
        for sequence in found:
            if sequence.slot < 0:
                self.waiting.remove(sequence)
            else:
                self.release(sequence)
        return found

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The running sequence that must make room for one whose turn it is."""
        later = [
            running
            for running in self.running
            if running.request.priority > sequence.request.priority and running.turn > sequence.turn
        ]
        return max(later, key=_turn, default=None)


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn
