"""Reading by slots: texts that a draft model or a head follows by itself, in parts, rows together."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ssd.cost_model.throughput import Throughput
from ssd.drafting.protocol import DraftRequest
from ssd.model.heads.networks import Head
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.target import Target, pad_rows
from ssd.retrieval.cache_state import LearnedState

READ_WIDTH = 8
"""Most positions of a pass that reads several rows at once; longer text is read row by row."""

_FORGETTING = 0.9
"""What a read part counts after each later one."""

Said = tuple[torch.Tensor, torch.Tensor]
"""Logits [R, ..., V], and what to go on with, [R, ...]."""


@dataclass(slots=True, eq=False)
class TextSlot:
    """What was read of one of the target's slots.

    ``text`` : int32[max_length], in its first ``num_known`` tokens the context as last seen; what follows was drafted.
    ``request_id`` : whose text that is; None once it has ended. ``adapter`` : that the target computed it with.
    ``scope`` : what is learned of the request's namespace; refers to nothing where it has none.
    """

    slot: int
    text: npt.NDArray[np.int32]
    num_known: int = 0
    request_id: str | None = None
    adapter: str | None = None
    scope: Callable[[], LearnedState | None] = lambda: None


class TextSlots(ABC):
    """Slots of a target that are read to the ends of their texts, each call so much that a long prompt stalls nobody.

    A slot that goes to another request of the same namespace keeps what the two texts share; of another one nothing,
    for how soon can be drafted would tell what was asked there.
    """

    draft_to_target: torch.Tensor | None = None
    """int64[Vd], the target's id of each token that is scored; None where those are the target's own."""
    num_tokens: int | None = None
    """Most that can be drafted; None is any number."""
    _ahead = 0
    """Tokens behind a position that it is read together with."""

    def __init__(self, target: Target, chunk_tokens: int) -> None:
        """``target`` : the draft model, or the one whose features are read. chunk_tokens : most read in one call."""
        self.target, self._chunk_tokens = target, chunk_tokens
        self.states = [TextSlot(slot, np.empty(target.max_length, np.int32)) for slot in range(target.num_slots)]
        self._reading = Throughput(_FORGETTING)

    def can_follow(self, request: DraftRequest) -> bool:
        """Whether the context is there to be read."""
        return True

    def follow(self, request: DraftRequest) -> TextSlot | None:
        """The slot of a request, which forgets what was read of another text; None where it cannot be read.

        O(new tokens), and once O(n) where the slot has gone to another request.
        """
        assert request.slot is not None
        context, scope, adapter = request.context, request.learned, self.target.adapters[request.slot]
        state, length = self.states[request.slot], len(context)
        shared, held = min(state.num_known, length), self._length(state.slot)
        if state.request_id != request.request_id:
            is_own = scope is not None and state.scope() is scope and state.adapter == adapter
            shared = _agreeing(state.text[:shared], context) if is_own else 0
        elif not self._ahead:  # what was drafted and said stays read
            shared += _agreeing(state.text[shared : min(held, length)], context[shared:])
        if not self._can_read(context[shared:]):
            return None
        # The last position is always read again or anew: its logits are what the draft begins with.
        self._crop(state.slot, min(held, max(0, shared - self._ahead), length - 1 - self._ahead))
        state.text[shared:length] = context[shared:]
        state.adapter, state.scope = adapter, weakref.ref(scope) if scope is not None else lambda: None
        state.num_known, state.request_id = length, request.request_id
        return state

    def read(self, states: Sequence[TextSlot]) -> tuple[list[int], Said | None]:
        """Read on to the end of each context; which of ``states`` are there, and what is said after it, [R, ...] each.

        The others have more to read than one call may; they go on in the next. Nothing is said where none is there.
        """
        budget, ready = self._chunk_tokens, []
        for index, state in enumerate(states):
            ahead = max(0, self._unread(state) - READ_WIDTH)
            count = min(ahead, budget)
            if count:
                began = time.perf_counter()
                self._read([state], [count], skims=True)
                if self.target.device.type == "cuda":
                    torch.cuda.synchronize(self.target.device)
                self._reading.observe(count, time.perf_counter() - began)
                budget -= count
            if count == ahead:
                ready.append(index)
        if not ready:
            return [], None
        found = [states[index] for index in ready]
        counts = [self._unread(state) for state in found]
        logits, carried = self._read(found, counts)
        rows, last = torch.arange(len(found), device=logits.device), torch.tensor(counts, device=logits.device) - 1
        return ready, (logits[rows, last], carried[rows, last])

    @abstractmethod
    def feed(self, states: Sequence[TextSlot], token_ids: npt.NDArray[np.int64], carried: torch.Tensor) -> Said:
        """Go on from what was said: what comes after ``token_ids``, int64[R], drafted after what each slot holds.

        carried : of the call before.
        """

    def seconds_to_read(self, request: DraftRequest) -> float:
        """Expected time to read what is new, beyond what a pass takes anyway; 0 where that is little or not known."""
        assert request.slot is not None
        state, tokens_per_s = self.states[request.slot], self._reading.tokens_per_s
        held = min(state.num_known, self._length(state.slot)) if state.request_id == request.request_id else 0
        return max(0, len(request.context) - held - READ_WIDTH) / tokens_per_s if tokens_per_s else 0.0

    def close(self, request_id: str) -> None:
        """The request has ended, or comes again as if it were new; what its slot holds stays for who shares it."""
        for state in self.states:
            if state.request_id == request_id:
                state.request_id = None

    def reread(self) -> None:
        """Forget what all slots hold: a pass failed, and what it left behind is not known."""
        for state in self.states:
            self._crop(state.slot, 0)
            state.num_known = 0

    def _unread(self, state: TextSlot) -> int:
        return state.num_known - self._ahead - self._length(state.slot)

    def _can_read(self, token_ids: npt.NDArray[np.int32]) -> bool:
        return True

    def _next(self, states: Sequence[TextSlot], counts: Sequence[int]) -> npt.NDArray[np.int64]:
        """The next ``counts`` tokens of each text, int64[R, max(counts)]."""
        starts = [self._length(state.slot) + self._ahead for state in states]
        return pad_rows([state.text[at : at + n] for state, at, n in zip(states, starts, counts, strict=True)])

    @abstractmethod
    def _length(self, slot: int) -> int:
        """Positions that a slot has read."""

    @abstractmethod
    def _crop(self, slot: int, length: int) -> None:
        """Forget those beyond so many."""

    @abstractmethod
    def _read(self, states: Sequence[TextSlot], counts: Sequence[int], *, skims: bool = False) -> Said:
        """Read the next ``counts`` positions of each context, and say what comes after each: [R, max(counts), ...].

        skims : nobody asks what comes after.
        """


class ModelSlots(TextSlots):
    """Slots of a draft model. Whatever the target did with the last draft, a slot finds its way back."""

    def feed(self, states: Sequence[TextSlot], token_ids: npt.NDArray[np.int64], carried: torch.Tensor) -> Said:
        """Go on by one more token of each text."""
        logits = self.target.forward([state.slot for state in states], token_ids[:, None], [1] * len(states)).logits
        return logits[:, 0], carried

    def _can_read(self, token_ids: npt.NDArray[np.int32]) -> bool:
        return not len(token_ids) or bool(token_ids.min() >= 0 and token_ids.max() < self.target.vocab_size)

    def _length(self, slot: int) -> int:
        return self.target.length(slot)

    def _crop(self, slot: int, length: int) -> None:
        self.target.rollback(slot, min(length, self.target.length(slot)))

    def _read(self, states: Sequence[TextSlot], counts: Sequence[int], *, skims: bool = False) -> Said:
        slots, tokens = [state.slot for state in states], self._next(states, counts)
        if skims:
            self.target.prefill(slots, tokens, counts)
            return torch.empty(0), torch.empty(0)
        logits = self.target.forward(slots, tokens, counts).logits
        return logits, logits[..., :0]


class HeadSlots(TextSlots):
    """A head's own keys and values, at (slot, position) of the target.

    At position i the head reads what the target made of token i together with token i + 1: so of a context of n tokens
    it can read n - 1 positions. What was drafted lies beyond them, and is read again with the target's own features.
    """

    _ahead = 1

    def __init__(self, head: Head, target: Target, chunk_tokens: int) -> None:
        """``target`` : keeps the features that ``head`` reads."""
        assert target.features is not None and target.features.shape[3] == head.feature_size
        super().__init__(target, chunk_tokens)
        self.draft_to_target, self.num_tokens = head.draft_to_target, head.num_tokens
        self._head, self._features = head, target.features
        self._kv_cache = SlotKVCache(target.num_slots, target.max_length + READ_WIDTH, target.device)

    def can_follow(self, request: DraftRequest) -> bool:
        """Whether the target has read the context but for its last token."""
        return len(request.context) > 1 and self.target.length(request.slot or 0) >= len(request.context) - 1

    def follow(self, request: DraftRequest) -> TextSlot | None:
        """As said there."""
        state = super().follow(request)
        if state is not None and not self._head.attends:  # all but the end has no say
            self._kv_cache.lengths[state.slot] = state.num_known - 2
        return state

    def feed(self, states: Sequence[TextSlot], token_ids: npt.NDArray[np.int64], carried: torch.Tensor) -> Said:
        """Go on from what the head said itself."""
        logits, carried = self._pass([state.slot for state in states], token_ids[:, None], carried[:, None])
        for state in states:
            self._kv_cache.lengths[state.slot] += 1
        return logits[:, 0], carried[:, 0]

    def _length(self, slot: int) -> int:
        return int(self._kv_cache.lengths[slot])

    def _crop(self, slot: int, length: int) -> None:
        self._kv_cache.lengths[slot] = length

    def _read(self, states: Sequence[TextSlot], counts: Sequence[int], *, skims: bool = False) -> Said:
        slots, tokens = [state.slot for state in states], self._next(states, counts)
        places = torch.from_numpy(self._kv_cache.lengths[slots][:, None] + np.arange(tokens.shape[1]))
        places = places.clamp_max(self._features.shape[2] - 1)  # padding may point past the last one
        device = self.target.device
        features = self._features[torch.tensor(slots, device=device)[:, None], 0, places.to(device)]
        found = self._pass(slots, tokens, features, **({"logits_to_keep": 1} if skims else {}))
        self._kv_cache.lengths[slots] += np.asarray(counts)
        return found

    def _pass(self, slots: list[int], tokens: npt.NDArray[np.int64], features: torch.Tensor, **kwargs: int) -> Said:
        rows = SlotRows.build(self._kv_cache, slots, tokens.shape[1], self.target.device)
        positions = rows.positions.clamp_max(self.target.max_length - 1)  # padding may point past the last one
        ids = torch.from_numpy(tokens).to(self.target.device)
        logits, following = self._head(ids, features, positions, slot_rows=rows, **kwargs)
        return logits, following


def _agreeing(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Of how many tokens two texts begin alike."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


@torch.inference_mode()
def bytes_per_token(head: Head, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that a head's keys and values of one position take: found out by a pass over one."""
    kv_cache = SlotKVCache(1, 1, device)
    rows = SlotRows.build(kv_cache, [0], 1, device)
    features = torch.zeros(1, 1, head.feature_size, dtype=dtype, device=device)
    head(torch.zeros(1, 1, dtype=torch.int64, device=device), features, rows.positions, slot_rows=rows)
    return kv_cache.bytes_per_token
