"""What a draft head reads of every position that the target has read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ssd.model.kv.kv_cache import SlotRows


class FeatureStore:
    """Features of every position, laid out like keys of one head: ``stored`` is [num_slots, 1, length, size].

    Part of a `SlotKVCache`, which moves and copies them with the keys; what lies beyond a slot's length is never read.
    """

    def __init__(self, num_slots: int, length: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.stored = torch.zeros(num_slots, 1, length, size, dtype=dtype, device=device)

    @property
    def size(self) -> int:
        """Numbers of a position."""
        return self.stored.shape[3]

    def write(self, rows: SlotRows, features: torch.Tensor) -> None:
        """Store features, [B, T, size], at the rows' places."""
        if rows.only_place is not None:
            slot, place = rows.only_place
            self.stored[slot, 0, place] = features[0]
        else:
            self.stored[rows.slots[:, None], 0, rows.places] = features

    def read(self, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """A copy of what is stored at places int64[B, T] of slots int64[B]: [B, T, size]."""
        return self.stored[slots[:, None], 0, places]
