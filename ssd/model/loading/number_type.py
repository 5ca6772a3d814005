"""Which type of numbers a checkpoint in bfloat16 is computed in on a CPU."""

from __future__ import annotations

import logging
from typing import Final

import torch
from transformers import PreTrainedModel

from ssd.model.layers.fused_linear import is_plain
from ssd.model.layers.packed_linear import PackedLinear, find_rows, has_operators, seconds_of

log = logging.getLogger(__name__)

_WIDTHS = (1, 8)
_MOST_WEIGHTS = 1 << 24
"""Of a layer that are tried: the first rows of a larger one."""
_WORTH = 0.9
"""Of float32's time."""
_TYPES: Final = (torch.float32, torch.bfloat16)


@torch.inference_mode()
def faster_type(model: PreTrainedModel) -> torch.dtype:
    """bfloat16 where ``model``'s linear layers keep the bits of a row in it and take less time so, else float32.

    Tried are products of 1 and 8 rows with the layers' own weights, packed as they will be. A processor that does not
    multiply bfloat16 itself takes longer than with float32. O(weights of one layer of each shape).
    """
    kinds: dict[tuple[int, int], list[torch.nn.Linear]] = {}
    for module in model.modules():
        if is_plain(module, _TYPES):
            kinds.setdefault((module.in_features, module.out_features), []).append(module)
    if not has_operators() or not kinds:
        return torch.float32
    seconds = dict.fromkeys(_TYPES, 0.0)
    for (size, num_outputs), layers in kinds.items():
        tried = min(num_outputs, max(1, _MOST_WEIGHTS // size))
        weight = layers[0].weight[:tried]
        for dtype in _TYPES:
            packed = PackedLinear(weight.to(dtype), None)
            packed.rows = find_rows(packed.product, size, tried, dtype)
            if dtype == torch.bfloat16 and not packed.rows.is_exact:
                log.info("computing in float32: bfloat16 would not be exact to the bit on this machine")
                return torch.float32
            took = sum(seconds_of(packed, torch.zeros(width, size, dtype=dtype)) for width in _WIDTHS)
            seconds[dtype] += took * len(layers) * num_outputs / tried
    share = seconds[torch.bfloat16] / seconds[torch.float32]
    found = torch.bfloat16 if share < _WORTH else torch.float32
    log.info(
        "computing in %s: linear layers take %.2f of float32's time in the checkpoint's bfloat16",
        str(found).removeprefix("torch."), share,
    )  # fmt: skip
    return found
