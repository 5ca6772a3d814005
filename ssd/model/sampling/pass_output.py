"""What a pass says of the tokens that it was fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssd.model.sampling.noise import Noise
from ssd.model.sampling.top_tokens import TopTokens, top_tokens, unpacked


@dataclass(frozen=True, slots=True, eq=False)
class PassOutput:
    """Logits of a pass and, where it chose tokens itself, those. Valid until the next pass of the same target.

    ``logits`` : [B, T, V], any float type; ``[b, t]`` predicts the token after the t-th that row b was fed.
    ``chosen`` : int64[B, T], by ``noise``, else the most probable tokens; None where the pass chose none. ``noise`` :
    what the pass was given. ``packed_top`` : see `top_tokens.packed_top`; None where the pass did not look for them.
    """

    logits: torch.Tensor
    chosen: torch.Tensor | None = None
    noise: Noise | None = None
    packed_top: torch.Tensor | None = None

    def top(self, counts: Sequence[int]) -> TopTokens:
        """The most probable tokens at the first ``counts[b]`` positions of each row, as the logits have them.

        Computed when it is asked for, unless the pass did it already. O(positions V).
        """
        return top_tokens(self.logits, counts) if self.packed_top is None else unpacked(self.packed_top)

    def row(self, b: int) -> PassOutput:
        """Row b alone: views."""
        rows = slice(b, b + 1)
        return PassOutput(
            self.logits[rows],
            None if self.chosen is None else self.chosen[rows],
            None if self.noise is None else Noise(self.noise.keys[rows], self.noise.temperatures[rows]),
            None if self.packed_top is None else self.packed_top[rows],
        )
