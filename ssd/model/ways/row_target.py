"""Drive models with attention row by row, on the caches of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from ssd.model.sampling.pass_output import PassOutput
from ssd.model.target import Target, TokenMatrix, accepts


class RowTarget(Target):
    """Models that slot attention does not reach: one Hugging Face cache per slot, rows computed one after another.

    Slower in a batch, but any position encoding works, and any cache whose end can be cropped.
    """

    way = "row by row"

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._takes_positions = accepts(model, "position_ids")
        self._caches = [self._new_cache() for _ in range(num_slots)]
        self._lengths = [0] * num_slots

    def length(self, slot: int) -> int:
        """Tokens the slot holds."""
        return self._lengths[slot]

    def rollback(self, slot: int, length: int) -> None:
        """Crop the slot's cache."""
        removed = self._lengths[slot] - length
        assert removed >= 0
        if length == 0:
            self._caches[slot] = self._new_cache()
        elif removed:
            self._caches[slot].crop(-removed)
        self._lengths[slot] = length

    def bytes_per_token(self, slot: int) -> int:
        """Bytes that a token of a slot takes, which must hold some."""
        tensors = [tensor for layer in self._caches[slot].layers for tensor in (layer.keys, layer.values)]
        return int(sum(tensor.nbytes for tensor in tensors)) // self._lengths[slot]

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        for index, layer in enumerate(self._caches[source].layers):
            self._caches[slot].update(layer.keys[..., start:end, :], layer.values[..., start:end, :], index)
        self._lengths[slot] = end

    def _append(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> PassOutput:
        rows = [
            self._append_row(slot, row[:count], **kwargs)
            for slot, row, count in zip(slots, tokens, counts, strict=True)
        ]
        return PassOutput(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))

    def _append_row(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        """One pass over one row's new tokens, int64[n]: logits [n or fewer, V]."""
        start = self._lengths[slot]
        end = start + len(tokens)
        if self._takes_positions:
            kwargs["position_ids"] = torch.arange(start, end, device=self.device)[None]
        ids = torch.from_numpy(tokens[None]).to(self.device)
        logits = self._run(slot, ids, **kwargs)
        self._lengths[slot] = end
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


class WholeTarget(Target):
    """No cache: a slot is its text. For models whose state lives in the model itself, or that have no cache.

    A pass costs the whole context, so verifying a long draft costs hardly more than one token.
    """

    way = "whole context"
    can_keep_prefixes = False

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._texts: list[list[int]] = [[] for _ in range(num_slots)]
        self._takes_keep = accepts(model, "logits_to_keep")
        self._without_cache = {"use_cache": False} if accepts(model, "use_cache") else {}

    def length(self, slot: int) -> int:
        """Tokens the slot holds."""
        return len(self._texts[slot])

    def rollback(self, slot: int, length: int) -> None:
        """Forget the end of the text."""
        assert 0 <= length <= len(self._texts[slot])
        del self._texts[slot][length:]

    def prefill(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int]) -> None:
        """Append tokens to slots; they are read with the next pass that is scored."""
        for slot, row, count in zip(slots, tokens, counts, strict=True):
            self._texts[slot].extend(row[:count].tolist())

    def _append(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> PassOutput:
        self.prefill(slots, tokens, counts)
        rows = []
        for slot, count in zip(slots, counts, strict=True):
            ids = torch.tensor([self._texts[slot]], device=self.device)
            keep = {"logits_to_keep": int(count)} if self._takes_keep else {}
            rows.append(self.model(input_ids=ids, **self._without_cache, **keep).logits[0, -count:])
        return PassOutput(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
