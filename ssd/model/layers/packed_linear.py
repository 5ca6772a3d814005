"""Linear layers on a CPU, with their weights laid out as oneDNN's kernels read them.

torch computes a linear layer from weights as they lie in the checkpoint. For one to some dozens of rows, which is what
a decode or verify pass has, the same product from weights in blocks takes less time: see ``benchmarks.layers``. torch's
own compiler uses the same two operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from ssd.model.layers.fused_linear import FusedMember, fuse_linears, is_plain, linear_again
from ssd.model.layers.replaced import Replaced

_DTYPES = (torch.float32, torch.bfloat16)

_EXACT_ROWS = 16
_PREPARED_ROWS = 64


class PackedLinear(nn.Module):
    """``nn.Linear`` from packed weights, which it holds alone: they are no parameters and cannot be trained."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` : [out, in]; ``bias`` : [out]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.kind = (self.in_features, self.out_features, bias is not None, weight.dtype)
        """Layers of one kind share their machine code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., in]. Returns [..., out]."""
        num_rows = x.numel() // self.in_features
        wanted = rounded_rows(num_rows)
        if wanted == num_rows:
            return self._product(x)
        padded = nn.functional.pad(x.reshape(num_rows, -1), (0, 0, 0, wanted - num_rows))
        return self._product(padded)[:num_rows].view(*x.shape[:-1], -1)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out

    __call__ = forward  # without torch's search for hooks

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias as they came. O(size)."""
        return self._packed.to_dense(), self._bias


def pack_linears(model: nn.Module) -> Iterator[Replaced]:
    """Put packed layers in the place of plain ones, one for those that read the same input; what was replaced.

    Memory grows by a tied output layer, which no longer shares its weights. O(weights).
    """
    if not _has_operators():
        return
    yield from fuse_linears(model, PackedLinear, _DTYPES)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child, _DTYPES):
                packed = PackedLinear(child.weight, child.bias)
                setattr(parent, name, packed)
                yield Replaced(parent, name, partial(linear_again, packed))


def rounded_rows(num_rows: int) -> int:
    """How many rows are computed: up to 16 as many, above one of eight numbers between a power of two and the next.

    oneDNN makes machine code for each number of rows, which takes longer than a pass of a small model, and keeps that
    of the last thousand products. So there are few numbers; the rows added are an eighth at most.
    """
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << ((num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


@torch.inference_mode()
def prepare_linears(model: nn.Module) -> None:
    """Have the machine code made for products of up to 64 rows, which are most of what a server computes."""
    layers: dict[tuple[int, int, bool, torch.dtype], PackedLinear] = {}
    for module in model.modules():
        packed = module.group.product if isinstance(module, FusedMember) else module
        if isinstance(packed, PackedLinear):
            layers[packed.kind] = packed
    for num_rows in sorted({rounded_rows(n) for n in range(1, _PREPARED_ROWS + 1)}):
        for (size, *_, dtype), packed in layers.items():
            packed(torch.zeros(1, num_rows, size, dtype=dtype))


def _has_operators() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.mkldnn, name) for name in names
    )
