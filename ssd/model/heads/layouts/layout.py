"""What is known of one layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ssd.model.heads.head import Head

Config = Mapping[str, Any]
"""A directory's config.json, as it was read: nothing in it is checked."""
Tensors = Mapping[str, torch.Tensor]
"""All tensors of a directory by name; one is read when it is asked for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to publish draft heads.

    ``name`` : for errors. ``matches`` : whether a directory with this configuration and tensors of these names has it.
    ``build`` : its head for a target, in the target's dtype, on its device and in evaluation mode; raises ModelError.
    """

    name: str
    matches: Callable[[Config, Collection[str]], bool]
    build: Callable[[Config, Tensors, PreTrainedModel], Head]
