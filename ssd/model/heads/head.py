"""What a draft head is: which hidden states of the target it reads, and what it makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Head(nn.Module, ABC):
    """A network beside the target that drafts from its hidden states, token by token, going on from its own output.

    ``feature_layers`` : whose hidden states it reads: k for what comes out of the first k decoder layers, 0 for the
    embeddings, `tap.FINAL`. ``feature_size`` : numbers kept of each position. ``num_tokens`` : most that it drafts;
    None is any number. ``attends`` : whether it reads the whole text, and not its end alone. ``draft_to_target`` :
    int64[Vd], the target's id of each token it can draft; None where the vocabularies are one. ``config`` : of layers
    whose attention is found by the name that stands there.
    """

    feature_layers: tuple[int, ...]
    feature_size: int
    num_tokens: int | None = None
    attends: bool = True
    draft_to_target: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = None
        self.rotary: LlamaRotaryEmbedding | None = None

    def combine(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """The features of positions, [..., feature_size], from one tensor [..., hidden size] for each feature layer.

        Part of the target's own pass, so it must not wait for the device.
        """
        (only,) = hidden
        return only

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the token after ``token_ids``, [B, T, Vd], and the features to go on with, [B, T, ...].

        token_ids : int64[B, T], at each position the token that follows the one whose features stand there. features :
        [B, T, feature_size], the target's, or for drafted positions those that this returned. position_ids :
        int64[B, T], where the tokens of the features stand. attention : what the attention function is told besides:
        ``slot_rows`` where it is the slots', ``attention_mask`` elsewhere; and ``logits_to_keep``, of how many of the
        last positions logits are wanted.
        """

    def turn_by(self, config: LlamaConfig, device: torch.device | str) -> None:
        """Give positions of Llama's kind to a head of its own layers; they are no part of its state."""
        self.config = config
        with torch.device(device):
            self.rotary = LlamaRotaryEmbedding(config)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.rotary is not None:  # frequencies rounded to two bytes turn late positions by wrong angles
            self.turn_by(self.config, next(self.parameters()).device)
        return self


class TargetParts:
    """Embeddings, positions and output layer of the target.

    They are looked up when they are used, because faster layers may have taken the place of the model's own, and are
    no part of the head's state.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings, [..., hidden size]."""
        embedded: torch.Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded

    def rotation(self, like: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None) -> Any:
        """What attention layers are told of positions, int64[B, T], in the dtype of ``like``.

        layer_type : of which layers, where there are several kinds.
        """
        rotary = self.model.get_decoder().rotary_emb
        return rotary(like, position_ids) if layer_type is None else rotary(like, position_ids, layer_type)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model's output layer makes of hidden states, [..., V], scaled and capped as the model does."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits
