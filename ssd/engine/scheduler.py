"""Admission of waiting requests to slots of the KV cache, by tenant and priority."""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterable

from ssd.engine.prefix_cache import PrefixCache
from ssd.engine.sequence import Sequence

AGEING_STEPS = 64
"""The number of engine steps after which a waiting request is treated as if its priority were one level higher."""


class Scheduler:
    """Assigns the slots of the KV cache to waiting sequences.

    Tenants take turns: of the tenants with a waiting request and fewer than ``Request.max_running`` running ones, the
    one that was given a slot longest ago is next. Requests without a tenant count as one tenant. The following applies
    within a tenant.

    A request of priority p that arrives at step t has the queue key ``p * ageing_steps + t``, and the lowest key is
    admitted first: by priority, and first come, first served within a priority. A more urgent request overtakes a
    request that has waited long only if the priorities differ by more than the waiting time / ``ageing_steps``. Keys
    never change, so queues need no resorting as requests age.

    The memory of all slots is reserved, so no request is preempted for lack of memory. If a request can get no free
    slot, it may preempt a less urgent running request of the same tenant: one with a higher ``priority`` value and a
    higher key. Of several such requests, the one with the highest key is preempted. A preempted request keeps its
    tokens and key, and later continues with the same output. As keys are fixed, two requests never preempt each other
    alternately.

    Only the thread that steps the engine may use the scheduler; any thread may read the counts.
    """

    def __init__(self, num_slots: int, prefix_cache: PrefixCache, *, ageing_steps: int = AGEING_STEPS) -> None:
        self._queues: dict[str | None, list[Sequence]] = {}  # by tenant, the next one first; each in queue order
        self.running: list[Sequence] = []
        self.num_waiting = 0
        self._free_slots = set(range(num_slots))
        self._prefix_cache = prefix_cache
        self._ageing_steps = ageing_steps
        self._num_steps = 0
        self._num_arrivals = 0

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting sequences of all tenants, in queue order within each tenant. O(waiting)."""
        return [sequence for queue in self._queues.values() for sequence in queue]

    @property
    def free_slots(self) -> frozenset[int]:
        return frozenset(self._free_slots)

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Add new sequences to the queues of their tenants. O(waiting) for each sequence."""
        for sequence in sequences:
            self._num_arrivals += 1
            sequence.queue_key = (sequence.request.priority * self._ageing_steps + self._num_steps, self._num_arrivals)
            self._insert(sequence)

    def admit(self) -> list[Sequence]:
        """Assign slots to waiting sequences at the start of a step, and return the sequences that were preempted."""
        self._num_steps += 1
        if self._queues and not self.running:
            self._prefix_cache.drop_overwritten()
        preempted = []
        while (found := self._next_admission()) is not None:
            sequence, victim = found
            self._dequeue(sequence)
            if (queue := self._queues.pop(sequence.request.tenant, None)) is not None:
                self._queues[sequence.request.tenant] = queue  # move the tenant to the end
            if victim is not None:
                self.release(victim)
                victim.num_preemptions += 1
                self._insert(victim)
                preempted.append(victim)
            self._prefix_cache.assign_slot(sequence, self._free_slots, self.running)
            self._free_slots.remove(sequence.slot)
            sequence.stats.started_s = sequence.stats.started_s or time.perf_counter()
            # In slot order, because a batch of adjacent slots needs no gather of the KV cache.
            insort(self.running, sequence, key=_slot)
        return preempted

    def release(self, sequence: Sequence) -> None:
        """Remove a sequence from its slot, whose KV cache stays available for prefix caching."""
        self._prefix_cache.retain(sequence)
        self._free_slot(sequence)

    def _free_slot(self, sequence: Sequence) -> int:
        slot, sequence.slot = sequence.slot, -1
        self.running.remove(sequence)
        self._free_slots.add(slot)
        if sequence.grammar is not None:
            sequence.grammar.release_memory()
        return slot

    def discard(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence after a failure, and clear its slot, whose content is then unknown."""
        if sequence.slot < 0:
            if sequence in self._queues.get(sequence.request.tenant, ()):
                self._dequeue(sequence)
            return
        self._prefix_cache.clear_slot(self._free_slot(sequence))

    def remove(self, request_ids: set[str]) -> list[Sequence]:
        found = [s for s in (*self.waiting, *self.running) if s.request.request_id in request_ids]
        for sequence in found:
            if sequence.slot < 0:
                self._dequeue(sequence)
            else:
                self.release(sequence)
        return found

    def _insert(self, sequence: Sequence) -> None:
        insort(self._queues.setdefault(sequence.request.tenant, []), sequence, key=_queue_key)
        self.num_waiting += 1

    def _dequeue(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.request.tenant]
        queue.remove(sequence)
        self.num_waiting -= 1
        if not queue:
            del self._queues[sequence.request.tenant]

    def can_admit(self) -> bool:
        """Return whether a waiting request could get a slot now. O(tenants + running)."""
        return self._next_admission() is not None

    def _next_admission(self) -> tuple[Sequence, Sequence | None] | None:
        if not self._queues:
            return None
        num_running = Counter(running.request.tenant for running in self.running)
        least_urgent = max((running.request.priority for running in self.running), default=0)
        for tenant, queue in self._queues.items():
            first = queue[0]
            max_running = first.request.max_running
            if self._free_slots and (max_running is None or num_running[tenant] < max_running):
                return first, None
            if first.request.priority < least_urgent and (victim := self._victim(first)) is not None:
                return first, victim
        return None

    def _victim(self, sequence: Sequence) -> Sequence | None:
        later = [
            running
            for running in self.running
            if running.request.tenant == sequence.request.tenant
            and running.request.priority > sequence.request.priority
            and running.queue_key > sequence.queue_key
        ]
        return max(later, key=_queue_key, default=None)


def _slot(sequence: Sequence) -> int:
    return sequence.slot


def _queue_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.queue_key
