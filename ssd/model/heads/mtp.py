"""Modules for multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.head import FINAL, RecurrentHead
from ssd.model.heads.target_parts import TargetParts
from ssd.model.kv.attention import ATTENTION_NAME


class MTPHead(RecurrentHead):
    """One more decoder layer of the target's own kind, over hidden state and embedding of the next token.

    ``project(concat(norm_embedding(embedding), norm_hidden(features)))`` goes through ``layer`` and ``norm``; that is
    what the target's output layer reads, and the next features: what the module is fed first, the target's hidden state
    behind the final norm, has passed a norm as well. So do SGLang (deepseek_nextn.py) and vLLM (qwen3_next_mtp.py, and
    for GLM deepseek_mtp.py; that of 2025 leaves the norm out there). A checkpoint with several modules was trained for
    one token each; the first is used for all.

    ``hidden_first`` : whether features come first in the concatenation. ``norm`` : None where there is none, as with
    ERNIE 4.5. ``config`` : the layer's; its attention is found by the name that stands there.
    """

    def __init__(self, target: PreTrainedModel, like: DecoderLayer, *, hidden_first: bool, has_norm: bool) -> None:
        """``like`` : a layer as the module's. Made without memory, on the meta device."""
        super().__init__()
        size: int = target.config.get_text_config().hidden_size
        self.feature_layers, self.feature_size = (FINAL,), size
        self.hidden_first, self.config = hidden_first, like.config
        self.norm_embedding, self.norm_hidden = copy.deepcopy(like.norm), copy.deepcopy(like.norm)
        with torch.device("meta"):
            self.project = nn.Linear(2 * size, size, bias=False)
        self.layer = like.layer
        self.norm = copy.deepcopy(like.norm) if has_norm else None
        self._target, self._layer_type = TargetParts(target), like.layer_type

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the target's vocabulary and the next features.

        ``logits_to_keep`` among ``attention`` : of the last positions only, where a long text is read.
        """
        keep: int = attention.pop("logits_to_keep", 0)
        embedded = self.norm_embedding(self._target.embed(token_ids).to(features.dtype))
        hidden = self.norm_hidden(features)
        both = [hidden, embedded] if self.hidden_first else [embedded, hidden]
        projected = self.project(torch.cat(both, dim=-1))
        out = self.layer(
            projected,
            position_embeddings=self._target.rotation(projected, position_ids, self._layer_type),
            position_ids=position_ids,
            **attention,
        )
        hidden = out[0] if isinstance(out, tuple) else out
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self._target.logits(hidden[:, -keep:]), hidden


class DecoderLayer:
    """A decoder layer of a target's kind and a norm as its last, both without memory.

    ``layer`` : its attention writes to layer 0 of a cache of its own. ``layer_type`` : which of several kinds of
    positions it uses, None where there is one kind.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, config: Any, layer_type: str | None) -> None:
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # type: ignore[assignment]
        self.layer, self.norm, self.config, self.layer_type = layer, norm, config, layer_type


def decoder_layers(target: PreTrainedModel) -> Sequence[DecoderLayer]:
    """Layers that a module of this target may have: its own that attend to everything, the last one first.

    Raises ModelError where the target is built in another way.
    """
    config = copy.deepcopy(target.config)
    try:
        with torch.device("meta"):
            model = type(target)(config)
        model.set_attn_implementation(ATTENTION_NAME)
        decoder = TargetParts(model).decoder
        layers, norm = list(decoder.layers), decoder.norm
    except Exception as failure:  # whatever an architecture does: there is no module for it
        raise ModelError(
            f"{_no_module(target)}: its layers are built in another way ({first_line(failure)})"
        ) from failure
    types = list(getattr(decoder.config, "layer_types", None) or [None] * len(layers))
    named = "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters
    found = [
        DecoderLayer(layer, norm, decoder.config, kind if named else None)
        for layer, kind in zip(layers, types, strict=True)
        if kind in (None, "full_attention")
    ]
    if not found:
        raise ModelError(f"{_no_module(target)}: none of its layers attends to the whole text")
    return found[::-1]


def _no_module(target: PreTrainedModel) -> str:
    return f"an MTPHead cannot be driven beside {type(target).__name__}"
