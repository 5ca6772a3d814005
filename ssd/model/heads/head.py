"""What a draft head is: which hidden states of the target it reads, and what it makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from ssd.model.layers import tap

FINAL: Final = tap.FINAL
"""The hidden state that the target's output layer reads: behind the last decoder layer and the final norm."""


class Head(nn.Module, ABC):
    """A network beside the target that drafts from its hidden states.

    ``feature_layers`` : whose hidden states it reads: k for what comes out of the first k decoder layers, 0 for the
    embeddings, FINAL. ``feature_size`` : numbers kept of each position.
    """

    feature_layers: tuple[int, ...]
    feature_size: int

    def combine(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """The features of positions, [..., feature_size], from one tensor [..., hidden size] for each feature layer.

        Part of the target's own pass, so it must not wait for the device.
        """
        (only,) = hidden
        return only


class RecurrentHead(Head):
    """A head that goes on from its own output, token by token: EAGLE-3, multi-token prediction modules.

    ``draft_to_target`` : int64[Vd], the target's id of each token it can draft; None where the vocabularies are one.
    """

    draft_to_target: torch.Tensor | None = None

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the token after ``token_ids``, [B, T, Vd], and the features to go on with, [B, T, feature_size].

        token_ids : int64[B, T], at each position the token that follows the one whose features stand there. features :
        [B, T, feature_size], the target's, or for drafted positions those that this returned. position_ids :
        int64[B, T], where the tokens of the features stand. attention : what the attention function is told besides:
        ``slot_rows`` where it is the slots', ``attention_mask`` elsewhere.
        """


class ParallelHead(Head):
    """A head that says several tokens at once, each without knowing the others: Medusa.

    ``num_tokens`` : how many.
    """

    num_tokens: int

    @abstractmethod
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits, [B, num_tokens, V], of the tokens after the next one.

        features : [B, feature_size], of the last position that the target was fed. The target itself says what comes
        first after it; the i-th of these is the (i + 1)-th after that one.
        """


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
