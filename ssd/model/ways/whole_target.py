"""Drive any causal language model at all: read the whole context at every pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ssd.model.sampling.pass_output import PassOutput
from ssd.model.target import Target, TokenMatrix, accepts


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
