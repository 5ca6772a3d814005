"""Reading by slots: texts that a draft model or a head follows by itself, in parts, rows together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ssd.model.target import Target, pad_rows
from ssd.pricing.rate import Rate

READ_WIDTH = 8
"""Most positions of a pass that reads several rows at once; longer text is read row by row."""

_FORGETTING = 0.9
"""What a read part counts after each later one."""


@dataclass(slots=True, eq=False)
class TextSlot:
    """What one slot has read.

    ``text`` : int32[max_length], in its first ``num_known`` tokens the context as last seen; what follows was drafted.
    """

    slot: int
    text: npt.NDArray[np.int32]
    num_known: int = 0


Slot = TypeVar("Slot", bound=TextSlot)


class TextSlots(ABC, Generic[Slot]):
    """Slots that read on to the ends of their texts, each call so much that a long prompt stalls nobody."""

    def __init__(self, target: Target, chunk_tokens: int) -> None:
        """``target`` : whose slots these are, or whose features are read. ``chunk_tokens`` : most read in one call."""
        self._target = target
        self._chunk_tokens = chunk_tokens
        self._reading = Rate(_FORGETTING)

    def read(self, states: Sequence[Slot]) -> tuple[list[int], tuple[torch.Tensor, ...]]:
        """Read on to the end of each context; which of ``states`` are there, and what is said after it, [R, ...] each.

        The others have more to read than one call may; they go on in the next. Nothing is said where none is there.
        """
        budget = self._chunk_tokens
        ready = []
        for index, state in enumerate(states):
            ahead = max(0, self._unread(state) - READ_WIDTH)
            count = min(ahead, budget)
            if count:
                self._read_part(state, count)
                budget -= count
            if count == ahead:
                ready.append(index)
        if not ready:
            return [], ()
        found = [states[index] for index in ready]
        counts = [self._unread(state) for state in found]
        said = self._read(found, counts)
        rows = torch.arange(len(found), device=said[0].device)
        last = torch.tensor(counts, device=said[0].device) - 1
        return ready, tuple(each[rows, last] for each in said)

    @abstractmethod
    def reread(self) -> None:
        """Forget what all slots hold: a pass failed, and what it left behind is not known."""

    @abstractmethod
    def _unread(self, state: Slot) -> int:
        """Positions of the context that are still to be read."""

    @abstractmethod
    def _read(self, states: Sequence[Slot], counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Read the next ``counts`` positions of each context, and say what comes after each: [R, max(counts), ...]."""

    @abstractmethod
    def _skim(self, state: Slot, count: int) -> None:
        """Read the next positions of a context, after which nobody asks."""

    def _read_part(self, state: Slot, count: int) -> None:
        began = time.perf_counter()
        self._skim(state, count)
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        self._reading.observe(count, time.perf_counter() - began)

    def _seconds(self, num_unread: int) -> float:
        """Expected time to read so many positions, beyond what a pass takes anyway."""
        tokens_per_s = self._reading.tokens_per_s
        return max(0, num_unread - READ_WIDTH) / tokens_per_s if tokens_per_s else 0.0


class DraftSlots(TextSlots[TextSlot]):
    """Slots of a draft model by request. Whatever the target did with the last draft, a slot finds its way back.

    A slot has read ``target.length(slot)`` tokens of its text.
    """

    def __init__(self, target: Target, chunk_tokens: int) -> None:
        """``target`` : the draft model. ``chunk_tokens`` : most tokens read in one call of ``read``."""
        super().__init__(target, chunk_tokens)
        self._free = list(range(target.num_slots))
        self._open: dict[str, TextSlot] = {}

    @property
    def num_free(self) -> int:
        """Slots that no request has."""
        return len(self._free)

    def follow(self, request_id: str, context: npt.NDArray[np.int32]) -> TextSlot | None:
        """The request's slot, which forgets what it read that is not in ``context``; None where none is to be had.

        context : int32[n], 1 <= n <= the model's length, begins with what was seen before. O(new tokens).
        None when all slots are taken or a token is not in the model's vocabulary.
        """
        state = self._open.get(request_id)
        if state is None:
            if not self._free or not _is_within(context, self._target.vocab_size):
                return None
            state = TextSlot(self._free.pop(0), np.empty(self._target.max_length, np.int32))
            self._target.rollback(state.slot, 0)
            self._open[request_id] = state
        known, length = state.num_known, len(context)
        if not _is_within(context[known:], self._target.vocab_size):
            return None
        held = self._target.length(state.slot)
        # The last token is always read again or anew: its logits are what the draft begins with.
        drafted, actual = state.text[known : min(held, length - 1)], context[known : min(held, length - 1)]
        differs = np.flatnonzero(drafted != actual)
        agreed = min(known, length - 1) + (int(differs[0]) if len(differs) else len(drafted))
        self._target.rollback(state.slot, min(held, agreed))
        state.text[known:length] = context[known:]
        state.num_known = length
        return state

    def seconds_to_read(self, request_id: str, num_tokens: int) -> float:
        """Expected time to read what is new, beyond what a pass takes anyway, in a context of ``num_tokens``."""
        state = self._open.get(request_id)
        held = min(state.num_known, self._target.length(state.slot)) if state is not None else 0
        return self._seconds(num_tokens - held)

    def feed(self, states: Sequence[TextSlot]) -> torch.Tensor:
        """Read one more token of each text, which was put there after what the slot holds: logits [R, V]."""
        tokens = np.array([state.text[self._target.length(state.slot)] for state in states], np.int64)[:, None]
        return self._target.forward([state.slot for state in states], tokens, [1] * len(states)).logits[:, 0]

    def close(self, request_id: str) -> None:
        """Free the request's slot, if it has one."""
        state = self._open.pop(request_id, None)
        if state is not None:
            self._free.append(state.slot)
            self._free.sort()
            self._target.rollback(state.slot, 0)

    def reread(self) -> None:
        """Forget what all slots hold: a pass failed, and what it left behind is not known."""
        for state in self._open.values():
            self._target.rollback(state.slot, 0)
            state.num_known = 0

    def _unread(self, state: TextSlot) -> int:
        return state.num_known - self._target.length(state.slot)

    def _read(self, states: Sequence[TextSlot], counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
        parts = [self._ahead(state, count) for state, count in zip(states, counts, strict=True)]
        return (self._target.forward([state.slot for state in states], pad_rows(parts), counts).logits,)

    def _skim(self, state: TextSlot, count: int) -> None:
        self._target.prefill([state.slot], pad_rows([self._ahead(state, count)]), [count])

    def _ahead(self, state: TextSlot, count: int) -> npt.NDArray[np.int32]:
        held = self._target.length(state.slot)
        return state.text[held : held + count]


def _is_within(token_ids: npt.NDArray[np.int32], vocab_size: int) -> bool:
    return not len(token_ids) or bool(token_ids.min() >= 0 and token_ids.max() < vocab_size)
