"""What a recurrent head has read of the target's slots: its own keys and values, slot by slot."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd.model.draft.slots import READ_WIDTH, TextSlot, TextSlots
from ssd.model.heads.head import RecurrentHead
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.target import Target, pad_rows
from ssd.retrieval.cache_state import LearnedState


@dataclass(slots=True, eq=False)
class HeadSlot(TextSlot):
    """What the head has read of one slot.

    ``request_id`` : whose text that is; None once it has ended. ``adapter`` : that the target computed it with.
    ``scope`` : what is learned of the request's namespace; refers to nothing where it has none.
    """

    request_id: str | None = None
    adapter: str | None = None
    scope: Callable[[], LearnedState | None] = lambda: None


class HeadSlots(TextSlots[HeadSlot]):
    """The head's keys and values at (slot, position) of the target.

    At position i the head reads what the target made of token i together with token i + 1: so of a context of n tokens
    it can read n - 1 positions. What was drafted lies beyond them, and is read again with the target's own features.
    A slot that goes to another request of the same namespace keeps what the two texts share; of another one nothing,
    for how soon a head can draft would tell what was asked there.
    """

    def __init__(self, head: RecurrentHead, target: Target, chunk_tokens: int) -> None:
        """``chunk_tokens`` : most positions read in one call of ``read``."""
        assert target.features is not None
        super().__init__(target, chunk_tokens)
        self._head = head
        self._features = target.features
        self._kv_cache = SlotKVCache(target.num_slots, target.max_length + READ_WIDTH, target.device)
        self._slots = [HeadSlot(slot, np.empty(target.max_length, np.int32)) for slot in range(target.num_slots)]

    def follow(
        self,
        slot: int,
        request_id: str,
        context: npt.NDArray[np.int32],
        adapter: str | None,
        scope: LearnedState | None,
    ) -> HeadSlot:
        """The slot's state, which forgets what was read of another text.

        context : int32[n], n >= 2, of which the target's slot holds all but the last token at least. O(new tokens), and
        once O(n) where the slot has gone to another request.
        """
        state, length = self._slots[slot], len(context)
        shared = min(state.num_known, length)
        if state.request_id != request_id:
            differs = np.flatnonzero(state.text[:shared] != context[:shared])
            is_own = scope is not None and state.scope() is scope and state.adapter == adapter
            shared = 0 if not is_own else int(differs[0]) if len(differs) else shared
        # The last position is always read again or anew: its logits are what the draft begins with.
        held = min(int(self._kv_cache.lengths[slot]), max(0, shared - 1), length - 2)
        self._kv_cache.lengths[slot] = held
        state.text[shared:length] = context[shared:]
        state.adapter, state.scope = adapter, weakref.ref(scope) if scope is not None else lambda: None
        state.num_known, state.request_id = length, request_id
        return state

    def feed(
        self, states: Sequence[HeadSlot], token_ids: npt.NDArray[np.int64], features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Go on from what the head said itself: logits [R, Vd] and features [R, feature size] after ``token_ids``.

        token_ids : int64[R], drafted after what each slot holds. features : [R, feature size], of the call before.
        """
        logits, features = self._pass([state.slot for state in states], token_ids[:, None], features[:, None])
        for state in states:
            self._kv_cache.lengths[state.slot] += 1
        return logits[:, 0], features[:, 0]

    def seconds_to_read(self, slot: int, request_id: str, num_tokens: int) -> float:
        """Expected time to read what is new, beyond what a pass takes anyway, in a context of ``num_tokens``."""
        state = self._slots[slot]
        held = min(state.num_known - 1, int(self._kv_cache.lengths[slot])) if state.request_id == request_id else 0
        return self._seconds(num_tokens - 1 - max(0, held))

    def close(self, request_id: str) -> None:
        """The request has ended, or comes again as if it were new; what its slot holds stays for who shares it."""
        for state in self._slots:
            if state.request_id == request_id:
                state.request_id = None

    def reread(self) -> None:
        self._kv_cache.lengths[:] = 0
        for state in self._slots:
            state.num_known = 0

    def _unread(self, state: HeadSlot) -> int:
        return state.num_known - 1 - int(self._kv_cache.lengths[state.slot])

    def _skim(self, state: HeadSlot, count: int) -> None:
        self._read([state], [count], logits_to_keep=1)

    def _read(
        self, states: Sequence[HeadSlot], counts: Sequence[int], **kwargs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the next ``counts`` positions of each context."""
        slots = [state.slot for state in states]
        starts = self._kv_cache.lengths[slots]
        tokens = pad_rows(
            [
                state.text[start + 1 : start + 1 + count]
                for state, start, count in zip(states, starts, counts, strict=True)
            ]
        )
        places = torch.from_numpy(starts[:, None] + np.arange(tokens.shape[1])).to(self._target.device)
        features = self._features.read(torch.tensor(slots, device=self._target.device), places)
        found = self._pass(slots, tokens, features, **kwargs)
        self._kv_cache.lengths[slots] += np.asarray(counts)
        return found

    def _pass(
        self, slots: list[int], tokens: npt.NDArray[np.int64], features: torch.Tensor, **kwargs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = SlotRows.build(self._kv_cache, slots, tokens.shape[1], self._target.device)
        positions = rows.positions.clamp_max(self._target.max_length - 1)  # padding may point past the last one
        logits, following = self._head(
            torch.from_numpy(tokens).to(self._target.device), features, positions, slot_rows=rows, **kwargs
        )
        return logits, following


@torch.inference_mode()
def bytes_per_token(head: RecurrentHead, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that a head's keys and values of one position take: found out by a pass over one."""
    kv_cache = SlotKVCache(1, 1, device)
    rows = SlotRows.build(kv_cache, [0], 1, device)
    features = torch.zeros(1, 1, head.feature_size, dtype=dtype, device=device)
    head(torch.zeros(1, 1, dtype=torch.int64, device=device), features, rows.positions, slot_rows=rows)
    return kv_cache.bytes_per_token
