"""What is kept of a layer that another took the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class Replaced(NamedTuple):
    """Where in a model a layer, or what it computes, was replaced. ``again`` makes the one that was there."""

    parent: nn.Module
    name: str
    again: Callable[[], Any]


Replace = Callable[[nn.Module], Iterator[Replaced]]
"""Replaces the layers of one kind in place, and says of each where it was."""


MOST_NUMBERS = 1 << 16
"""In an input of a compiled loop, which one core runs; several cores share torch's own operations on a larger one."""


def parents(model: nn.Module) -> list[nn.Module]:
    """Modules that hold others. What they hold is not listed by itself, and so goes when it is replaced."""
    return [module for module in model.modules() if next(module.children(), None) is not None]


def agrees(found: torch.Tensor, wanted: torch.Tensor, most_error: float) -> bool:
    """Whether two tensors have one shape and differ by at most ``most_error``, as a share of the second's norm."""
    return found.shape == wanted.shape and float((found - wanted).norm()) <= most_error * float(wanted.norm())


def has_hooks(module: nn.Module) -> bool:
    """Whether something wants to know of its passes."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
