"""What a pass says of the tokens that it was fed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssd.model.sampling.noise import Noise


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """Logits of a pass and, where it chose tokens itself, those. Valid until the next pass of the same target.

    ``logits`` : [B, T, V], any float type; ``[b, t]`` predicts the token after the t-th that row b was fed.
    ``chosen`` : int64[B, T], by ``noise``, else the most probable tokens; None where the pass chose none. ``noise`` :
    what the pass was given.
    """

    logits: torch.Tensor
    chosen: torch.Tensor | None = None
    noise: Noise | None = None

    def row(self, b: int) -> PassOutput:
        """Row b alone: views."""
        rows = slice(b, b + 1)
        return PassOutput(
            self.logits[rows],
            None if self.chosen is None else self.chosen[rows],
            None if self.noise is None else Noise(self.noise.keys[rows], self.noise.temperatures[rows]),
        )
