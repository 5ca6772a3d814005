"""Drive models row by row: on the caches of transformers, without any, and those that keep a running state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from ssd.jit.addresses import Int64s
from ssd.model.sampling.sampler import PassOutput
from ssd.model.target import Integers, Target, TokenMatrix, accepts


class RowTarget(Target):
    """Models that slot attention does not reach: one Hugging Face cache per slot, rows computed one after another.

    Slower in a batch, but any position encoding works, and any cache whose end can be cropped.
    """

    way = "row by row"

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._takes_positions = accepts(model, "position_ids")
        self._caches = [self._new_cache() for _ in range(num_slots)]
        self._num_read = self._held
        """Tokens that each cache has read, int64[num_slots]."""

    def rollback(self, slot: int, length: int) -> None:
        """Crop the slot's cache."""
        removed = self.length(slot) - length
        assert removed >= 0
        if length == 0:
            self._caches[slot] = self._new_cache()
        elif removed:
            self._caches[slot].crop(-removed)
        self._held[slot] = length

    def bytes_of(self, slot: int) -> int:
        """Bytes that what a slot holds takes now."""
        return sum(tensor.nbytes for tensor in _tensors_of(self._caches[slot], set()))

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        for index, layer in enumerate(self._caches[source].layers):
            self._caches[slot].update(layer.keys[..., start:end, :], layer.values[..., start:end, :], index)

    def _append(self, slots: Int64s, tokens: TokenMatrix, counts: Int64s, **kwargs: Any) -> PassOutput:
        rows = [
            self._append_row(slot, row[:count], **kwargs)
            for slot, row, count in zip(slots.tolist(), tokens, counts.tolist(), strict=True)
        ]
        return PassOutput(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))

    def _append_row(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        """Passes over one row's new tokens, int64[n]: logits [n or fewer, V]."""
        return self._read(slot, tokens, **kwargs)

    def _read(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        """One pass on top of what the slot's cache has read."""
        start = int(self._num_read[slot])
        end = start + len(tokens)
        if self._takes_positions:
            kwargs["position_ids"] = torch.arange(start, end, device=self.device)[None]
        ids = torch.from_numpy(tokens[None]).to(self.device)
        logits = self._run(slot, ids, **kwargs)
        self._num_read[slot] = end
        return logits

    def _run(self, slot: int, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Feed ids, int64[1, n], to the model on top of the slot's cache."""
        logits: torch.Tensor = self.model(
            input_ids=ids, use_cache=True, past_key_values=self._caches[slot], **kwargs
        ).logits[0]
        return logits

    def _new_cache(self) -> Any:
        # Without the model's configuration every layer keeps all positions, those beyond a window too: the end can be
        # cropped to any length.
        return DynamicCache()


def _tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors of a cache, of whatever kind it is, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_of(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_of(each, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors_of(vars(value), seen)


class WholeTarget(Target):
    """No cache: a slot is its text. For models whose state lives in the model itself, or that have no cache.

    A pass costs the whole context, so verifying a long draft costs hardly more than one token.
    """

    way = "whole context"
    can_keep_prefixes = False

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._takes_keep = accepts(model, "logits_to_keep")
        self._without_cache = {"use_cache": False} if accepts(model, "use_cache") else {}

    def rollback(self, slot: int, length: int) -> None:
        """Forget the end of the text."""
        assert 0 <= length <= self.length(slot)
        self._held[slot] = length

    def prefill(self, slots: Integers, tokens: TokenMatrix, counts: Integers) -> None:
        """Append tokens to slots; they are read with the next pass that is scored."""
        self._feed(slots, tokens, counts, is_scored=False)

    def _append(
        self, slots: Int64s, tokens: TokenMatrix, counts: Int64s, *, is_scored: bool = True, **kwargs: Any
    ) -> PassOutput:
        rows = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True) if is_scored else ():
            ids = torch.from_numpy(self._fed[slot, None, : self.length(slot) + count].astype(np.int64))
            keep = {"logits_to_keep": count} if self._takes_keep else {}
            rows.append(self.model(input_ids=ids.to(self.device), **self._without_cache, **keep).logits[0, -count:])
        return PassOutput(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else torch.empty(0))


_CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""What models call the argument that takes their state, and the field of the output that returns it."""

_MAX_REPLAYED = 16
"""More accepted tokens than this are not fed with every pass again: they move the kept state on."""


class RecurrentTarget(RowTarget):
    """One state per slot, rows one after another, no way back: the engine must not draft.

    Several tokens are fed at once to an empty slot only. Some models (Mamba, Jamba) begin such a pass from an empty
    state whatever they hold, so later tokens go one by one.
    """

    way = "row by row, without speculation"
    can_roll_back = False
    can_keep_prefixes = False

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        """Raises TypeError for a model that takes no state."""
        names = [name for name in _CACHE_NAMES if accepts(model, name)]
        if not names:
            raise TypeError("the model takes no state")
        self._state_name = names[0]
        super().__init__(model, num_slots, max_length)

    def rollback(self, slot: int, length: int) -> None:
        """Empty the slot, or leave it as it is: nothing between is possible."""
        assert length in (0, self.length(slot))
        if length == 0:
            self._caches[slot] = None
            self._held[slot] = 0

    def _append_row(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        if self.length(slot) == 0:
            return self._read(slot, tokens, **kwargs)
        return torch.cat([self._read(slot, tokens[i : i + 1], **kwargs) for i in range(len(tokens))])

    def _run(self, slot: int, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        # An empty slot has no state: the model makes one of its own kind.
        output = self.model(input_ids=ids, use_cache=True, **{self._state_name: self._caches[slot]}, **kwargs)
        self._caches[slot] = getattr(output, self._state_name, None)
        if self._caches[slot] is None:
            raise TypeError("the model returns no state")
        logits: torch.Tensor = output.logits[0]
        return logits

    def _new_cache(self) -> Any:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Checkpoint:
    """A state and the number of tokens it has read."""

    num_tokens: int
    state: Any


_NOTHING_READ = _Checkpoint(0, None)


class ReplayTarget(RecurrentTarget):
    """Takes tokens back by returning to a state kept from before the draft.

    A pass that may hold a draft begins with a copy of the slot's state. After a rollback the copy takes its place, and
    the accepted tokens that it has not read are fed again with the next pass: not one pass more, but wider ones. A
    rollback to before the copy reads the slot's text anew.
    """

    way = "row by row, with replay"
    can_roll_back = True

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._num_read = np.zeros(num_slots, np.int64)
        self._checkpoints: list[_Checkpoint | None] = [None] * num_slots

    def rollback(self, slot: int, length: int) -> None:
        """Return to the latest state that has read no more than ``length`` tokens."""
        assert 0 <= length <= self.length(slot)
        self._held[slot] = length
        if self._num_read[slot] <= length and length > 0:
            return
        kept, self._checkpoints[slot] = self._checkpoints[slot], None
        if kept is None or kept.num_tokens > length or length == 0:
            kept = _NOTHING_READ
        self._caches[slot], self._num_read[slot] = kept.state, kept.num_tokens

    def _append_row(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        unread = self._fed[slot, self._num_read[slot] : self.length(slot)].astype(np.int64)
        if len(unread) > _MAX_REPLAYED:
            self._read(slot, unread)
            unread = unread[:0]
        if len(tokens) > 1 and not kwargs:
            self._checkpoints[slot] = _Checkpoint(int(self._num_read[slot]), copy_state(self._caches[slot]))
        logits = self._read(slot, np.concatenate([unread, tokens]), **kwargs)
        return logits if kwargs else logits[len(unread) :]


def copy_state(state: Any) -> Any:
    """A copy that later passes over ``state`` leave alone; None stays None.

    O(bytes of the running state): keys and values are shared, because caches replace those and never write into them.
    """
    shared: dict[int, Any] = {}
    for layer in getattr(state, "layers", ()):
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, torch.Tensor):
                shared[id(tensor)] = tensor
    return copy.deepcopy(state, shared)
