"""The networks of draft heads: EAGLE's (1, 2 and 3), Medusa's, and modules for multi-token prediction."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from ssd.errors import ModelError, first_line
from ssd.model.heads.head import FINAL, ParallelHead, RecurrentHead, TargetParts
from ssd.model.kv.attention import ATTENTION_NAME


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


class MedusaHead(ParallelHead):
    """For each of several tokens ahead a few residual blocks over the last hidden state, then an output layer.

    ``blocks.{i}.{j}.linear`` and ``outputs.{i}`` are block j and output layer of the i-th.
    """

    token_map: torch.Tensor | None
    """int64[Vd], the target's id of each token that can be drafted; None where all can."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        target: TargetParts | None = None,
        shares_output: bool = False,
        token_map: torch.Tensor | None = None,
    ) -> None:
        """``num_layers`` : blocks of each. ``bias`` : of the blocks.

        target : whose output layer all heads share; None where they have their own, one each, or one for all if
        ``shares_output``. token_map : as above.
        """
        super().__init__()
        self.feature_layers, self.feature_size, self.num_tokens = (FINAL,), hidden_size, num_heads
        self.vocab_size = vocab_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_Block(hidden_size, bias) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self._target = target
        outputs = 0 if target is not None else 1 if shares_output else num_heads
        num_drafted = vocab_size if token_map is None else len(token_map)
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, num_drafted, bias=False) for _ in range(outputs))
        self.register_buffer("token_map", token_map, persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits, [B, num_tokens, V]; minus infinity for tokens that cannot be drafted."""
        hidden = [block(features) for block in self.blocks]
        if self._target is not None:
            return self._target.logits(torch.stack(hidden, dim=1))
        shared = len(self.outputs) == 1
        logits = torch.stack([self.outputs[0 if shared else i](each) for i, each in enumerate(hidden)], dim=1)
        if self.token_map is None:
            return logits
        all_tokens = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        all_tokens[..., self.token_map] = logits
        return all_tokens


class _Block(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


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
