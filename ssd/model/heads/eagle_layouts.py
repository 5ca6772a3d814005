"""EAGLE's layouts: its repository's own, which SGLang and SpecForge write too, and the speculators format.

Which hidden states EAGLE-3 reads is counted in two ways. A speculators configuration counts as vLLM does: layer k is
what comes out of the first k layers. ``eagle_config`` counts as SGLang does (set_eagle3_layers_to_capture): layer k is
what the layer of index k puts out. Both have the same default (EAGLE's modeling_llama_kv.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ssd.errors import ModelError, first_line
from ssd.model.heads.networks import Eagle3Head, EagleHead
from ssd.model.heads.tensors import (
    Config,
    Layout,
    Tensors,
    fill,
    fill_by_name,
    number,
    read,
    require,
    require_same,
    shapes_of,
)
from ssd.model.kv.attention import ATTENTION_NAME

_Head = TypeVar("_Head", EagleHead, Eagle3Head)

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


def _is_eagle(names: Collection[str]) -> bool:
    # EAGLE-3 has a midlayer, or speaks of a reduced vocabulary, or has norms before the attention of its first layer.
    has_norm = any(f"layers.0.{name}.weight" in names for name in ("input_layernorm", "hidden_norm"))
    return "fc.weight" in names and f"layers.0.{_PROBE}" in names and "d2t" not in names and not has_norm


def _eagle(config: Config, tensors: Tensors, target: PreTrainedModel) -> EagleHead:
    return _build_eagle(config, tensors, target, {"fc.": "fc.", "layers.": "layers."})


def _eagle_of_speculators(config: Config, tensors: Tensors, target: PreTrainedModel) -> EagleHead:
    if config.get("layernorms") or "embedding_layernorm.weight" in tensors:
        raise ModelError(
            "it has layer norms around EAGLE's layer (layernorms: true in its config.json), which is not "
            "read: take one without them, or an EAGLE-3 head"
        )
    kind = config.get("transformer_layer_architecture", "LlamaDecoderLayer")
    if kind != "LlamaDecoderLayer":
        raise ModelError(f"its layer is a {str(kind)[:60]}: only LlamaDecoderLayer is read")
    inner = {**_inner_config(config), "num_hidden_layers": 1}
    return _build_eagle(inner, tensors, target, {"fc.": "fusion_fc.", "layers.0.": "transformer."})


def _build_eagle(config: Config, tensors: Tensors, target: PreTrainedModel, prefixes: Mapping[str, str]) -> EagleHead:
    """``prefixes`` : what stands in the checkpoint before a name, by what stands before ours."""
    require_same(config, target, ("hidden_size", "vocab_size"))

    def theirs(ours: str) -> str:
        prefix = max((prefix for prefix in prefixes if ours.startswith(prefix)), key=len)
        return prefixes[prefix] + ours.removeprefix(prefix)

    layers = _llama_config(config, target)
    require(tensors, [theirs(f"layers.{index}.{_PROBE}") for index in range(layers.num_hidden_layers)])
    head = _without_memory(
        lambda: EagleHead(
            layers,
            target,
            bias=theirs("fc.bias") in tensors,
            qkv_bias=not layers.attention_bias and theirs("layers.0.self_attn.q_proj.bias") in tensors,
        )
    )
    fill_by_name(head, tensors, {ours: theirs(ours) for ours in shapes_of(head)}, target)
    head.to(target.device)
    return head


def _without_memory(make: Callable[[], _Head]) -> _Head:
    """A head made on the meta device. Raises ModelError, whatever the numbers of a configuration lead to."""
    try:
        with torch.device("meta"):
            return make()
    except Exception as failure:
        raise ModelError(f"its config.json describes no layer: {first_line(failure)}") from failure


def _inner_config(config: Config) -> dict[str, Any]:
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ModelError("its config.json lacks transformer_layer_config: download the head again")
    return inner


def _llama_config(config: Config, target: PreTrainedModel) -> LlamaConfig:
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


_EMBED = "embed_tokens.weight"
_UNREAD = ("t2d", "d2t", _EMBED, "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that need not become part of the head, beside buffers of positions."""
_MOST_LAYERS_READ = 16


def _is_eagle3(names: Collection[str]) -> bool:
    return "fc.weight" in names and any(name.startswith("midlayer.") for name in names)


def _eagle3(config: Config, tensors: Tensors, target: PreTrainedModel) -> Eagle3Head:
    eagle = config.get("eagle_config")
    listed = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    layers = _default_layers(target) if listed is None else tuple(1 + index for index in _indices(listed))
    return _build_eagle3(config, tensors, target, config, layers, "midlayer.")


def _eagle3_of_speculators(config: Config, tensors: Tensors, target: PreTrainedModel) -> Eagle3Head:
    inner = _inner_config(config)
    if config.get("norm_before_fc"):
        raise ModelError("norm_before_fc, a norm of the hidden states before they are fused, is not read: take another")
    listed = config.get("eagle_aux_hidden_state_layer_ids")
    layers = _indices(listed) if listed else _default_layers(target)
    outer = {**config, "vocab_size": inner.get("vocab_size"), "norm_before_residual": True, **config}
    return _build_eagle3(outer, tensors, target, inner, layers, "layers.0.")


def _build_eagle3(
    config: Config,
    tensors: Tensors,
    target: PreTrainedModel,
    layer: Config,
    feature_layers: tuple[int, ...],
    prefix: str,
) -> Eagle3Head:
    """``layer`` : the configuration of the head's own layer. ``prefix`` : of that layer's tensors."""
    own = target.config.get_text_config()
    require_same(config, target, ("vocab_size",))
    if (wide := number(config, "target_hidden_size")) not in (None, own.hidden_size):
        raise ModelError(
            f"it was made for another model: its config.json says target_hidden_size {wide}, the model has "
            f"{own.hidden_size}. Take the head that was trained for this model"
        )
    if number(layer, "num_hidden_layers") not in (None, 1):
        raise ModelError("it has several layers (num_hidden_layers), and one is read: take a head with one")
    shape = _llama_config({**layer, "vocab_size": own.vocab_size, "num_hidden_layers": 1}, target)
    mapping = _mapping(tensors["d2t"], own.vocab_size) if "d2t" in tensors else None
    draft_vocab_size, wanted = None if mapping is None else len(mapping), number(config, "draft_vocab_size")
    if draft_vocab_size is not None and wanted not in (None, draft_vocab_size):
        raise ModelError(f"draft_vocab_size is {wanted}, but d2t has {draft_vocab_size} entries: download it again")
    embed = _embeddings(tensors, target, shape)
    head = _without_memory(
        lambda: Eagle3Head(
            shape,
            embed,
            feature_layers,
            target_hidden_size=own.hidden_size,
            draft_vocab_size=draft_vocab_size,
            norm_before_residual=bool(config.get("norm_before_residual")),
        )
    )
    shapes = {name: size for name, size in shapes_of(head).items() if name not in ("d2t", "t2d")}
    theirs = {name: name.replace("midlayer.", prefix) for name in shapes}
    require(tensors, theirs.values())
    unknown = {name for name in set(tensors) - set(theirs.values()) - set(_UNREAD) if "rotary" not in name}
    if unknown:
        raise ModelError(f"it has tensors that are not read, {', '.join(sorted(unknown)[:4])}: take another head")
    found = read(tensors, {theirs[name]: size for name, size in shapes.items()})
    state = {name: found[theirs[name]] for name in shapes}
    if mapping is not None:
        state["d2t"] = mapping - torch.arange(len(mapping))
        state["t2d"] = torch.zeros(own.vocab_size, dtype=torch.bool).index_fill_(0, mapping, True)
    fill(head, state, target)
    head.rotary = LlamaRotaryEmbedding(shape).to(target.device)  # it was made without data
    return head


def _mapping(offsets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The target's id of each drafted one, int64[Vd]; the checkpoint has what to add to the drafted one."""
    if offsets.ndim != 1 or offsets.dtype.is_floating_point or not len(offsets):
        raise ModelError("d2t is no list of numbers: download it again")
    mapping = offsets.to(torch.int64) + torch.arange(len(offsets))
    if int(mapping.min()) < 0 or int(mapping.max()) >= vocab_size:
        raise ModelError(
            f"d2t names tokens outside 0..{vocab_size - 1}: it was made for a model with another vocabulary. Take the "
            "head that was trained for this model"
        )
    return mapping


def _embeddings(
    tensors: Tensors, target: PreTrainedModel, shape: LlamaConfig
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The head's own embeddings of token ids where it brings others than the target's, which are used elsewhere."""
    own: Any = target.get_input_embeddings()
    hidden_size = target.config.get_text_config().hidden_size
    if _EMBED in tensors:
        weight = read(tensors, {_EMBED: (shape.vocab_size, shape.hidden_size)})[_EMBED]
        weight = weight.to(target.device, target.dtype)
        ids = torch.arange(shape.vocab_size, device=target.device)
        if shape.hidden_size != hidden_size or not torch.equal(own(ids), weight):
            return lambda token_ids: torch.nn.functional.embedding(token_ids, weight)
    elif shape.hidden_size != hidden_size:
        raise ModelError(
            f"its layer has hidden_size {shape.hidden_size}, the model {hidden_size}, "
            f"and it brings no {_EMBED} of its own: it was made for another model, or its files are not all there"
        )
    return lambda token_ids: target.get_input_embeddings()(token_ids)


def _default_layers(target: PreTrainedModel) -> tuple[int, ...]:
    count = target.config.get_text_config().num_hidden_layers
    if count < 6:
        raise ModelError(
            f"config.json does not say which layers it reads, and the model has {count}: too few for the usual choice. "
            "Take the head that was trained for this model"
        )
    return 2, count // 2, count - 3


def _indices(listed: Any) -> tuple[int, ...]:
    if (
        not isinstance(listed, list)
        or not 1 <= len(listed) <= _MOST_LAYERS_READ
        or not all(isinstance(index, int) and not isinstance(index, bool) and 0 <= index < 1 << 15 for index in listed)
    ):
        raise ModelError("eagle_aux_hidden_state_layer_ids in config.json is no list of layers: download it again")
    return tuple(listed)


EAGLE_LAYOUTS = (
    Layout("EAGLE-3 (fc, midlayer)", _is_eagle3, _eagle3),
    Layout(
        "speculators, eagle3 (fc, layers.0 with hidden_norm)",
        lambda names: "fc.weight" in names and "layers.0.hidden_norm.weight" in names,
        _eagle3_of_speculators,
    ),
    Layout("EAGLE and EAGLE-2 (fc, layers.0 without a norm before its attention)", _is_eagle, _eagle),
    Layout(
        "speculators, eagle (fusion_fc, transformer)",
        lambda names: "fusion_fc.weight" in names,
        _eagle_of_speculators,
    ),
)
