"""Layers of the target that its draft heads use as their own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


class TargetParts:
    """Embeddings, positions and output layer of the target.

    They are looked up when they are used, because faster layers may have taken the place of the model's own, and are
    no part of the head's state.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model

    @property
    def decoder(self) -> Any:
        """What holds the decoder layers."""
        return self.model.get_decoder()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings, [..., hidden size]."""
        embedded: torch.Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded

    def rotation(self, like: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """What attention layers are told of positions, int64[B, T], in the dtype of ``like``.

        layer_type : of which layers, where there are several kinds.
        """
        rotary = self.decoder.rotary_emb
        return rotary(like, position_ids) if layer_type is None else rotary(like, position_ids, layer_type)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model's output layer makes of hidden states, [..., V], scaled and capped as the model does."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        scale = getattr(config, "logit_scale", None)
        if scale is not None:
            logits = logits * scale
        divisor = getattr(config, "logits_scaling", None)
        if divisor is not None:
            logits = logits / divisor
        cap = getattr(config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits
