"""Draft heads: networks that read the target's hidden states and draft, EAGLE's, Medusa's, multi-token prediction's."""

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
from ssd.model.layers.tap import FINAL


class Head(nn.Module, ABC):
    """A network beside the target that drafts from its hidden states, token by token, going on from its own output.

    ``feature_layers`` : whose hidden states it reads: k for what comes out of the first k decoder layers, 0 for the
    embeddings, `tap.FINAL`. ``feature_size`` : numbers kept of each position. ``num_tokens`` : most that it drafts;
    None is any number. ``attends`` : whether it reads the whole text, and not its end alone. ``config`` : of layers
    whose attention is found by the name that stands there. ``draft_to_target`` : int64[Vd], the target's id of each
    token that it can draft; None where the vocabularies are one.
    """

    feature_layers: tuple[int, ...]
    feature_size: int
    num_tokens: int | None = None
    attends: bool = True
    draft_to_target: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("draft_to_target", None)
        self.config: Any = None
        self._rotary: tuple[LlamaRotaryEmbedding, ...] = ()  # a module would be rounded with this one

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
        """Give positions of Llama's kind to a head of its own layers.

        They are no part of its state: rounded to two bytes they would turn late positions by wrong angles.
        """
        self.config = config
        with torch.device(device):
            self._rotary = (LlamaRotaryEmbedding(config),)

    @property
    def rotary(self) -> LlamaRotaryEmbedding | None:
        """Of `turn_by`."""
        return self._rotary[0] if self._rotary else None


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


class FusedHead(Head):
    """A decoder layer over ``fc(concat(embedding of the next token, hidden state))`` that say the next hidden state.

    EAGLE's first head (cnets1.py, vLLM's llama_eagle.py) has a Llama layer and no norms: what comes out stands for a
    hidden state behind the target's final norm. A module for multi-token prediction is one more layer of the target's
    own kind, with a norm before either half of the concatenation and one at the end, whose output is the next features
    too, as in SGLang (deepseek_nextn.py) and vLLM (deepseek_mtp.py). The target's embeddings and output layer are used.
    """

    def __init__(
        self, target: PreTrainedModel, layer: nn.Module, config: Any, *, layer_type: str | None = None,
        norm: nn.Module | None = None, has_last_norm: bool = False, bias: bool = False, hidden_first: bool = False,
    ) -> None:  # fmt: skip
        """``layer_type`` : which of the target's several kinds of positions the layer uses, None where there is one.

        norm : copied for each norm of a module; None for EAGLE's. bias : of ``fc``. hidden_first : whether features
        come first in the concatenation. Made without memory, on the meta device.
        """
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
        """Logits over the target's vocabulary and the next hidden states."""
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
    """EAGLE's, which has no norm before its attention. qkv_bias : of one made after Qwen2's."""
    layer: Any = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    for name in ("q_proj", "k_proj", "v_proj") if qkv_bias else ():
        plain = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, nn.Linear(plain.in_features, plain.out_features))
    made: nn.Module = layer
    return made


class Eagle3Head(Head):
    """One Llama layer that reads what the target made of a token, and the embedding of the token after it.

    config : shape and rotary positions of the layer, and the name of its attention: "sdpa" with ``attention_mask``, or
    the slots'. embed : embeddings of token ids, as a rule the target's, which may be replaced by faster ones; no part
    of this module's state. feature_layers, target_hidden_size : which hidden states are fused, and their size.
    draft_vocab_size : None where the head drafts every token of the target; otherwise ``draft_to_target`` is to be
    filled. norm_before_residual : whether the layer adds to its normed features, as some published heads do.
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
        self._embed = (embed,)  # in a tuple, so that a module becomes no part of this one
        size = len(self.feature_layers) * (target_hidden_size or config.hidden_size)
        self.fc = nn.Linear(size, config.hidden_size, bias=False)
        self.midlayer = _MiddleLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size or config.vocab_size, bias=False)
        self.turn_by(config, self.fc.weight.device)
        if draft_vocab_size is not None:
            self.draft_to_target = torch.zeros(draft_vocab_size, dtype=torch.int64)

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


class _MiddleLayer(LlamaDecoderLayer):  # type: ignore[misc]  # transformers is not typed
    """A Llama layer whose attention reads embedding and features side by side."""

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
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        target: TargetParts | None = None,
    ) -> None:
        """``num_layers`` : blocks of each. ``target`` : whose output layer all share; None where each has its own."""
        super().__init__()
        self.feature_layers, self.feature_size, self.num_tokens = (FINAL,), hidden_size, num_heads
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_Block(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        outputs = num_heads if target is None else 0
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(outputs))
        self._target = target

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next of the heads says, [B, T, Vd], and what is left for the others."""
        left = features if features.dim() == 4 else torch.stack([block(features) for block in self.blocks], 2)
        hidden = left[:, :, 0]
        if self._target is not None:
            return self._target.logits(hidden), left[:, :, 1:]
        return self.outputs[-left.shape[2]](hidden), left[:, :, 1:]


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

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
