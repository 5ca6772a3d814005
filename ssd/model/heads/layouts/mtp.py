"""Modules for multi-token prediction, as they lie among the tensors of the target's own checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from transformers import PreTrainedModel

from ssd.model.heads.layouts.layout import Config, Layout, Tensors
from ssd.model.heads.layouts.reading import fill, has, number, read, require, require_same, shapes_of
from ssd.model.heads.mtp import DecoderLayer, MTPHead, decoder_layers

_ALONE = "model.layers.0."
"""Where a module stands that was taken out of its checkpoint, as SGLang publishes DeepSeek's: it counts itself only."""


@dataclass(frozen=True, slots=True)
class _Names:
    """What a layout calls the parts of a module.

    ``layer`` : what stands before the names of the decoder layer's tensors. ``norm`` : None where there is none.
    """

    embedding: str
    hidden: str
    project: str
    layer: str
    norm: str | None
    hidden_first: bool = False

    def parts(self) -> dict[str, str]:
        """Names in a checkpoint by those in `MTPHead`, but for the layer's."""
        named = {"norm_embedding": self.embedding, "norm_hidden": self.hidden, "project": self.project}
        if self.norm is not None:
            named["norm"] = self.norm
        return {f"{ours}.weight": theirs for ours, theirs in named.items()}


def _deepseek(index: int) -> _Names:
    """DeepSeek-V3, GLM-4.5: after the last layer one more (vLLM, deepseek_mtp.py and glm4_moe_mtp.py).

    What is stored of the embeddings and the output layer is a copy of the target's, as the paper says, and not read.
    ``index`` : of that layer.
    """
    at = f"model.layers.{index}."
    return _Names(
        at + "enorm.weight", at + "hnorm.weight", at + "eh_proj.weight", at, at + "shared_head.norm.weight"
    )  # fmt: skip


_QWEN = _Names(
    "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.layers.0.",
    "mtp.norm.weight",
)  # fmt: skip
"""Qwen3-Next, Qwen3.5 (vLLM, qwen3_next_mtp.py)."""


def _layernorms(at: str, *, hidden_first: bool) -> _Names:
    return _Names(
        f"{at}token_layernorm.weight", f"{at}hidden_layernorm.weight", f"{at}input_proj.weight", at,
        f"{at}final_layernorm.weight", hidden_first,
    )  # fmt: skip


_MIMO = _layernorms("model.mtp_layers.0.", hidden_first=True)
"""MiMo (vLLM, mimo_mtp.py)."""
_SPECULATORS = _layernorms("mtp_layers.0.", hidden_first=False)
"""The speculators format (speculators, models/mtp/model_definitions.py)."""
_ERNIE = _Names(
    "model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight", "model.mtp_linear_proj.0.weight",
    "model.mtp_block.0.", None,
)  # fmt: skip
"""ERNIE 4.5 (vLLM, ernie_mtp.py)."""

_DEEPSEEK_PROJECT = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")


def _deepseek_names(config: Config, names: Collection[str]) -> _Names | None:
    """Of the first module; None where there is none."""
    found = sorted(int(match[1]) for name in names if (match := _DEEPSEEK_PROJECT.fullmatch(name)))
    return _deepseek(found[0]) if found else None


def _fixed(parts: _Names) -> Callable[[Config, Collection[str]], _Names | None]:
    return lambda config, names: parts if parts.project in names else None


def _layout(name: str, find: Callable[[Config, Collection[str]], _Names | None]) -> Layout:
    def matches(config: Config, names: Collection[str]) -> bool:
        return find(config, names) is not None

    def build(config: Config, tensors: Tensors, target: PreTrainedModel) -> MTPHead:
        parts = find(config, tensors)
        assert parts is not None
        return _build(config, tensors, target, parts)

    return Layout(name, matches, build)


def _build(config: Config, tensors: Tensors, target: PreTrainedModel, parts: _Names) -> MTPHead:
    layer_config = config.get("transformer_layer_config", config)
    same = (
        ("hidden_size", "vocab_size") if parts.layer == _ALONE else ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    require_same(layer_config if isinstance(layer_config, dict) else {}, target, same)
    number(config, "num_nextn_predict_layers")
    require(tensors, parts.parts().values())
    head = MTPHead(
        target, _fitting(target, tensors, parts.layer), hidden_first=parts.hidden_first, has_norm=parts.norm is not None
    )
    names = {**parts.parts(), **{f"layer.{name}": parts.layer + name for name in shapes_of(head.layer)}}
    shapes = shapes_of(head)
    found = read(tensors, {names[ours]: shape for ours, shape in shapes.items()})
    fill(head, {ours: found[names[ours]] for ours in shapes}, target)
    return head


def _fitting(target: PreTrainedModel, tensors: Tensors, prefix: str) -> DecoderLayer:
    """The last layer of the target that has the module's tensors: a mixture of experts, or a dense one."""
    layers = decoder_layers(target)
    for layer in layers:
        if all(has(tensors, name) for name in shapes_of(layer.layer, prefix)):
            return layer
    return layers[0]  # whose missing tensors are then named


MTP_LAYOUTS = (
    _layout("MTP module of DeepSeek-V3 and GLM-4.5 (model.layers.N.eh_proj)", _deepseek_names),
    _layout("MTP module of Qwen3-Next and Qwen3.5 (mtp.fc)", _fixed(_QWEN)),
    _layout("MTP module of MiMo (model.mtp_layers.0.input_proj)", _fixed(_MIMO)),
    _layout("MTP module of ERNIE 4.5 (model.mtp_linear_proj.0)", _fixed(_ERNIE)),
    _layout("speculators, mtp (mtp_layers.0.input_proj)", _fixed(_SPECULATORS)),
)
