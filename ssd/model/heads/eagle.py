"""The draft head of EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-2 (2406.16858), which differ in their trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ssd.model.heads.head import FINAL, RecurrentHead
from ssd.model.heads.target_parts import TargetParts


class EagleHead(RecurrentHead):
    """Llama layers over ``fc(concat(embedding of the next token, hidden state))`` that say the next hidden state.

    The target's embeddings and output layer are used. The first layer has no norm before its attention. What comes out
    stands for a hidden state behind the target's final norm, so nothing follows but the output layer (EAGLE's
    cnets1.py, vLLM's llama_eagle.py). ``config`` : of the layers, their positions, and the name of their attention.
    """

    def __init__(self, config: LlamaConfig, target: PreTrainedModel, *, bias: bool, qkv_bias: bool = False) -> None:
        """``bias`` : of ``fc``. ``qkv_bias`` : of queries, keys and values, as in layers made after Qwen2's."""
        super().__init__()
        self.feature_layers, self.feature_size, self.config = (FINAL,), config.hidden_size, config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()
        if qkv_bias:
            for layer in self.layers:
                for name in ("q_proj", "k_proj", "v_proj"):
                    plain = getattr(layer.self_attn, name)
                    setattr(layer.self_attn, name, nn.Linear(plain.in_features, plain.out_features))
        self._target = TargetParts(target)
        with target.device:  # it is no part of the state, which a caller may make without memory
            self.rotary = LlamaRotaryEmbedding(config)

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the target's vocabulary and the next hidden states.

        ``logits_to_keep`` among ``attention`` : of the last positions only, where a long text is read.
        """
        keep: int = attention.pop("logits_to_keep", 0)
        embedded = self._target.embed(token_ids).to(features.dtype)
        hidden = self.fc(torch.cat([embedded, features], dim=-1))
        rotation = self.rotary(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, position_ids=position_ids, **attention)
        return self._target.logits(hidden[:, -keep:]), hidden

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Frequencies rounded to two bytes turn late positions by wrong angles.
        self.rotary = LlamaRotaryEmbedding(self.config).to(self.fc.weight.device)
        return self
