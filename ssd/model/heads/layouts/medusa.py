"""Medusa's heads, as FasterDecoding's repository writes them, and as vLLM reads them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ssd.errors import ModelError
from ssd.model.heads.layouts.layout import Config, Layout, Tensors
from ssd.model.heads.layouts.reading import fill, read, require_same, shapes_of
from ssd.model.heads.medusa import MedusaHead
from ssd.model.heads.target_parts import TargetParts

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
                return _Found(prefix, 1 + max(head for head, _ in pairs), 1 + max(block for _, block in pairs))
        return None


@dataclass(frozen=True, slots=True)
class _Found:
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


def _layout(name: str, naming: _Naming) -> Layout:
    def matches(config: Config, names: Collection[str]) -> bool:
        return naming.find(names) is not None

    def build(config: Config, tensors: Tensors, target: PreTrainedModel) -> MedusaHead:
        return _build(config, tensors, target, naming)

    return Layout(name, matches, build)


def _build(config: Config, tensors: Tensors, target: PreTrainedModel, naming: _Naming) -> MedusaHead:
    require_same(config, target, ("hidden_size", "vocab_size"))
    found = naming.find(tensors)
    assert found is not None
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
    filled = read(chosen, {names[ours]: shape for ours, shape in shapes_of(head).items()})
    fill(head, {ours: filled[theirs] for ours, theirs in names.items()}, target)
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


MEDUSA_LAYOUTS = (
    _layout("Medusa, FasterDecoding's (0.0.linear.weight)", _OWN),
    _layout("Medusa, vLLM's (blocks.0.layers.0.weight)", _VLLM),
)
