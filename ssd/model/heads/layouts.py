"""The layouts in which draft heads are published: EAGLE's, Medusa's, and modules for multi-token prediction.

The latter lie among the tensors of the target's own checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.heads.eagle_layouts import EAGLE_LAYOUTS
from ssd.model.heads.head import Head, ParallelHead, RecurrentHead, TargetParts
from ssd.model.heads.networks import DecoderLayer, MedusaHead, MTPHead, decoder_layers
from ssd.model.heads.tensors import (
    Config,
    Layout,
    TensorFiles,
    Tensors,
    fill_by_name,
    find_directory,
    has,
    number,
    read_config,
    require,
    require_same,
    shapes_of,
)
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.layers.replace import MOST_CHANGE, MOST_CHANGE_LOW_PRECISION, replace_layers
from ssd.model.ways.find_way import CPU_LAYERS
from ssd.text.load_tokenizer import HubOptions

_Parts = TypeVar("_Parts")


def _by_names(
    name: str,
    find: Callable[[Collection[str]], _Parts | None],
    build: Callable[[Config, Tensors, PreTrainedModel, _Parts], Head],
) -> Layout:
    """A layout that is known by what ``find`` makes of the tensors' names, which is also what its head is built by."""

    def built(config: Config, tensors: Tensors, target: PreTrainedModel) -> Head:
        parts = find(tensors)
        assert parts is not None
        return build(config, tensors, target, parts)

    return Layout(name, lambda names: find(names) is not None, built)


_MAP = "token_map"
_DIGITS = 2
"""Of an index at most: nobody trains a hundred heads."""


@dataclass(frozen=True, slots=True)
class _Naming:
    """``block`` : the names of a block's tensors but for "weight" and "bias", with head and block as groups.

    ``prefixes`` : what may stand before all names. ``blocks``, ``output`` : as format strings.
    """

    block: re.Pattern[str]
    prefixes: tuple[str, ...]
    blocks: str
    output: str

    def find(self, names: Collection[str]) -> _Found | None:
        """What there is of heads; None where there are none."""
        for prefix in self.prefixes:
            pairs = set()
            for name in names:
                match = self.block.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
                if match is not None and max(len(match[1]), len(match[2])) <= _DIGITS:
                    pairs.add((int(match[1]), int(match[2])))
            if pairs:
                return _Found(self, prefix, 1 + max(head for head, _ in pairs), 1 + max(block for _, block in pairs))
        return None


@dataclass(frozen=True, slots=True)
class _Found:
    naming: _Naming
    prefix: str
    num_heads: int
    num_layers: int


_OWN = _Naming(
    re.compile(r"(\d+)\.(\d+)\.linear\.weight"), ("", "medusa_head.", "medusa_heads.", "medusa."),
    "{head}.{block}.linear", "{head}.{num_layers}.weight",
)  # fmt: skip
"""FasterDecoding's own (medusa_model_legacy.py); text-generation-inference reads the same names (layers/medusa.py).

The last of each is its output layer; later versions train none and read with the target's.
"""
_VLLM = _Naming(
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight"), ("", "medusa_heads."),
    "blocks.{head}.layers.{block}", "lm_heads.{head}.weight",
)  # fmt: skip
"""vLLM's (models/medusa.py): blocks may have no bias, the output layers may be one, and of frequent tokens only."""


def _build_medusa(config: Config, tensors: Tensors, target: PreTrainedModel, found: _Found) -> MedusaHead:
    require_same(config, target, ("hidden_size", "vocab_size"))
    naming = found.naming
    own = target.config.get_text_config()

    def name(pattern: str, head: int, block: int = 0) -> str:
        return found.prefix + pattern.format(head=head, block=block, num_layers=found.num_layers)

    outputs = [head for head in range(found.num_heads) if name(naming.output, head) in tensors]
    token_map = _token_map(tensors, found.prefix + _MAP, own.vocab_size)
    with torch.device("meta"):
        head = MedusaHead(
            own.hidden_size,
            own.vocab_size,
            found.num_heads,
            found.num_layers,
            bias=name(naming.blocks, 0) + ".bias" in tensors,
            target=None if outputs else TargetParts(target),
            shares_output=outputs == [0] and bool(config.get("original_lm_head")),
            token_map=None if token_map is None or not outputs else token_map.to(target.device),
        )
    names = {}
    for ours in shapes_of(head):
        kind, *rest = ours.split(".")
        if kind == "blocks":
            names[ours] = name(naming.blocks, int(rest[0]), int(rest[1])) + "." + rest[-1]
        else:
            names[ours] = name(naming.output, int(rest[0]))
    chosen = _Chosen(tensors, {name(naming.output, i) for i in outputs}, token_map, own.vocab_size)
    fill_by_name(head, chosen, names, target)
    return head


def _token_map(tensors: Tensors, name: str, vocab_size: int) -> torch.Tensor | None:
    if name not in tensors:
        return None
    found = tensors[name]
    if found.dim() != 1 or found.dtype.is_floating_point or not 1 <= len(found) <= vocab_size:
        raise ModelError(f"its {name} is no list of token ids: download it again")
    if not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
        raise ModelError(
            f"its {name} has token {int(found.max())}, the model has {vocab_size}: it was made for another"
        )
    return found.long()


class _Chosen(Mapping[str, torch.Tensor]):
    """Tensors, of those in ``outputs`` only the rows of tokens that can be drafted."""

    def __init__(self, tensors: Tensors, outputs: set[str], token_map: torch.Tensor | None, vocab_size: int) -> None:
        self._tensors, self._outputs, self._token_map, self._vocab_size = tensors, outputs, token_map, vocab_size

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if self._token_map is not None and name in self._outputs and len(tensor) == self._vocab_size:
            tensor = tensor[self._token_map]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:  # without reading the tensor
        return name in self._tensors


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


def _deepseek_names(names: Collection[str]) -> _Names | None:
    """Of the first module; None where there is none."""
    found = sorted(int(match[1]) for name in names if (match := _DEEPSEEK_PROJECT.fullmatch(name)))
    return _deepseek(found[0]) if found else None


def _mtp(name: str, parts: _Names) -> Layout:
    return _by_names(name, lambda names: parts if parts.project in names else None, _build_mtp)


def _build_mtp(config: Config, tensors: Tensors, target: PreTrainedModel, parts: _Names) -> MTPHead:
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
    fill_by_name(head, tensors, names, target)
    return head


def _fitting(target: PreTrainedModel, tensors: Tensors, prefix: str) -> DecoderLayer:
    """The last layer of the target that has the module's tensors: a mixture of experts, or a dense one."""
    layers = decoder_layers(target)
    for layer in layers:
        if all(has(tensors, name) for name in shapes_of(layer.layer, prefix)):
            return layer
    return layers[0]  # whose missing tensors are then named


LAYOUTS: tuple[Layout, ...] = (
    *EAGLE_LAYOUTS,
    _by_names("Medusa, FasterDecoding's (0.0.linear.weight)", _OWN.find, _build_medusa),
    _by_names("Medusa, vLLM's (blocks.0.layers.0.weight)", _VLLM.find, _build_medusa),
    _by_names("MTP module of DeepSeek-V3 and GLM-4.5 (model.layers.N.eh_proj)", _deepseek_names, _build_mtp),
    _mtp("MTP module of Qwen3-Next and Qwen3.5 (mtp.fc)", _QWEN),
    _mtp("MTP module of MiMo (model.mtp_layers.0.input_proj)", _MIMO),
    _mtp("MTP module of ERNIE 4.5 (model.mtp_linear_proj.0)", _ERNIE),
    _mtp("speculators, mtp (mtp_layers.0.input_proj)", _SPECULATORS),
)
"""Tried in order; the first that matches is taken."""


_LENGTH = 2


@torch.inference_mode()
def say(head: Head, target: PreTrainedModel) -> list[torch.Tensor]:
    """All that a head computes of hidden states that are always the same, as the engine would have it computed.

    Raises whatever its layers raise; TypeError where they attend to something else than the slots.
    """
    device, dtype = target.device, target.dtype
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _LENGTH, target.config.get_text_config().hidden_size, generator=generator)
    features = head.combine([hidden.to(device, dtype)] * len(head.feature_layers))
    if isinstance(head, ParallelHead):
        return [features, head(features[:, -1])]
    assert isinstance(head, RecurrentHead)
    cache = SlotKVCache(1, _LENGTH, device)
    rows = SlotRows.build(cache, [0], _LENGTH, device)
    logits, following = head(torch.zeros_like(rows.positions), features, rows.positions, slot_rows=rows)
    if not cache.bytes_per_token:
        raise TypeError("its layers attend in another way")
    return [features, logits, following]


def require_drivable(head: Head, target: PreTrainedModel) -> None:
    """Raise ModelError where the head cannot be driven beside its target."""
    try:
        say(head, target)
    except Exception as failure:  # whatever an architecture, or an odd configuration, makes of it
        raise ModelError(
            f"a {type(head).__name__} cannot be driven beside {type(target).__name__}: {first_line(failure)}"
        ) from failure


def make_faster(head: Head, target: PreTrainedModel) -> None:
    """On a CPU, replace the head's layers by those that compute the same faster, and check that it says the same.

    A pass over several rows or positions takes two thirds of the time. O(weights).
    """
    if target.device.type != "cpu":
        return
    can_be = [each.isfinite() for each in say(head, target)]  # tokens that cannot be drafted have minus infinity

    def said(head: Head) -> list[torch.Tensor]:
        found = say(head, target)
        if not all(torch.equal(each.isfinite(), finite) for each, finite in zip(found, can_be, strict=True)):
            raise ValueError("other tokens can be drafted")
        return [each.float()[finite] for each, finite in zip(found, can_be, strict=True)]

    tolerance = MOST_CHANGE if target.dtype == torch.float32 else MOST_CHANGE_LOW_PRECISION
    replace_layers(head, CPU_LAYERS, expected=said(head), tolerance=tolerance, say=said)


_SHOWN = 6


@torch.inference_mode()
def load_head(name_or_path: str | Path, model: PreTrainedModel, hub: HubOptions | None = None) -> Head:
    """The draft head of a directory or hub id, in the dtype and on the device of ``model``, ready to draft for it.

    hub : where an id is fetched from. Raises ModelError with what to do: files that are not there or torn, a layout
    that is not known, a head of another model.
    """
    directory = find_directory(name_or_path, hub)
    config, tensors = read_config(directory), TensorFiles(directory)
    names = set(tensors)
    layout = next((each for each in LAYOUTS if each.matches(names)), None)
    if layout is None:
        some = ", ".join(sorted(names)[:_SHOWN])
        known = "; ".join(each.name for each in LAYOUTS)
        raise ModelError(
            f"draft head {str(name_or_path)!r} has none of the layouts known here, which are: {known}. It has "
            f"{len(names)} tensors: {some}{' ...' if len(names) > _SHOWN else ''}. Convert it, or leave it out"
        )
    try:
        head = layout.build(config, tensors, model).eval().requires_grad_(False)
        require_drivable(head, model)
    except ModelError as error:
        raise ModelError(f"draft head {str(name_or_path)!r}, {layout.name}: {error}") from error
    # A size of 0, numbers that contradict each other: whatever torch says to what a configuration describes.
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"draft head {str(name_or_path)!r}, {layout.name}: its config.json and its tensors do not make a head: "
            f"{first_line(error)[:200]}. Download it again"
        ) from error
    make_faster(head, model)
    return head
