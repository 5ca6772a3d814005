"""Medusa's heads (Cai et al. 2024, arXiv 2401.10774, section 2.1.1)."""

from __future__ import annotations

import torch
from torch import nn

from ssd.model.heads.head import FINAL, ParallelHead
from ssd.model.heads.target_parts import TargetParts


class MedusaHead(ParallelHead):
    """For each of several tokens ahead a few residual blocks over the last hidden state, then an output layer.

    ``blocks.{i}.{j}.linear`` and ``outputs.{i}`` are block j and output layer of the i-th.
    """

    token_map: torch.Tensor | None
    """int64[Vd], the target's id of each token that can be drafted; None where all can."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        target: TargetParts | None = None,
        shares_output: bool = False,
        token_map: torch.Tensor | None = None,
    ) -> None:
        """``num_layers`` : blocks of each. ``bias`` : of the blocks.

        target : whose output layer all heads share; None where they have their own, one each, or one for all if
        ``shares_output``. token_map : as above.
        """
        super().__init__()
        self.feature_layers, self.feature_size, self.num_tokens = (FINAL,), hidden_size, num_heads
        self.vocab_size = vocab_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_Block(hidden_size, bias) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self._target = target
        outputs = 0 if target is not None else 1 if shares_output else num_heads
        num_drafted = vocab_size if token_map is None else len(token_map)
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, num_drafted, bias=False) for _ in range(outputs))
        self.register_buffer("token_map", token_map, persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits, [B, num_tokens, V]; minus infinity for tokens that cannot be drafted."""
        hidden = [block(features) for block in self.blocks]
        if self._target is not None:
            return self._target.logits(torch.stack(hidden, dim=1))
        shared = len(self.outputs) == 1
        logits = torch.stack([self.outputs[0 if shared else i](each) for i, each in enumerate(hidden)], dim=1)
        if self.token_map is None:
            return logits
        all_tokens = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        all_tokens[..., self.token_map] = logits
        return all_tokens


class _Block(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))
