"""What a draft head reads of every position that the target has read."""

from __future__ import annotations

import torch


class FeatureStore:
    """Features of every position, laid out like keys of one head: ``stored`` is [num_slots, 1, length, size].

    Part of a `SlotKVCache`, which moves and copies them with the keys; `SlotRows.put` writes them. What lies beyond a
    slot's length is never read.
    """

    def __init__(self, num_slots: int, length: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.stored = torch.zeros(num_slots, 1, length, size, dtype=dtype, device=device)

    @property
    def size(self) -> int:
        """Numbers of a position."""
        return self.stored.shape[3]

    def read(self, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """A copy of what is stored at places int64[B, T] of slots int64[B]: [B, T, size]."""
        return self.stored[slots[:, None], 0, places]
