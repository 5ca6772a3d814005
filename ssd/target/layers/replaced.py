"""What is kept of a layer that another took the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn


class Replaced(NamedTuple):
    """Where in a model a layer, or what it computes, was replaced. ``again`` makes the one that was there."""

    parent: nn.Module
    name: str
    again: Callable[[], Any]


Replace = Callable[[nn.Module], Iterator[Replaced]]
"""Replaces the layers of one kind in place, and says of each where it was."""


def has_hooks(module: nn.Module) -> bool:
    """Whether something wants to know of its passes."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
