"""Linear layers with low-rank additions (LoRA, Hu et al. 2021), of which each row of a pass has its own or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from ssd.model.layers.own_products import exact_linear


class Addition(NamedTuple):
    """What an adapter adds to a layer: ``scale * up(down(x))``. ``down`` : [rank, in]; ``up`` : [out, rank]."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class Rows:
    """Which adapter each row of the pass that is being made has."""

    def __init__(self) -> None:
        self.count = 0
        self.groups: list[tuple[str, torch.Tensor | None]] = []
        """Names and the indices of their rows, int64[n]; None where all rows have the same."""

    @contextmanager
    def are(self, names: Sequence[str | None], device: torch.device) -> Iterator[None]:
        """Inside, row b of each pass has adapter ``names[b]``. O(rows)."""
        self.count = len(names)
        for name in sorted({name for name in names if name is not None}):
            own = [b for b, other in enumerate(names) if other == name]
            self.groups.append((name, None if len(own) == len(names) else torch.tensor(own, device=device)))
        try:
            yield
        finally:
            self.groups.clear()


class AdaptedLinear(nn.Module):
    """A layer, whatever its kind, and what adapters add to it. Rows without an adapter get the layer's output as is."""

    def __init__(self, base: nn.Module, additions: Mapping[str, Addition], rows: Rows) -> None:
        """``rows`` : of all layers of the model."""
        super().__init__()
        self.base = base
        self.additions = dict(additions)
        self._rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [rows, ..., in]. Returns [rows, ..., out]; raises ValueError for another number of rows."""
        out: torch.Tensor = self.base(x)
        for name, indices in self._rows.groups:
            addition = self.additions.get(name)
            if addition is None:
                continue
            if len(x) != self._rows.count:
                raise ValueError(f"a layer mixes rows: {len(x)} instead of {self._rows.count}")
            part = (x if indices is None else x[indices]).to(addition.down.dtype)
            more = exact_linear(exact_linear(part, addition.down), addition.up) * addition.scale
            if indices is None:
                out = out + more.to(out.dtype)
            else:
                out[indices] += more.to(out.dtype)
        return out
