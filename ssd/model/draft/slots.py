"""KV cache slots of a draft model or draft head, which read the contexts of requests incrementally and in batches."""

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
"""The maximum number of unread tokens per request in a forward pass of the draft network over several requests. Earlier
unread tokens of a long context are read first, in a forward pass over this request alone.
"""

_DECAY = 0.9  # the decay of a measurement's weight with each later measurement

# The logits [R, ..., V], and the state [R, ...] from which the next token is drafted.
LogitsAndState = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, eq=False)
class TextSlot:
    """The token ids that a draft model or draft head has read into one KV cache slot."""

    slot: int
    text: npt.NDArray[np.int32]  # int32[max_length]: the request's context as last seen, then drafted tokens
    num_context_tokens: int = 0  # the number of context tokens
    request_id: str | None = None  # None after the end of the request
    adapter: str | None = None  # the LoRA adapter with which the target computed the text
    # A weak reference to the learned state of the request's namespace.
    scope: Callable[[], LearnedState | None] = lambda: None


class TextSlots(ABC):
    """The KV cache slots of a draft model or draft head, which reads the context of one request into each slot.

    If a slot is assigned to another request of the same namespace and LoRA adapter, it keeps the common prefix of both
    contexts. Otherwise the slot is emptied: a prefix kept across namespaces would shorten the time until the first
    draft, and so reveal whether the prompts of two tenants begin with the same text. ``target`` is the draft model or,
    for a draft head, the target model. ``chunk_tokens`` limits how much one call of `read` reads, so a long context
    takes several calls.
    """

    draft_to_target: torch.Tensor | None = None  # the target's id of each draft token, int64[Vd]
    num_tokens: int | None = None  # the maximum number of drafted tokens
    _lookahead = 0  # the number of tokens after a position that are read together with it

    def __init__(self, target: Target, chunk_tokens: int) -> None:
        self.target, self._chunk_tokens = target, chunk_tokens
        self.states = [TextSlot(slot, np.empty(target.max_length, np.int32)) for slot in range(target.num_slots)]
        self._reading = Throughput(_DECAY)

    def can_read(self, request: DraftRequest) -> bool:
        return True

    def assign(self, request: DraftRequest) -> TextSlot | None:
        """Return the KV cache slot of a request, after truncating it to its common prefix with the request's context.

        Returns None if the context contains a token id that the draft model does not have. O(new tokens), and once
        O(context) if another request used the slot before.
        """
        assert request.slot is not None
        context, scope, adapter = request.context, request.learned, self.target.adapters[request.slot]
        state, length = self.states[request.slot], len(context)
        shared, num_read = min(state.num_context_tokens, length), self._length(state.slot)
        if state.request_id != request.request_id:
            is_own = scope is not None and state.scope() is scope and state.adapter == adapter
            shared = _common_prefix_length(state.text[:shared], context) if is_own else 0
        elif not self._lookahead:  # drafted tokens that were accepted stay in the slot
            shared += _common_prefix_length(state.text[shared : min(num_read, length)], context[shared:])
        if not self._are_known(context[shared:]):
            return None
        # The last position is always computed, possibly again, because the draft starts from its logits.
        self._crop(state.slot, min(num_read, max(0, shared - self._lookahead), length - 1 - self._lookahead))
        state.text[shared:length] = context[shared:]
        state.adapter, state.scope = adapter, weakref.ref(scope) if scope is not None else lambda: None
        state.num_context_tokens, state.request_id = length, request.request_id
        return state

    def read(self, states: Sequence[TextSlot]) -> tuple[list[int], LogitsAndState | None]:
        """Read the new tokens of the requests' contexts into their slots; a long context takes several calls.

        Returns the indices of the requests whose contexts have been read completely. For these requests, also returns
        the logits of the first draft token and the state for `append_drafted`; None if there are no such requests.
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
    def append_drafted(
        self, states: Sequence[TextSlot], token_ids: npt.NDArray[np.int64], carried: torch.Tensor
    ) -> LogitsAndState:
        """Append one drafted token to each slot, int64[R], and return the logits and the state for the next one.

        ``carried`` is the state that the previous call of `read` or `append_drafted` returned for these slots.
        """

    def seconds_to_read(self, request: DraftRequest) -> float:
        """Return the expected seconds to read a request's new tokens; 0 if they are few, or before a measurement.

        Up to `READ_WIDTH` new tokens count as few, because they are read together with those of other requests.
        """
        assert request.slot is not None
        state, tokens_per_s = self.states[request.slot], self._reading.tokens_per_s
        num_read = (
            min(state.num_context_tokens, self._length(state.slot)) if state.request_id == request.request_id else 0
        )
        return max(0, len(request.context) - num_read - READ_WIDTH) / tokens_per_s if tokens_per_s else 0.0

    def release(self, request_id: str) -> None:
        """Release the slot of a request that has ended or was preempted.

        The slot keeps its text for requests with the same prefix.
        """
        for state in self.states:
            if state.request_id == request_id:
                state.request_id = None

    def clear(self) -> None:
        """Clear all slots after a failed forward pass, because it is unknown what the pass has written."""
        for state in self.states:
            self._crop(state.slot, 0)
            state.num_context_tokens = 0

    def _unread(self, state: TextSlot) -> int:
        return state.num_context_tokens - self._lookahead - self._length(state.slot)

    def _are_known(self, token_ids: npt.NDArray[np.int32]) -> bool:
        return True

    def _next(self, states: Sequence[TextSlot], counts: Sequence[int]) -> npt.NDArray[np.int64]:
        starts = [self._length(state.slot) + self._lookahead for state in states]
        return pad_rows([state.text[at : at + n] for state, at, n in zip(states, starts, counts, strict=True)])

    @abstractmethod
    def _length(self, slot: int) -> int: ...

    @abstractmethod
    def _crop(self, slot: int, length: int) -> None: ...

    @abstractmethod
    def _read(self, states: Sequence[TextSlot], counts: Sequence[int], *, skims: bool = False) -> LogitsAndState:
        """Read the next ``counts[r]`` tokens of each request; with ``skims``, the logits may be left out."""


class ModelSlots(TextSlots):
    """The KV cache slots of a draft model, which are truncated to the accepted text after each verification."""

    def append_drafted(
        self, states: Sequence[TextSlot], token_ids: npt.NDArray[np.int64], carried: torch.Tensor
    ) -> LogitsAndState:
        logits = self.target.forward([state.slot for state in states], token_ids[:, None], [1] * len(states)).logits
        return logits[:, 0], carried

    def _are_known(self, token_ids: npt.NDArray[np.int32]) -> bool:
        return not len(token_ids) or bool(token_ids.min() >= 0 and token_ids.max() < self.target.vocab_size)

    def _length(self, slot: int) -> int:
        return self.target.length(slot)

    def _crop(self, slot: int, length: int) -> None:
        self.target.rollback(slot, min(length, self.target.length(slot)))

    def _read(self, states: Sequence[TextSlot], counts: Sequence[int], *, skims: bool = False) -> LogitsAndState:
        slots, tokens = [state.slot for state in states], self._next(states, counts)
        if skims:
            self.target.prefill(slots, tokens, counts)
            return torch.empty(0), torch.empty(0)
        logits = self.target.forward(slots, tokens, counts).logits
        return logits, logits[..., :0]


class HeadSlots(TextSlots):
    """The KV cache of a draft head, which has the same slots as the target's KV cache.

    At position i, the head reads the target's hidden states (features) of token i and the embedding of token i + 1, so
    the last position of a context of n tokens is n - 2. While drafting, the head reads its own previous output in place
    of hidden states. Once the target has accepted draft tokens and computed their hidden states, the head reads the
    positions of these tokens again.
    """

    _lookahead = 1

    def __init__(self, head: Head, target: Target, chunk_tokens: int) -> None:
        assert target.features is not None
        super().__init__(target, chunk_tokens)
        self.draft_to_target, self.num_tokens = head.draft_to_target, head.num_tokens
        self._head = head
        self._kv_cache = SlotKVCache(target.num_slots, target.max_length + READ_WIDTH, target.device)

    def can_read(self, request: DraftRequest) -> bool:
        """Return whether the target has computed the hidden states of all tokens of the context except the last one."""
        return len(request.context) > 1 and self.target.length(request.slot or 0) >= len(request.context) - 1

    def assign(self, request: DraftRequest) -> TextSlot | None:
        state = super().assign(request)
        if state is not None and not self._head.attends:  # only the last position influences the output
            self._kv_cache.lengths[state.slot] = state.num_context_tokens - 2
        return state

    def append_drafted(
        self, states: Sequence[TextSlot], token_ids: npt.NDArray[np.int64], carried: torch.Tensor
    ) -> LogitsAndState:
        logits, carried = self._pass([state.slot for state in states], token_ids[:, None], carried[:, None])
        for state in states:
            self._kv_cache.lengths[state.slot] += 1
        return logits[:, 0], carried[:, 0]

    def _length(self, slot: int) -> int:
        return int(self._kv_cache.lengths[slot])

    def _crop(self, slot: int, length: int) -> None:
        self._kv_cache.lengths[slot] = length

    def _read(self, states: Sequence[TextSlot], counts: Sequence[int], *, skims: bool = False) -> LogitsAndState:
        slots, tokens = [state.slot for state in states], self._next(states, counts)
        places = torch.from_numpy(self._kv_cache.lengths[slots][:, None] + np.arange(tokens.shape[1]))
        stored = self.target.features
        assert stored is not None
        places = places.clamp_max(stored.shape[2] - 1)  # padding may point beyond the last position
        device = self.target.device
        features = stored[torch.tensor(slots, device=device)[:, None], :, places.to(device)]
        if features.shape[2] == len(self._head.feature_layers):
            features = self._head.combine(features.unbind(2))
        else:  # combined when they were stored
            features = features[:, :, 0]
        found = self._pass(slots, tokens, features, **({"logits_to_keep": 1} if skims else {}))
        self._kv_cache.lengths[slots] += np.asarray(counts)
        return found

    def _pass(
        self, slots: list[int], tokens: npt.NDArray[np.int64], features: torch.Tensor, **kwargs: int
    ) -> LogitsAndState:
        rows = SlotRows.build(self._kv_cache, slots, tokens.shape[1], self.target.device)
        positions = rows.positions.clamp_max(self.target.max_length - 1)  # padding may point beyond the last position
        ids = torch.from_numpy(tokens).to(self.target.device)
        logits, following = self._head(ids, features, positions, slot_rows=rows, **kwargs)
        return logits, following


def _common_prefix_length(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


@torch.inference_mode()
def bytes_per_token(head: Head, device: torch.device, dtype: torch.dtype) -> int:
    """Return the bytes per token of a draft head's KV cache, measured by a forward pass over one position."""
    kv_cache = SlotKVCache(1, 1, device)
    rows = SlotRows.build(kv_cache, [0], 1, device)
    features = torch.zeros(1, 1, head.feature_size, dtype=dtype, device=device)
    head(torch.zeros(1, 1, dtype=torch.int64, device=device), features, rows.positions, slot_rows=rows)
    return kv_cache.bytes_per_token
