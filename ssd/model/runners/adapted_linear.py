"""Linear layers with low-rank adapters (LoRA, Hu et al. 2021); each row of a forward pass may use another adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from ssd.model.cpu.exact_matmul import exact_linear


class LoraWeights(NamedTuple):
    """The low-rank weights that a LoRA adapter adds to a linear layer: ``scale * up(down(x))``."""

    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [out, rank]
    scale: float


class AdapterRows:
    """The LoRA adapters of the rows of the current forward pass; all adapted layers of a model share this object."""

    def __init__(self) -> None:
        self.count = 0
        # The adapters' names and the indices of their rows, int64[n]; None if all rows have the same adapter.
        self.groups: list[tuple[str, torch.Tensor | None]] = []

    @contextmanager
    def assign(self, names: Sequence[str | None], device: torch.device) -> Iterator[None]:
        """Use LoRA adapter ``names[b]`` for row b of forward passes in this context; None means no adapter. O(rows)."""
        self.count = len(names)
        for name in sorted({name for name in names if name is not None}):
            own = [b for b, other in enumerate(names) if other == name]
            self.groups.append((name, None if len(own) == len(names) else torch.tensor(own, device=device)))
        try:
            yield
        finally:
            self.groups.clear()


class AdaptedLinear(nn.Module):
    """A linear layer of any kind with LoRA adapters. Rows without an adapter get the layer's unchanged output."""

    def __init__(self, base: nn.Module, lora_weights: Mapping[str, LoraWeights], rows: AdapterRows) -> None:
        super().__init__()
        self.base = base
        self.lora_weights = dict(lora_weights)
        self._rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer and the LoRA adapter of each row to x, [rows, ..., in].

        Raises ValueError if x does not have as many rows as the forward pass.
        """
        out: torch.Tensor = self.base(x)
        for name, indices in self._rows.groups:
            addition = self.lora_weights.get(name)
            if addition is None:
                continue
            if len(x) != self._rows.count:
                raise ValueError(f"a layer with LoRA adapters received {len(x)} rows instead of {self._rows.count}")
            part = (x if indices is None else x[indices]).to(addition.down.dtype)
            more = exact_linear(exact_linear(part, addition.down), addition.up) * addition.scale
            if indices is None:
                out = out + more.to(out.dtype)
            else:
                out[indices] += more.to(out.dtype)
        return out
