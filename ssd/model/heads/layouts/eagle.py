"""EAGLE's first two versions: their repository's own layout, and the speculators format."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.eagle import EagleHead
from ssd.model.heads.layouts.layout import Config, Layout, Tensors
from ssd.model.heads.layouts.reading import fill, number, read, require, require_same, shapes_of
from ssd.model.kv.attention import ATTENTION_NAME

_PROBE = "self_attn.q_proj.weight"
_MOST_LAYERS = 8
_MOST_HEAD_DIM = 1 << 12
"""Of what a configuration asks for, so that nothing is built that no head has."""
_FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "vocab_size", "attention_bias", "mlp_bias",
)  # fmt: skip
"""What is taken of a configuration: what shapes the layers."""


def _is_own(config: Config, names: Collection[str]) -> bool:
    # EAGLE-3 has a midlayer, or speaks of a reduced vocabulary.
    return "fc.weight" in names and f"layers.0.{_PROBE}" in names and "d2t" not in names and not _has_norm(names)


def _has_norm(names: Collection[str]) -> bool:
    """EAGLE-3's first layer has norms before its attention."""
    return any(f"layers.0.{name}.weight" in names for name in ("input_layernorm", "hidden_norm"))


def _build_own(config: Config, tensors: Tensors, target: PreTrainedModel) -> EagleHead:
    return _build(config, tensors, target, {"fc.": "fc.", "layers.": "layers."})


def _is_speculators(config: Config, names: Collection[str]) -> bool:
    return "fusion_fc.weight" in names


def _build_speculators(config: Config, tensors: Tensors, target: PreTrainedModel) -> EagleHead:
    if config.get("layernorms") or "embedding_layernorm.weight" in tensors:
        raise ModelError(
            "it has layer norms around EAGLE's layer (layernorms: true in its config.json), which is not "
            "read: take one without them, or an EAGLE-3 head"
        )
    kind = config.get("transformer_layer_architecture", "LlamaDecoderLayer")
    if kind != "LlamaDecoderLayer":
        raise ModelError(f"its layer is a {str(kind)[:60]}: only LlamaDecoderLayer is read")
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ModelError("its config.json lacks transformer_layer_config: download the head again")
    inner = {**inner, "num_hidden_layers": 1}
    return _build(inner, tensors, target, {"fc.": "fusion_fc.", "layers.0.": "transformer."})


def _build(config: Config, tensors: Tensors, target: PreTrainedModel, prefixes: Mapping[str, str]) -> EagleHead:
    """``prefixes`` : what stands in the checkpoint before a name, by what stands before ours."""
    require_same(config, target, ("hidden_size", "vocab_size"))

    def theirs(ours: str) -> str:
        prefix = max((prefix for prefix in prefixes if ours.startswith(prefix)), key=len)
        return prefixes[prefix] + ours.removeprefix(prefix)

    layers = llama_config(config, target)
    require(tensors, [theirs(f"layers.{index}.{_PROBE}") for index in range(layers.num_hidden_layers)])
    try:
        with torch.device("meta"):
            head = EagleHead(
                layers,
                target,
                bias=theirs("fc.bias") in tensors,
                qkv_bias=not layers.attention_bias and theirs("layers.0.self_attn.q_proj.bias") in tensors,
            )
    except Exception as failure:  # whatever the numbers of a configuration lead to
        raise ModelError(f"its config.json describes no layer: {first_line(failure)}") from failure
    shapes = shapes_of(head)
    found = read(tensors, {theirs(ours): shape for ours, shape in shapes.items()})
    fill(head, {ours: found[theirs(ours)] for ours in shapes}, target)
    head.to(target.device)
    return head


def llama_config(config: Config, target: PreTrainedModel) -> LlamaConfig:
    """What a configuration says of a head's layers, which attend by the slots; raises ModelError."""
    if (number(config, "head_dim") or 1) > _MOST_HEAD_DIM:
        raise ModelError(f"its config.json says head_dim {config['head_dim']}: {_MOST_HEAD_DIM} is the most")
    fields: dict[str, Any] = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    fields.setdefault("hidden_size", target.config.get_text_config().hidden_size)
    fields.setdefault("num_hidden_layers", 1)
    try:
        found = LlamaConfig(**json.loads(json.dumps(fields)))
    except Exception as failure:
        raise ModelError(f"its config.json cannot be read: {first_line(failure)}") from failure
    if not 1 <= found.num_hidden_layers <= _MOST_LAYERS:
        raise ModelError(f"it says num_hidden_layers {found.num_hidden_layers}: 1 to {_MOST_LAYERS} are read")
    found._attn_implementation = ATTENTION_NAME
    return found


EAGLE_LAYOUTS = (
    Layout("EAGLE and EAGLE-2 (fc, layers.0 without a norm before its attention)", _is_own, _build_own),
    Layout("speculators, eagle (fusion_fc, transformer)", _is_speculators, _build_speculators),
)
