"""Linear layers on a CPU, with their weights laid out as oneDNN's kernels read them.

torch computes a linear layer from weights as they lie in the checkpoint. For one to some dozens of rows, which is what
a decode or verify pass has, the same product from weights in blocks takes less time, and layers that read the same
input (query, key and value; gate and up) take less as one: see ``benchmarks.layers``. torch's own compiler uses the
same two operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from ssd.target.replaced import Replaced, has_hooks

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers of one module that read the same input in nearly every model; where they do not it only costs time."""

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


class FusedLinears:
    """Layers that read the same input, computed as one when the first of them is asked."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        """``linears`` : as many inputs each; with a bias all or none."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.sizes = [linear.out_features for linear in linears]
        self.packed = PackedLinear(
            torch.cat([linear.weight.detach() for linear in linears]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, x: torch.Tensor, member: int) -> torch.Tensor:
        """What layer ``member`` makes of ``x``; each layer is asked once for an input."""
        found = self._outputs[member] if x is self._input else None
        if found is None:
            self._outputs = list(torch.split_with_sizes(self.packed(x), self.sizes, -1))
            self._input = x
            found = self._outputs[member]
            assert found is not None
        self._outputs[member] = None
        if not any(output is not None for output in self._outputs):
            self._input = None  # nothing of a pass stays behind
        return found


class FusedMember(nn.Module):
    """One of the layers."""

    def __init__(self, group: FusedLinears, member: int) -> None:
        super().__init__()
        self.group, self._member = group, member

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., in]. Returns [..., out]."""
        return self.group.output(x, self._member)

    __call__ = forward

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias as they came. O(size of all)."""
        weight, bias = self.group.packed.unpacked()
        own = slice(sum(self.group.sizes[: self._member]), sum(self.group.sizes[: self._member + 1]))
        return weight[own], None if bias is None else bias[own]


def pack_linears(model: nn.Module) -> Iterator[Replaced]:
    """Put packed layers in the place of plain ones, whose weights they take over; what was replaced, as it goes.

    Memory grows by a tied output layer, which no longer shares its weights. O(weights).
    """
    if not _has_operators():
        return
    for parent in list(model.modules()):
        for names in SIBLINGS:
            linears = [linear for name in names if _is_plain(linear := getattr(parent, name, None))]
            if len(linears) < len(names) or not _fit_together(linears):
                continue
            group = FusedLinears(linears)
            for member, name in enumerate(names):
                part = FusedMember(group, member)
                setattr(parent, name, part)
                yield Replaced(parent, name, partial(_linear_again, part))
        for name, child in list(parent.named_children()):
            if _is_plain(child):
                packed = PackedLinear(child.weight, child.bias)
                setattr(parent, name, packed)
                yield Replaced(parent, name, partial(_linear_again, packed))


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
        packed = module.group.packed if isinstance(module, FusedMember) else module
        if isinstance(packed, PackedLinear):
            layers[packed.kind] = packed
    for num_rows in sorted({rounded_rows(n) for n in range(1, _PREPARED_ROWS + 1)}):
        for (size, *_, dtype), packed in layers.items():
            packed(torch.zeros(1, num_rows, size, dtype=dtype))


def _is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """An ``nn.Linear`` with nothing special to it: no subclass, no quantised weight, no hooks."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in _DTYPES
        and not has_hooks(module)
    )


def _fit_together(linears: Sequence[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return len(kinds) == 1 and len({id(linear) for linear in linears}) == len(linears)


def _linear_again(packed: PackedLinear | FusedMember) -> nn.Linear:
    weight, bias = packed.unpacked()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _has_operators() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.mkldnn, name) for name in names
    )
