"""Model runners that compute row after row: with transformers' caches, without a cache, or for recurrent models."""

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
from ssd.model.target import Integers, Target, TokenMatrix, has_argument


class SequentialRunner(Target):
    """A model runner with one Hugging Face cache per sequence, for models that do not support the slot KV cache.

    It computes one row after another, so batches are slower than with `SlotRunner`. But it supports models with any
    position encoding and with any cache that can be cropped.
    """

    backend = "row by row"

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._has_position_ids = has_argument(model, "position_ids")
        self._caches = [self._new_cache() for _ in range(num_slots)]
        self._num_read = self._lengths  # the number of tokens in each cache, int64[num_slots]

    def rollback(self, slot: int, length: int) -> None:
        removed = self.length(slot) - length
        assert removed >= 0
        if length == 0:
            self._caches[slot] = self._new_cache()
        elif removed:
            self._caches[slot].crop(-removed)
        self._lengths[slot] = length

    def slot_bytes(self, slot: int) -> int:
        return sum(tensor.nbytes for tensor in _iterate_tensors(self._caches[slot], set()))

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
        return self._read(slot, tokens, **kwargs)

    def _read(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        start = int(self._num_read[slot])
        end = start + len(tokens)
        if self._has_position_ids:
            kwargs["position_ids"] = torch.arange(start, end, device=self.device)[None]
        ids = torch.from_numpy(tokens[None]).to(self.device)
        logits = self._run(slot, ids, **kwargs)
        self._num_read[slot] = end
        return logits

    def _run(self, slot: int, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=ids, use_cache=True, past_key_values=self._caches[slot], **kwargs
        ).logits[0]
        return logits

    def _new_cache(self) -> Any:
        # Without the model's configuration every layer keeps all positions, those beyond a window too: the end can be
        # cropped to any length.
        return DynamicCache()


def _iterate_tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield each tensor of a Hugging Face cache once; the cache may be of any class."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _iterate_tensors(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _iterate_tensors(each, seen)
    elif hasattr(value, "__dict__"):
        yield from _iterate_tensors(vars(value), seen)


class FullContextRunner(Target):
    """A model runner without a KV cache, for models that store their state inside the model or have no cache.

    Each forward pass computes the whole text, so a pass with a long draft takes hardly longer than one without a draft.
    """

    backend = "whole context"
    can_copy_prefixes = False

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._has_logits_to_keep = has_argument(model, "logits_to_keep")
        self._without_cache = {"use_cache": False} if has_argument(model, "use_cache") else {}

    def rollback(self, slot: int, length: int) -> None:
        assert 0 <= length <= self.length(slot)
        self._lengths[slot] = length

    def prefill(self, slots: Integers, tokens: TokenMatrix, counts: Integers) -> None:
        """Record prompt tokens without a forward pass; the next call of `forward` computes them with the whole text."""
        self._append_tokens(slots, tokens, counts, is_scored=False)

    def _append(
        self, slots: Int64s, tokens: TokenMatrix, counts: Int64s, *, is_scored: bool = True, **kwargs: Any
    ) -> PassOutput:
        rows = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True) if is_scored else ():
            ids = torch.from_numpy(self._token_ids[slot, None, : self.length(slot) + count].astype(np.int64))
            keep = {"logits_to_keep": count} if self._has_logits_to_keep else {}
            rows.append(self.model(input_ids=ids.to(self.device), **self._without_cache, **keep).logits[0, -count:])
        return PassOutput(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else torch.empty(0))


# The names that models use for the argument with their state and for the output field that returns it.
_CACHE_NAMES = ("past_key_values", "cache_params", "state")

# The maximum number of accepted tokens that are computed again with each pass; more tokens advance the checkpoint.
_MAX_REPLAYED = 16


class RecurrentRunner(SequentialRunner):
    """A model runner for recurrent models that computes one row after another and cannot roll back, so drafting is off.

    Several tokens are read in one forward pass only if the slot is empty; later tokens are read one at a time, because
    some models (Mamba, Jamba) start a pass over several tokens with an empty state. Raises TypeError if the model's
    ``forward`` has no argument for a state.
    """

    backend = "row by row, without speculation"
    can_roll_back = False
    can_copy_prefixes = False

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        names = [name for name in _CACHE_NAMES if has_argument(model, name)]
        if not names:
            raise TypeError("the model's forward method has no argument for a cache or state")
        self._state_name = names[0]
        super().__init__(model, num_slots, max_length)

    def rollback(self, slot: int, length: int) -> None:
        """Empty the slot, or leave it unchanged if ``length`` is its length; other lengths are not supported."""
        assert length in (0, self.length(slot))
        if length == 0:
            self._caches[slot] = None
            self._lengths[slot] = 0

    def _append_row(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        if self.length(slot) == 0:
            return self._read(slot, tokens, **kwargs)
        return torch.cat([self._read(slot, tokens[i : i + 1], **kwargs) for i in range(len(tokens))])

    def _run(self, slot: int, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        # An empty slot has no state: the model makes one of its own kind.
        output = self.model(input_ids=ids, use_cache=True, **{self._state_name: self._caches[slot]}, **kwargs)
        self._caches[slot] = getattr(output, self._state_name, None)
        if self._caches[slot] is None:
            raise TypeError("the model returns no cache or state")
        logits: torch.Tensor = output.logits[0]
        return logits

    def _new_cache(self) -> Any:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Checkpoint:
    num_tokens: int
    state: Any


_NOTHING_READ = _Checkpoint(0, None)


class CheckpointRunner(RecurrentRunner):
    """A model runner for recurrent models that rolls back by restoring a copy of the state from before the draft.

    A forward pass over several tokens that may contain a draft first copies the slot's state. A rollback restores this
    copy, which has not read the accepted tokens. So the next pass also computes the accepted tokens; if there are more
    than 16, they get a pass of their own. After a rollback to a length before the copy, the whole text is computed
    again.
    """

    backend = "row by row, with replay"
    can_roll_back = True

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._num_read = np.zeros(num_slots, np.int64)
        self._checkpoints: list[_Checkpoint | None] = [None] * num_slots

    def rollback(self, slot: int, length: int) -> None:
        """Truncate the slot's text to ``length`` tokens, and select a state that has read none of the removed tokens.

        This is the current state if possible, else its copy, else an empty state.
        """
        assert 0 <= length <= self.length(slot)
        self._lengths[slot] = length
        if self._num_read[slot] <= length and length > 0:
            return
        checkpoint, self._checkpoints[slot] = self._checkpoints[slot], None
        if checkpoint is None or checkpoint.num_tokens > length or length == 0:
            checkpoint = _NOTHING_READ
        self._caches[slot], self._num_read[slot] = checkpoint.state, checkpoint.num_tokens

    def _append_row(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        unread = self._token_ids[slot, self._num_read[slot] : self.length(slot)].astype(np.int64)
        if len(unread) > _MAX_REPLAYED:
            self._read(slot, unread)
            unread = unread[:0]
        if len(tokens) > 1 and not kwargs:
            self._checkpoints[slot] = _Checkpoint(int(self._num_read[slot]), copy_state(self._caches[slot]))
        logits = self._read(slot, np.concatenate([unread, tokens]), **kwargs)
        return logits if kwargs else logits[len(unread) :]


def copy_state(state: Any) -> Any:
    """Return a copy of a recurrent state that later forward passes do not change; None if the state is None.

    Keys and values of attention layers are not copied, because caches replace these tensors instead of changing them.
    So the time is O(bytes of the recurrent state).
    """
    shared: dict[int, Any] = {}
    for layer in getattr(state, "layers", ()):
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, torch.Tensor):
                shared[id(tensor)] = tensor
    return copy.deepcopy(state, shared)
