"""Faster layers for draft heads, as their targets have them."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from ssd.errors import first_line
from ssd.model.heads.head import Head
from ssd.model.heads.probe import say
from ssd.model.layers.replace import agrees
from ssd.model.ways.find_way import CPU_LAYERS

log = logging.getLogger(__name__)

_MOST_ERROR = 1e-3
_MOST_ERROR_LOW_PRECISION = 0.2
"""Relative, as of a target whose layers are replaced."""


def make_faster(head: Head, target: PreTrainedModel) -> None:
    """On a CPU, replace the head's layers by those that compute the same faster, and check that it says the same.

    Else it is left as it was. A pass over several rows or positions takes two thirds of the time. O(weights).
    """
    if target.device.type != "cpu":
        return
    wanted = say(head, target)
    replaced = [each for replace in CPU_LAYERS for each in replace(head)]
    tolerance = _MOST_ERROR if target.dtype == torch.float32 else _MOST_ERROR_LOW_PRECISION
    try:
        if all(_same(*pair, tolerance) for pair in zip(say(head, target), wanted, strict=True)):
            return
        reason = "what it says differs"
    except Exception as failure:  # a head that reaches into its layers, for one
        reason = first_line(failure)
    log.warning("the layers of the draft head stay as they are, which is slower: %s", reason)
    for parent, name, again in replaced:
        setattr(parent, name, again())


def _same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    can_be = wanted.isfinite()  # tokens that cannot be drafted have minus infinity
    return torch.equal(found.isfinite(), can_be) and agrees(found[can_be], wanted[can_be], tolerance)
