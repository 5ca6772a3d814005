"""Training Medusa heads: each learns to say, from the last hidden state alone, what comes some tokens later."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ssd.bundled.training.heads.kinds import distance
from ssd.model.heads.medusa import MedusaHead

HEAD_WEIGHT = 0.8
"""What a head's loss counts beside that of the head before (arXiv 2401.10774, section 2.2.1)."""


class MedusaTraining:
    """New heads for a target, begun as copies of its output layer, and their training."""

    def __init__(self, target: PreTrainedModel, num_heads: int) -> None:
        config = target.config
        self.head = MedusaHead(config.hidden_size, config.vocab_size, num_heads)
        with torch.no_grad():
            for name, weight in self.head.named_parameters():
                if name.startswith("outputs"):
                    weight.copy_(target.get_output_embeddings().weight)
                else:
                    weight.zero_()  # a block of zeros passes on what it reads

    def loss(self, tokens: torch.Tensor, hidden: list[torch.Tensor], logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Distance from what the target says behind the text as it goes on, later heads counted less."""
        features, wanted = self.head.combine(hidden), torch.softmax(logits, -1)
        said = self.head(features.flatten(0, 1)).reshape(*features.shape[:2], self.head.num_tokens, -1)
        total, weights = torch.zeros(()), 0.0
        for head in range(depth):
            ahead = head + 1
            weight = HEAD_WEIGHT**head
            total = total + weight * distance(said[:, :-ahead, head], wanted[:, ahead:])
            weights += weight
        return total / weights

    def files(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The layout of the Medusa repository."""
        head = self.head
        config = {
            "medusa_num_heads": head.num_tokens,
            "medusa_num_layers": 1,
            "hidden_size": head.feature_size,
            "vocab_size": head.vocab_size,
        }
        tensors = {}
        for name, weight in head.state_dict().items():
            kind, number, *rest = name.split(".")
            tensors[".".join([number, *rest]) if kind == "blocks" else f"{number}.1.{rest[-1]}"] = weight
        return config, tensors
