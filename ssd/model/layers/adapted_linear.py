"""Linear layers with low-rank adapters (LoRA, Hu et al. 2021), chosen per row of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from ssd.model.layers.exact_matmul import exact_linear


class LoraWeights(NamedTuple):
    """The weights that an adapter adds to a layer: ``scale * up(down(x))``.

    Attributes:
        down: [rank, in].
        up: [out, rank].
        scale: The factor of the product.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class AdapterRows:
    """The adapter of each row of the current forward pass.

    Attributes:
        count: The number of rows.
        groups: The adapters' names and the indices of their rows, int64[n]; None if all rows have the same adapter.
    """

    def __init__(self) -> None:
        self.count = 0
        self.groups: list[tuple[str, torch.Tensor | None]] = []

    @contextmanager
    def assign(self, names: Sequence[str | None], device: torch.device) -> Iterator[None]:
        """Assign adapter ``names[b]`` to row b of each pass inside the context. O(rows)."""
        self.count = len(names)
        for name in sorted({name for name in names if name is not None}):
            own = [b for b, other in enumerate(names) if other == name]
            self.groups.append((name, None if len(own) == len(names) else torch.tensor(own, device=device)))
        try:
            yield
        finally:
            self.groups.clear()


class AdaptedLinear(nn.Module):
    """A linear layer of any kind with adapters. Rows without an adapter get the layer's unchanged output."""

    def __init__(self, base: nn.Module, lora_weights: Mapping[str, LoraWeights], rows: AdapterRows) -> None:
        """Wrap ``base``; ``rows`` is shared by all layers of the model."""
        super().__init__()
        self.base = base
        self.lora_weights = dict(lora_weights)
        self._rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [rows, ..., out] from x, [rows, ..., in]; raises ValueError for another number of rows."""
        out: torch.Tensor = self.base(x)
        for name, indices in self._rows.groups:
            addition = self.lora_weights.get(name)
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
