"""EAGLE-3: its repository's own layout, which SGLang and SpecForge write too, and the speculators format.

Which hidden states are read is counted in two ways. A speculators configuration counts as vLLM does: layer k is what
comes out of the first k layers. ``eagle_config`` counts as SGLang does (set_eagle3_layers_to_capture): layer k is what
the layer of index k puts out. Both have the same default (EAGLE's modeling_llama_kv.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ssd.errors import ModelError, first_line
from ssd.model.heads.eagle3 import Eagle3Head
from ssd.model.heads.layouts.eagle import llama_config
from ssd.model.heads.layouts.layout import Config, Layout, Tensors
from ssd.model.heads.layouts.reading import fill, number, read, require, require_same, shapes_of

_EMBED = "embed_tokens.weight"
_UNREAD = ("t2d", "d2t", _EMBED, "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that need not become part of the head, beside buffers of positions."""
_MOST_LAYERS_READ = 16


def _is_own(config: Config, names: Collection[str]) -> bool:
    return "fc.weight" in names and any(name.startswith("midlayer.") for name in names)


def _is_speculators(config: Config, names: Collection[str]) -> bool:
    return "fc.weight" in names and "layers.0.hidden_norm.weight" in names


def _build_own(config: Config, tensors: Tensors, target: PreTrainedModel) -> Eagle3Head:
    eagle = config.get("eagle_config")
    listed = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    layers = _default_layers(target) if listed is None else tuple(1 + index for index in _indices(listed))
    return _build(config, tensors, target, config, layers, "midlayer.")


def _build_speculators(config: Config, tensors: Tensors, target: PreTrainedModel) -> Eagle3Head:
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ModelError("config.json lacks transformer_layer_config: download the head again")
    if config.get("norm_before_fc"):
        raise ModelError("norm_before_fc, a norm of the hidden states before they are fused, is not read: take another")
    listed = config.get("eagle_aux_hidden_state_layer_ids")
    layers = _indices(listed) if listed else _default_layers(target)
    outer = {**config, "vocab_size": inner.get("vocab_size"), "norm_before_residual": True, **config}
    return _build(outer, tensors, target, inner, layers, "layers.0.")


def _build(
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
    shape = llama_config({**layer, "vocab_size": own.vocab_size, "num_hidden_layers": 1}, target)
    draft_vocab_size = None
    if "d2t" in tensors:
        draft_vocab_size = len(_mapping(tensors["d2t"], own.vocab_size))
        wanted = number(config, "draft_vocab_size")
        if wanted not in (None, draft_vocab_size):
            raise ModelError(f"draft_vocab_size is {wanted}, but d2t has {draft_vocab_size} entries: download it again")
    embed = _embeddings(tensors, target, shape)
    try:
        with torch.device("meta"):
            head = Eagle3Head(
                shape,
                embed,
                feature_layers,
                target_hidden_size=own.hidden_size,
                draft_vocab_size=draft_vocab_size,
                norm_before_residual=bool(config.get("norm_before_residual")),
            )
    except Exception as failure:  # whatever the numbers of a configuration lead to
        raise ModelError(f"config.json describes no layer: {first_line(failure)}") from failure
    shapes = {name: size for name, size in shapes_of(head).items() if name not in ("d2t", "t2d")}
    theirs = {name: name.replace("midlayer.", prefix) for name in shapes}
    require(tensors, theirs.values())
    _require_known(tensors, theirs.values())
    found = read(tensors, {theirs[name]: size for name, size in shapes.items()})
    state = {name: found[theirs[name]] for name in shapes}
    if draft_vocab_size is not None:
        mapping = _mapping(tensors["d2t"], own.vocab_size)
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
    if _EMBED in tensors:
        weight = read(tensors, {_EMBED: (shape.vocab_size, shape.hidden_size)})[_EMBED]
        weight = weight.to(target.device, target.dtype)
        ids = torch.arange(shape.vocab_size, device=target.device)
        if shape.hidden_size != target.config.get_text_config().hidden_size or not torch.equal(own(ids), weight):
            return lambda token_ids: torch.nn.functional.embedding(token_ids, weight)
    elif shape.hidden_size != target.config.get_text_config().hidden_size:
        raise ModelError(
            f"its layer has hidden_size {shape.hidden_size}, the model {target.config.get_text_config().hidden_size}, "
            f"and it brings no {_EMBED} of its own: it was made for another model, or its files are not all there"
        )
    return lambda token_ids: target.get_input_embeddings()(token_ids)


def _require_known(names: Collection[str], read_names: Collection[str]) -> None:
    unknown = set(names) - set(read_names) - set(_UNREAD)
    unknown = {name for name in unknown if "rotary" not in name}
    if unknown:
        raise ModelError(f"it has tensors that are not read, {', '.join(sorted(unknown)[:4])}: take another head")


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


EAGLE3_LAYOUTS = (
    Layout("EAGLE-3 (fc, midlayer)", _is_own, _build_own),
    Layout("speculators, eagle3 (fc, layers.0 with hidden_norm)", _is_speculators, _build_speculators),
)
