"""The networks of draft heads: EAGLE's (1, 2 and 3), Medusa's, and modules for multi-token prediction."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from ssd.errors import ModelError, first_line
from ssd.model.heads.head import Head, TargetParts
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.layers.tap import FINAL


class FusedHead(Head):
    """Decoder layers over ``fc(concat(embedding of the next token, hidden state))`` that say the next hidden state.

    EAGLE's first head (cnets1.py, vLLM's llama_eagle.py) has Llama layers and no norms: what comes out stands for a
    hidden state behind the target's final norm. A module for multi-token prediction is one more layer of the target's
    own kind, with a norm before either half of the concatenation and one at the end, whose output is the next features
    too: what it is fed first, the target's hidden state behind the final norm, has passed a norm as well. So do SGLang
    (deepseek_nextn.py) and vLLM (qwen3_next_mtp.py, and for GLM deepseek_mtp.py; that of 2025 leaves the norm out
    there). The target's embeddings and output layer are used.
    """

    def __init__(
        self, target: PreTrainedModel, layers: Sequence[nn.Module], config: Any, *, layer_type: str | None = None,
        norm: nn.Module | None = None, has_last_norm: bool = False, bias: bool = False, hidden_first: bool = False,
    ) -> None:  # fmt: skip
        """``layer_type`` : which of the target's several kinds of positions the layers use, None where there is one.

        norm : copied for each norm of a module; None for EAGLE's. bias : of ``fc``. hidden_first : whether features
        come first in the concatenation. Made without memory, on the meta device.
        """
        super().__init__()
        size: int = target.config.get_text_config().hidden_size
        self.feature_layers, self.feature_size, self.config = (FINAL,), size, config
        self.hidden_first, self._layer_type, self._target = hidden_first, layer_type, TargetParts(target)
        with torch.device("meta"):
            self.fc = nn.Linear(2 * size, size, bias=bias)
        self.layers = nn.ModuleList(layers)
        self.norm_embedding, self.norm_hidden = (copy.deepcopy(norm or nn.Identity()) for _ in range(2))
        self.norm = copy.deepcopy(norm) if norm is not None and has_last_norm else nn.Identity()

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits over the target's vocabulary and the next hidden states."""
        keep: int = attention.pop("logits_to_keep", 0)
        embedded = self.norm_embedding(self._target.embed(token_ids).to(features.dtype))
        hidden = self.norm_hidden(features)
        hidden = self.fc(torch.cat([hidden, embedded] if self.hidden_first else [embedded, hidden], dim=-1))
        if self.rotary is not None:
            rotation = self.rotary(hidden, position_ids)
        else:
            rotation = self._target.rotation(hidden, position_ids, self._layer_type)
        for layer in self.layers:
            out = layer(hidden, position_embeddings=rotation, position_ids=position_ids, **attention)
            hidden = out[0] if isinstance(out, tuple) else out
        hidden = self.norm(hidden)
        return self._target.logits(hidden[:, -keep:]), hidden


def llama_layers(config: LlamaConfig, *, qkv_bias: bool) -> list[nn.Module]:
    """EAGLE's, of which the first has no norm before its attention. qkv_bias : of layers made after Qwen2's."""
    layers: list[Any] = [LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers)]
    layers[0].input_layernorm = nn.Identity()
    for layer in layers if qkv_bias else ():
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(plain.in_features, plain.out_features))
    return layers


class Eagle3Head(Head):
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
        self.feature_layers = tuple(feature_layers)
        self.feature_size: int = config.hidden_size
        self.norm_before_residual = norm_before_residual
        self._embed = (embed,)  # in a tuple, so that a module becomes no part of this one
        size = len(self.feature_layers) * (target_hidden_size or config.hidden_size)
        self.fc = nn.Linear(size, config.hidden_size, bias=False)
        self.midlayer = _MiddleLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size or config.vocab_size, bias=False)
        self.turn_by(config, self.fc.weight.device)
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
        """Logits over the draft vocabulary, [B, T, Vd], and the features to go on with, those before the last norm."""
        keep: int = attention.pop("logits_to_keep", 0)
        assert self.rotary is not None
        embedded = self._embed[0](token_ids).to(features.dtype)
        rotation = self.rotary(features, position_ids)
        features = self.midlayer(embedded, features, rotation, self.norm_before_residual, attention)
        return self.lm_head(self.norm(features[:, -keep:])), features

    def _read_vocabulary(self) -> None:
        self.draft_to_target = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
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


class MedusaHead(Head):
    """For each of several tokens ahead a few residual blocks over the last hidden state, then an output layer.

    ``blocks.{i}.{j}.linear`` and ``outputs.{i}`` are block j and output layer of the i-th. The target itself says what
    comes first after the last position that it was fed, and none knows what the others say: so what the blocks made of
    that position is what a draft goes on with, [B, T, tokens left, hidden size].
    """

    attends = False
    num_tokens: int

    def __init__(
        self,
        hidden_size: int,
        num_drafted: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        target: TargetParts | None = None,
        shares_output: bool = False,
    ) -> None:
        """``num_drafted`` : tokens that can be drafted. ``num_layers`` : blocks of each. ``bias`` : of the blocks.

        target : whose output layer all heads share; None where they have their own, one each, or one for all if
        ``shares_output``.
        """
        super().__init__()
        self.feature_layers, self.feature_size, self.num_tokens = (FINAL,), hidden_size, num_heads
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_Block(hidden_size, bias) for _ in range(num_layers))) for _ in range(num_heads)
        )
        outputs = 0 if target is not None else 1 if shares_output else num_heads
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, num_drafted, bias=False) for _ in range(outputs))
        self._target = target

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next of the heads says, [B, T, Vd], and what is left for the others."""
        left = features if features.dim() == 4 else torch.stack([block(features) for block in self.blocks], 2)
        hidden = left[:, :, 0]
        if self._target is not None:
            return self._target.logits(hidden), left[:, :, 1:]
        return self.outputs[-left.shape[2] if len(self.outputs) > 1 else 0](hidden), left[:, :, 1:]


class _Block(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class DecoderLayer(NamedTuple):
    """A decoder layer of a target's kind and a norm as its last, both without memory.

    ``layer`` : its attention writes to layer 0 of a cache of its own. ``layer_type`` : which of several kinds of
    positions it uses, None where there is one kind.
    """

    layer: nn.Module
    norm: nn.Module
    config: Any
    layer_type: str | None


def decoder_layers(target: PreTrainedModel) -> Sequence[DecoderLayer]:
    """Layers that a module of this target may have: its own that attend to everything, the last one first.

    Raises ModelError where the target is built in another way.
    """
    refused = f"a module for multi-token prediction cannot be driven beside {type(target).__name__}"
    config = copy.deepcopy(target.config)
    try:
        with torch.device("meta"):
            model: Any = type(target)(config)
        model.set_attn_implementation(ATTENTION_NAME)
        decoder = model.get_decoder()
        layers, norm = list(decoder.layers), decoder.norm
    except Exception as failure:  # whatever an architecture does: there is no module for it
        raise ModelError(f"{refused}: its layers are built in another way ({first_line(failure)})") from failure
    for module in decoder.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0
    types = list(getattr(decoder.config, "layer_types", None) or [None] * len(layers))
    named = "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters
    found = [
        DecoderLayer(layer, norm, decoder.config, kind if named else None)
        for layer, kind in zip(layers, types, strict=True)
        if kind in (None, "full_attention")
    ]
    if not found:
        raise ModelError(f"{refused}: none of its layers attends to the whole text")
    return found[::-1]
