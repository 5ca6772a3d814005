"""The draft head of EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer over features fused from three.

Its tensors bear the names of the EAGLE repository's own checkpoints: ``fc``, ``midlayer.*``, ``norm``, ``lm_head``, and
``d2t`` and ``t2d`` for the reduced vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from ssd.model.heads.head import RecurrentHead


class Eagle3Head(RecurrentHead):
    """One Llama layer that reads what the target made of a token, and the embedding of the token after it.

    config : shape and rotary positions of the layer, and by which name transformers finds its attention function:
    "sdpa" with ``attention_mask`` (and ``past_key_values`` where it goes on from earlier passes), or the slots'.
    embed : embeddings of token ids, as a rule the target's own, ``lambda ids: target.get_input_embeddings()(ids)``:
    asked for at each pass, as the target's layers may be replaced by faster ones. A module is held, but its weights
    are no part of this module's state. feature_layers, target_hidden_size : which hidden states are fused, and their
    size. draft_vocab_size : None where the head drafts every token of the target; otherwise `map_vocabulary` or the
    loaded state says which. norm_before_residual : whether the layer adds to its normed features instead of the
    features themselves, a choice of some published heads.
    """

    d2t: torch.Tensor
    """int64[Vd], what to add to a drafted id to get the target's."""
    t2d: torch.Tensor
    """bool[V], whether the target's token can be drafted."""

    def __init__(
        self,
        config: LlamaConfig,
        embed: Callable[[torch.Tensor], torch.Tensor],
        feature_layers: Sequence[int],
        *,
        target_hidden_size: int | None = None,
        draft_vocab_size: int | None = None,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.feature_layers = tuple(feature_layers)
        self.feature_size: int = config.hidden_size
        self.norm_before_residual = norm_before_residual
        self._embed = (embed,)  # in a tuple, so that a module becomes no part of this one
        size = len(self.feature_layers) * (target_hidden_size or config.hidden_size)
        self.fc = nn.Linear(size, config.hidden_size, bias=False)
        self.midlayer = _MiddleLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size or config.vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        if draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
            self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                lambda *_: self._read_vocabulary()
            )

    def map_vocabulary(self, draft_to_target: torch.Tensor) -> None:
        """Draft these tokens of the target, int64[Vd], ascending."""
        self.d2t.copy_(draft_to_target - torch.arange(len(draft_to_target)))
        self.t2d.zero_()
        self.t2d[draft_to_target] = True
        self._read_vocabulary()

    def combine(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fuse the hidden states into features, [..., feature_size]."""
        fused: torch.Tensor = self.fc(torch.cat(list(hidden), dim=-1))
        return fused

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the draft vocabulary, [B, T, Vd], and the features to go on with, those before the last norm.

        ``logits_to_keep`` among ``attention`` : of the last positions only, where a long text is read.
        """
        keep: int = attention.pop("logits_to_keep", 0)
        embedded = self._embed[0](token_ids).to(features.dtype)
        rotation = self.rotary(features, position_ids)
        features = self.midlayer(embedded, features, rotation, self.norm_before_residual, attention)
        return self.lm_head(self.norm(features[:, -keep:])), features

    def _read_vocabulary(self) -> None:
        self.draft_to_target = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Frequencies rounded to two bytes turn late positions by wrong angles.
        self.rotary = LlamaRotaryEmbedding(self.config).to(self.fc.weight.device)
        if self.draft_to_target is not None:
            self._read_vocabulary()
        return self


class _MiddleLayer(nn.Module):
    """A Llama layer whose attention reads embedding and features side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        norm_before_residual: bool,
        attention: dict[str, Any],
    ) -> torch.Tensor:
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended = self.self_attn(both, position_embeddings=rotation, **{"attention_mask": None, **attention})[0]
        features = (normed if norm_before_residual else features) + attended
        out: torch.Tensor = features + self.mlp(self.post_attention_layernorm(features))
        return out
