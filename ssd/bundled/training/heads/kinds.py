"""What training asks of a kind of head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ssd.model.heads.head import Head

Draw = Callable[[int, torch.Tensor], torch.Tensor]
"""Draws the drafted tokens of one depth, int64[B, n] in the target's ids, from logits over all its tokens [B, n, V]."""


class Kind(Protocol):
    """How one kind of head is trained, and how it drafts."""

    @property
    def head(self) -> Head:
        """The network."""

    def loss(self, tokens: torch.Tensor, hidden: list[torch.Tensor], logits: torch.Tensor, depth: int) -> torch.Tensor:
        """What to make small: distance from the target's ``logits`` over rows, to ``depth`` tokens ahead."""

    def chains(self, tokens: torch.Tensor, hidden: list[torch.Tensor], depth: int, draw: Draw) -> list[torch.Tensor]:
        """What the head drafts behind every position of rows, int64[B, T - 1] for each of ``depth`` tokens.

        Entry s of the d-th stands for the token d + 2 places after s: the one after s is the target's own.
        """

    def files(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Configuration and tensors, in the layout that people publish."""


def distance(head_logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of what the target says, probabilities [..., V], under what the head says."""
    flat = head_logits.flatten(0, -2)
    return torch.nn.functional.cross_entropy(flat, wanted.flatten(0, -2))
