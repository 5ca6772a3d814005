"""Replacing layers of a model by faster ones that compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ssd.errors import first_line
from ssd.model.layers.probe_logits import plain_logits

log = logging.getLogger(__name__)

MOST_NUMBERS = 1 << 16
"""In an input of a compiled loop, which one core runs; several cores share torch's own operations on a larger one."""


MOST_ERROR = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""Of a layer's output, as a share of its norm: what rounding once or twice makes of it. By the type of the numbers."""


class Replaced(NamedTuple):
    """Where in a model a layer, or what it computes, was replaced. ``again`` makes the one that was there."""

    parent: Any
    name: str
    again: Callable[[], Any]


Replace = Callable[[nn.Module], Iterator[Replaced]]
"""Replaces the layers of one kind in place, and says of each where it was."""


def replace_layers(
    model: PreTrainedModel, kinds: Iterable[Replace], *, expected: Sequence[torch.Tensor], tolerance: float
) -> bool:
    """Replace layers of a model, and check that it still says what it said; else leave it as it was.

    ``expected`` : its `plain_logits`. ``tolerance`` : greatest relative error of them that is put down to rounding.
    True when layers were replaced. Changes ``model`` in place, and again does nothing. O(weights).
    """
    replaced: list[Replaced] = []
    try:
        for replace in kinds:
            for each in replace(model):
                replaced.append(each)  # one by one: what fails leaves those before it to be taken back
        if not replaced:
            return False
        error = max(
            float((found - want).norm() / want.norm())
            for found, want in zip(plain_logits(model), expected, strict=True)
        )
        if error < tolerance:
            return True
        reason = f"logits differ by {error:.2g}"
    except Exception as failure:  # a compiler, or a model that reaches into its layers
        reason = first_line(failure)
    log.warning("the layers of %s stay as they are, which is slower: %s", type(model).__name__, reason)
    for parent, name, again in replaced:
        setattr(parent, name, again())
    return False


def parents(model: nn.Module) -> list[nn.Module]:
    """Modules that hold others. What they hold is not listed by itself, and so goes when it is replaced."""
    return [module for module in model.modules() if next(module.children(), None) is not None]


def agrees(found: torch.Tensor, wanted: torch.Tensor, most_error: float) -> bool:
    """Whether two tensors have one shape and differ by at most ``most_error``, as a share of the second's norm."""
    if found.shape != wanted.shape:
        return False
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm()) <= most_error * float(wanted.norm())


def has_hooks(module: nn.Module) -> bool:
    """Whether something wants to know of its passes."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
