"""What the engine needs of a target model, and the ways to provide it for models with attention."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from ssd.target.attention import ATTENTION_NAME
from ssd.target.kv_cache import SlotKVCache, SlotRows

TokenMatrix = npt.NDArray[np.int64]


class Target(ABC):
    """A causal language model with ``num_slots`` growing sequences whose ends can be taken back.

    ``can_roll_back`` : False for recurrent models, which cannot un-read a token; the engine then never drafts.
    """

    can_roll_back: bool = True
    way: str
    """How the model is driven, for logs."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model = model
        self.num_slots = num_slots
        self.max_length = max_length
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self._keep_last = {"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {}

    @abstractmethod
    def length(self, slot: int) -> int:
        """Tokens the slot holds."""

    @abstractmethod
    def rollback(self, slot: int, length: int) -> None:
        """Forget everything after the slot's first ``length`` tokens; 0 frees the slot for another sequence."""

    @abstractmethod
    def _append(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
        """Append ``counts[b]`` tokens to each slot and return logits [B, T or fewer, V]."""

    @torch.inference_mode()
    def forward(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int]) -> torch.Tensor:
        """Append tokens to slots and score every position in one pass.

        slots : B distinct slots. tokens : int64[B, T], row b valid in its first ``counts[b]`` (>= 1) entries, the
        rest any valid token id. Returns logits [B, T, V]; ``[b, t]`` predicts the token after ``tokens[b, t]``.
        """
        return self._append(slots, tokens, counts)

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int]) -> None:
        """Append tokens to slots without scoring them."""
        self._append(slots, tokens, counts, **self._keep_last)


class SlotTarget(Target):
    """Models that hand our attention function its arguments: one batched pass over the slot KV cache."""

    way = "slot attention"

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int, max_width: int) -> None:
        """``max_width`` : most positions of one pass whose rows differ in length; padding may be written that far."""
        super().__init__(model, num_slots, max_length)
        model.set_attn_implementation(ATTENTION_NAME)
        self.kv_cache = SlotKVCache(num_slots, max_length + max_width, self.device)

    def length(self, slot: int) -> int:
        """Tokens the slot holds."""
        return int(self.kv_cache.lengths[slot])

    def rollback(self, slot: int, length: int) -> None:
        """Lower the slot's length; what lies beyond is overwritten later."""
        assert 0 <= length <= self.kv_cache.lengths[slot]
        self.kv_cache.lengths[slot] = length

    def _append(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
        rows = SlotRows.build(self.kv_cache, list(slots), tokens.shape[1], self.device)
        logits: torch.Tensor = self.model(
            input_ids=torch.from_numpy(tokens).to(self.device),
            # Padding may point past the model's last position, where learned position embeddings have no row.
            position_ids=rows.positions.clamp_max(self.max_length - 1),
            use_cache=False,
            slot_rows=rows,
            **kwargs,
        ).logits
        self.kv_cache.lengths[list(slots)] += np.asarray(counts)
        return logits


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

    def _append(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
        rows = [
            self._append_row(slot, row[:count], **kwargs)
            for slot, row, count in zip(slots, tokens, counts, strict=True)
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

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


def accepts(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward pass has an argument of this name."""
    return name in inspect.signature(model.forward).parameters
