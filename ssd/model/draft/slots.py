"""A draft model's reading: one slot per request, which follows the request's text by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

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
class DraftSlot:
    """What one request's slot holds.

    ``text[:num_known]`` is the context as last seen, what follows was drafted; the slot has read
    ``target.length(slot)`` tokens of it.
    """

    slot: int
    text: npt.NDArray[np.int32]
    num_known: int = 0


class DraftSlots:
    """Slots of a draft model by request. Whatever the target did with the last draft, a slot finds its way back."""

    def __init__(self, target: Target, chunk_tokens: int) -> None:
        """``chunk_tokens`` : most tokens read in one call of ``read``, so that a long prompt stalls nobody."""
        self._target = target
        self._chunk_tokens = chunk_tokens
        self._free = list(range(target.num_slots))
        self._open: dict[str, DraftSlot] = {}
        self._reading = Rate(_FORGETTING)

    @property
    def num_free(self) -> int:
        """Slots that no request has."""
        return len(self._free)

    def follow(self, request_id: str, context: npt.NDArray[np.int32]) -> DraftSlot | None:
        """The request's slot, which forgets what it read that is not in ``context``; None where none is to be had.

        context : int32[n], 1 <= n <= the model's length, begins with what was seen before. O(new tokens).
        None when all slots are taken or a token is not in the model's vocabulary.
        """
        state = self._open.get(request_id)
        if state is None:
            if not self._free or not _is_within(context, self._target.vocab_size):
                return None
            state = DraftSlot(self._free.pop(0), np.empty(self._target.max_length, np.int32))
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

    def read(self, states: Sequence[DraftSlot]) -> tuple[list[int], torch.Tensor | None]:
        """Read on to the end of each context; which of ``states`` are there, and their logits after it, [R, V].

        The others have more to read than one call may; they go on in the next.
        """
        budget = self._chunk_tokens
        ready = []
        for index, state in enumerate(states):
            held = self._target.length(state.slot)
            ahead = max(0, state.num_known - held - READ_WIDTH)
            part = state.text[held : held + min(ahead, budget)]
            if len(part):
                self._read_part(state, part)
                budget -= len(part)
            if len(part) == ahead:
                ready.append(index)
        if not ready:
            return [], None
        parts = [
            states[index].text[self._target.length(states[index].slot) : states[index].num_known] for index in ready
        ]
        counts = [len(part) for part in parts]
        logits = self._target.forward([states[index].slot for index in ready], pad_rows(parts), counts).logits
        last = torch.tensor(counts, device=logits.device) - 1
        return ready, logits[torch.arange(len(ready), device=logits.device), last]

    def seconds_to_read(self, request_id: str, num_tokens: int) -> float:
        """Expected time to read what is new, beyond what a pass takes anyway, in a context of ``num_tokens``."""
        state = self._open.get(request_id)
        held = min(state.num_known, self._target.length(state.slot)) if state is not None else 0
        unread = max(0, num_tokens - held - READ_WIDTH)
        tokens_per_s = self._reading.tokens_per_s
        return unread / tokens_per_s if tokens_per_s else 0.0

    def _read_part(self, state: DraftSlot, part: npt.NDArray[np.int32]) -> None:
        began = time.perf_counter()
        self._target.prefill([state.slot], pad_rows([part]), [len(part)])
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        self._reading.observe(len(part), time.perf_counter() - began)

    def feed(self, states: Sequence[DraftSlot]) -> torch.Tensor:
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


def _is_within(token_ids: npt.NDArray[np.int32], vocab_size: int) -> bool:
    return not len(token_ids) or bool(token_ids.min() >= 0 and token_ids.max() < vocab_size)
