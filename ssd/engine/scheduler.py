"""Who runs: requests wait in order of arrival, a slot each while they run."""

from __future__ import annotations

from collections import deque

from ssd.engine.sequence import Sequence


class Scheduler:
    """Slots and the sequences in them. Touched by the thread that steps the engine only."""

    def __init__(self, num_slots: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(num_slots))
        self._num_slots = num_slots

    def admit(self) -> list[Sequence]:
        """Give free slots, lowest first, to those that have waited longest; returns the newly running."""
        admitted = []
        while self.waiting and self._free_slots:
            sequence = self.waiting.popleft()
            sequence.slot = self._free_slots.pop(0)
            self.running.append(sequence)
            admitted.append(sequence)
        # In slot order: a batch of the first slots needs no gather of keys and values.
        self.running.sort(key=lambda running: running.slot)
        return admitted

    def release(self, sequence: Sequence) -> None:
        """Take a sequence off its slot."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._free_slots.sort()
        sequence.slot = -1

    def check_integrity(self) -> None:
        """Every slot is free or taken by exactly one sequence."""
        slots = sorted(self._free_slots + [sequence.slot for sequence in self.running])
        assert slots == list(range(self._num_slots)), f"slots {slots} of {self._num_slots}"
