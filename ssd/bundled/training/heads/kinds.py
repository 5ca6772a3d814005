"""What training asks of a kind of head."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ssd.model.heads.head import Head


class Kind(Protocol):
    """How one kind of head is trained, and kept."""

    @property
    def head(self) -> Head:
        """The network."""

    def loss(self, tokens: torch.Tensor, hidden: list[torch.Tensor], logits: torch.Tensor, depth: int) -> torch.Tensor:
        """What to make small: distance from the target's ``logits`` over rows, to ``depth`` tokens ahead."""

    def files(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Configuration and tensors, in the layout that people publish."""


def distance(head_logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of what the target says, probabilities [..., V], under what the head says."""
    flat = head_logits.flatten(0, -2)
    return torch.nn.functional.cross_entropy(flat, wanted.flatten(0, -2))
