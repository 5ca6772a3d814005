"""Muon for the weight matrices and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class MuonWithAdamW:
    """Muon (Jordan et al. 2024) on every matrix but the embedding; AdamW on the embedding and the norms.

    Muon's update is the momentum with its singular values pushed towards one, times ``0.2 sqrt(longer side)`` so that
    its size is that of an AdamW step (Liu et al. 2025, section 2.2); hence one learning rate serves both.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        in_muon = {id(p) for p in self._matrices}
        others = [p for p in named.values() if id(p) not in in_muon]
        self._adamw = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter from its gradient."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        for parameter, momentum in zip(self._matrices, self._momenta, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            momentum.mul_(0.95).add_(gradient)
            update = orthogonalised(gradient.add(momentum, alpha=0.95))
            parameter.mul_(1 - 0.1 * learning_rate)
            parameter.add_(update, alpha=-learning_rate * 0.2 * max(parameter.shape) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"adamw": self._adamw.state_dict(), "momenta": self._momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self._adamw.load_state_dict(state["adamw"])
        for momentum, saved in zip(self._momenta, state["momenta"], strict=True):
            momentum.copy_(saved)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Nearest semi-orthogonal matrix, roughly: five Newton-Schulz steps bring singular values to 0.7 ... 1.2.

    Computed in bfloat16, as by the authors; on a core with bfloat16 instructions this halves the cost.
    """
    a, b, c = _NEWTON_SCHULZ
    x = (matrix / (matrix.norm() + 1e-7)).bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.T if tall else x
    return result.to(matrix.dtype)
