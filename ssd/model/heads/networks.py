"""Draft head networks that read the target's hidden states: EAGLE, EAGLE-3, Medusa and multi-token prediction."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from ssd.errors import ModelError, first_line
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.layers.hidden_states import FINAL


class Head(nn.Module, ABC):
    """A draft head: a small network that drafts tokens from the target's hidden states.

    The head drafts the first token from hidden states that the target computed, and each further token from its own
    output for the previous token. ``config`` is the transformers configuration of the head's decoder layer.
    """

    # The hidden states that it reads: k is the output of the first k decoder layers, 0 the embeddings, `FINAL` the
    # input of the output layer.
    feature_layers: tuple[int, ...]
    feature_size: int  # the number of feature values per position
    num_tokens: int | None = None  # the maximum number of drafted tokens
    attends: bool = True  # whether it attends to the whole text instead of only reading its last position
    draft_to_target: torch.Tensor | None  # int64[Vd]; None if the vocabularies are the same

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("draft_to_target", None)
        self.config: Any = None
        # In a tuple, because a submodule would be rounded with this module.
        self._rotary: tuple[LlamaRotaryEmbedding, ...] = ()

    def combine(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Combine the target's hidden states, one tensor for each feature layer, into features, [..., feature_size].

        On a GPU this runs inside the target's forward pass, so it must not synchronise with the device.
        """
        (only,) = hidden
        return only

    @property
    def input_size(self) -> int:
        """The number of values per position that `combine` reads, of all feature layers together."""
        return self.feature_size

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the tokens after ``token_ids``, [B, T, Vd], and the next features, [B, T, ...].

        ``features`` belong to the tokens at ``position_ids``, and ``token_ids``, int64[B, T], are the next tokens. The
        features [B, T, feature_size] are the target's or, for drafted tokens, those that this method returned before.
        ``attention`` is ``slot_rows`` for slot attention, or ``attention_mask`` for other attention functions. It may
        also contain ``logits_to_keep``, the number of last positions whose logits are returned (all by default).
        """

    def set_rotary(self, config: LlamaConfig, device: torch.device | str) -> None:
        """Create Llama-style rotary position embeddings for a draft head that has its own layers.

        They are not part of the head's state dict, because bfloat16 would round the angles of late positions too much.
        """
        self.config = config
        with torch.device(device):
            self._rotary = (LlamaRotaryEmbedding(config),)

    @property
    def rotary(self) -> LlamaRotaryEmbedding | None:
        return self._rotary[0] if self._rotary else None


class TargetParts:
    """The embeddings, rotary positions and output layer of the target model, for draft heads that use them.

    These parts are looked up in the target on each use, because faster layers may replace them, and they are not in the
    head's state dict.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded

    def rotation(self, like: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None) -> Any:
        """Return the cosines and sines of the target's rotary embeddings at ``position_ids``, int64[B, T].

        They have the dtype of ``like``. ``layer_type`` is required if layer types have different rotary embeddings.
        """
        rotary = self.model.get_decoder().rotary_emb
        return rotary(like, position_ids) if layer_type is None else rotary(like, position_ids, layer_type)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the target's output layer to hidden states, with its logit scaling and soft cap; returns [..., V]."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


class FusedHead(Head):
    """A draft head that predicts the next hidden state with one decoder layer: EAGLE, EAGLE-2, or an MTP module.

    The layer's input is ``fc(concat(embedding of the next token, hidden state))``. Embeddings and output layer are the
    target's. EAGLE (cnets1.py, vLLM's llama_eagle.py) has a Llama layer and no norms, and its output approximates the
    hidden state after the target's final norm. A module for multi-token prediction (MTP; SGLang's deepseek_nextn.py,
    vLLM's deepseek_mtp.py) has a layer of the target's architecture, and a norm before each half of the concatenation.
    If it also has a norm after the layer, the predicted hidden state is the output of this norm. The head's parameters
    are on the meta device, until a checkpoint is assigned.

    Each norm is a copy of ``norm``, which is None for EAGLE. ``has_last_norm`` adds the norm after the layer. With
    ``hidden_first`` the hidden state comes before the embedding. ``layer_type`` is the layer's type, if the target's
    layer types have different rotary embeddings.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layer: nn.Module,
        config: Any,
        *,
        layer_type: str | None = None,
        norm: nn.Module | None = None,
        has_last_norm: bool = False,
        bias: bool = False,
        hidden_first: bool = False,
    ) -> None:
        super().__init__()
        size: int = target.config.get_text_config().hidden_size
        self.feature_layers, self.feature_size, self.config = (FINAL,), size, config
        self.hidden_first, self._layer_type, self._target = hidden_first, layer_type, TargetParts(target)
        with torch.device("meta"):
            self.fc = nn.Linear(2 * size, size, bias=bias)
        self.layer = layer
        self.norm_embedding, self.norm_hidden = (copy.deepcopy(norm or nn.Identity()) for _ in range(2))
        self.norm = copy.deepcopy(norm) if norm is not None and has_last_norm else nn.Identity()

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keep: int = attention.pop("logits_to_keep", 0)
        embedded = self.norm_embedding(self._target.embed(token_ids).to(features.dtype))
        hidden = self.norm_hidden(features)
        hidden = self.fc(torch.cat([hidden, embedded] if self.hidden_first else [embedded, hidden], dim=-1))
        if self.rotary is not None:
            rotation = self.rotary(hidden, position_ids)
        else:
            rotation = self._target.rotation(hidden, position_ids, self._layer_type)
        out = self.layer(hidden, position_embeddings=rotation, position_ids=position_ids, **attention)
        hidden = self.norm(out[0] if isinstance(out, tuple) else out)
        return self._target.logits(hidden[:, -keep:]), hidden


def eagle_layer(config: LlamaConfig, *, qkv_bias: bool) -> nn.Module:
    """Return EAGLE's decoder layer: a Llama layer without the norm before attention.

    With ``qkv_bias``, the projections of queries, keys and values have biases, as in Qwen2.
    """
    layer: Any = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    for name in ("q_proj", "k_proj", "v_proj") if qkv_bias else ():
        plain = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, nn.Linear(plain.in_features, plain.out_features))
    made: nn.Module = layer
    return made


class Eagle3Head(Head):
    """An EAGLE-3 draft head: one Llama layer that reads the features of a token and the embedding of the next token.

    ``config`` is the layer's configuration, whose attention is "sdpa", called with ``attention_mask``, or slot
    attention. ``embed`` embeds token ids, usually with the target's embeddings, and is not part of the state dict.
    ``feature_layers`` are the target layers whose hidden states are combined into the features. With
    ``draft_vocab_size`` the head has a vocabulary of its own, and the caller must assign ``draft_to_target``. With
    ``norm_before_residual`` the residual connection starts from the normed features, as in some published heads.
    """

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
        self._embed = (embed,)  # in a tuple, so that a module does not become a submodule
        size = len(self.feature_layers) * (target_hidden_size or config.hidden_size)
        self.fc = nn.Linear(size, config.hidden_size, bias=False)
        self.midlayer = _MiddleLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size or config.vocab_size, bias=False)
        self.set_rotary(config, self.fc.weight.device)
        if draft_vocab_size is not None:
            self.draft_to_target = torch.zeros(draft_vocab_size, dtype=torch.int64)

    @property
    def input_size(self) -> int:
        return self.fc.in_features

    def combine(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        fused: torch.Tensor = self.fc(torch.cat(list(hidden), dim=-1))
        return fused

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keep: int = attention.pop("logits_to_keep", 0)
        assert self.rotary is not None
        embedded = self._embed[0](token_ids).to(features.dtype)
        rotation = self.rotary(features, position_ids)
        features = self.midlayer(embedded, features, rotation, self.norm_before_residual, attention)
        return self.lm_head(self.norm(features[:, -keep:])), features


class _MiddleLayer(LlamaDecoderLayer):  # type: ignore[misc]  # transformers is not typed
    """EAGLE-3's decoder layer: a Llama layer whose attention reads the concatenated embedding and features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

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
    """A Medusa draft head: independent heads, of which the i-th predicts the i-th draft token from one hidden state.

    Each head has residual blocks and an output layer: ``blocks.{i}.{j}.linear`` is block j of head i, ``outputs.{i}``
    its output layer. With a ``target``, all heads use the target's output layer. The target itself samples the token
    before the first draft token. All blocks are computed at the first draft token, and the outputs for the remaining
    tokens, [B, T, remaining heads, hidden size], are returned as the next features.
    """

    attends = False
    num_tokens: int

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        target: TargetParts | None = None,
    ) -> None:
        super().__init__()
        self.feature_layers, self.feature_size, self.num_tokens = (FINAL,), hidden_size, num_heads
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_ResidualBlock(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        outputs = num_heads if target is None else 0
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(outputs))
        self._target = target

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        left = features if features.dim() == 4 else torch.stack([block(features) for block in self.blocks], 2)
        hidden = left[:, :, 0]
        if self._target is not None:
            return self._target.logits(hidden), left[:, :, 1:]
        return self.outputs[-left.shape[2]](hidden), left[:, :, 1:]


class _ResidualBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class DecoderLayer(NamedTuple):
    """A decoder layer of the target's architecture and its final norm, on the meta device, for an MTP draft head."""

    layer: nn.Module  # its attention writes to layer 0 of its own KV cache
    norm: nn.Module
    config: Any
    layer_type: str | None  # the kind of rotary positions that the layer uses, if the target has several


def mtp_layers(target: PreTrainedModel) -> Sequence[DecoderLayer]:
    """Return copies without weights of the target's decoder layers with full attention, the last layer first.

    A module for multi-token prediction (MTP) has the architecture of one of these layers. Raises ModelError if the
    target's structure is unknown or no layer has full attention.
    """
    refused = f"a module for multi-token prediction cannot be used with {type(target).__name__}"
    config = copy.deepcopy(target.config)
    try:
        with torch.device("meta"):
            model: Any = type(target)(config)
        model.set_attn_implementation(ATTENTION_NAME)
        decoder = model.get_decoder()
        layers, norm = list(decoder.layers), decoder.norm
    except Exception as failure:  # from an architecture with another structure, which has no MTP module
        raise ModelError(
            f"{refused}: the structure of the model's layers is unknown ({first_line(failure)})"
        ) from failure
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
        raise ModelError(f"{refused}: none of the model's layers has full attention")
    return found[::-1]
