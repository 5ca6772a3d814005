"""Who runs: requests wait for their turn, a slot each while they run."""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterable

from ssd.engine.prefix_reuse import PrefixReuse
from ssd.engine.sequence import Sequence

AGEING_STEPS = 64
"""A request that has waited this many steps longer counts as one priority more urgent."""


class Scheduler:
    """Slots, the sequences in them, and those that wait. Touched by the thread that steps the engine only.

    Tenants take turns: of those that have somebody waiting and may run more (``Request.max_running``), the one that was
    given a slot longest ago is next. All requests without a tenant are one. What follows holds among those of one.

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
        self._lines: dict[str | None, list[Sequence]] = {}  # by tenant: the next first; each in the order of turns
        self.running: list[Sequence] = []
        """In the order of their slots."""
        self._free_slots = set(range(num_slots))
        self._reuse = reuse
        self._ageing_steps = ageing_steps
        self._num_steps = 0
        self._num_arrivals = 0

    @property
    def waiting(self) -> list[Sequence]:
        """Those without a slot; of each tenant in the order of their turns. O(waiting)."""
        return [sequence for line in self._lines.values() for sequence in line]

    @property
    def num_waiting(self) -> int:
        """How many have no slot. O(tenants)."""
        return sum(map(len, self._lines.values()))

    @property
    def free_slots(self) -> frozenset[int]:
        """Slots that no sequence has."""
        return frozenset(self._free_slots)

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Let them wait for their turn. O(waiting) each."""
        for sequence in sequences:
            self._num_arrivals += 1
            sequence.turn = (sequence.request.priority * self._ageing_steps + self._num_steps, self._num_arrivals)
            self._line_up(sequence)

    def admit(self) -> list[Sequence]:
        """Begin a step: give slots to those whose turn it is; returns the sequences that had to make room."""
        self._num_steps += 1
        if self._lines and not self.running:
            self._reuse.reclaim()
        preempted = []
        while (found := self._next()) is not None:
            sequence, victim = found
            line = self._lines.pop(sequence.request.tenant)
            line.remove(sequence)
            if line:
                self._lines[sequence.request.tenant] = line  # the other tenants come first now
            if victim is not None:
                self.release(victim)
                victim.num_preemptions += 1
                self._line_up(victim)
                preempted.append(victim)
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
            if sequence in self._lines.get(sequence.request.tenant, ()):
                self._leave_line(sequence)
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
                self._leave_line(sequence)
            else:
                self.release(sequence)
        return found

    def _line_up(self, sequence: Sequence) -> None:
        insort(self._lines.setdefault(sequence.request.tenant, []), sequence, key=_turn)

    def _leave_line(self, sequence: Sequence) -> None:
        line = self._lines[sequence.request.tenant]
        line.remove(sequence)
        if not line:
            del self._lines[sequence.request.tenant]

    def _next(self) -> tuple[Sequence, Sequence | None] | None:
        """Who gets a slot next, and who must make room for that; None where nobody can. O(tenants + running)."""
        if not self._lines:
            return None
        num_running = Counter(running.request.tenant for running in self.running)
        least_urgent = max((running.request.priority for running in self.running), default=0)
        for tenant, line in self._lines.items():
            first = line[0]
            most = first.request.max_running
            if self._free_slots and (most is None or num_running[tenant] < most):
                return first, None
            if first.request.priority < least_urgent and (victim := self._victim(first)) is not None:
                return first, victim
        return None

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The running sequence of the same tenant that must make room for one whose turn it is."""
        later = [
            running
            for running in self.running
            if running.request.tenant == sequence.request.tenant
            and running.request.priority > sequence.request.priority
            and running.turn > sequence.turn
        ]
        return max(later, key=_turn, default=None)


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn
