"""Linear layers on a CPU, with their weights laid out as oneDNN's kernels read them.

torch computes a linear layer from weights as they lie in the checkpoint. For one to some dozens of rows, which is what
a decode or verify pass has, the same product from weights in blocks takes less time, and layers that read the same
input (query, key and value; gate and up) take less as one: see ``benchmarks.packed_linear``. torch's own compiler uses
the same two operators.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from ssd.errors import first_line
from ssd.target.probe import plain_logits

log = logging.getLogger(__name__)

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers of one module that read the same input in nearly every model; where they do not it only costs time."""

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """``nn.Linear`` from packed weights, which it holds alone: they are no parameters and cannot be trained."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` : [out, in]; ``bias`` : [out]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., in]. Returns [..., out]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out

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

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias as they came. O(size of all)."""
        weight, bias = self.group.packed.unpacked()
        own = slice(sum(self.group.sizes[: self._member]), sum(self.group.sizes[: self._member + 1]))
        return weight[own], None if bias is None else bias[own]


def pack_linears(model: PreTrainedModel, expected: Sequence[torch.Tensor], tolerance: float) -> bool:
    """Pack the linear layers of a model on a CPU, and check that it still says what it said; else leave it as it was.

    ``expected`` : its `plain_logits`. ``tolerance`` : greatest relative error of them that is put down to rounding.
    True when they are packed. Changes ``model`` in place, and again does nothing. Quantised layers stay as they are.
    Memory grows by a tied output layer, which no longer shares its weights. O(weights).
    """
    if model.device.type != "cpu" or not _has_operators():
        return False
    swapped = list(_swap(model))
    if not swapped:
        return False
    try:
        error = max(
            float((found - want).norm() / want.norm())
            for found, want in zip(plain_logits(model), expected, strict=True)
        )
        if error < tolerance:
            return True
        reason = f"logits differ by {error:.2g}"
    except Exception as failure:  # a model that reaches into its layers, for one
        reason = first_line(failure)
    log.warning("the linear layers of %s stay as they are, which is slower: %s", type(model).__name__, reason)
    for parent, name in swapped:
        setattr(parent, name, _linear(*getattr(parent, name).unpacked()))
    return False


def _swap(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Put packed layers in the place of all that can be; where they are."""
    for parent in list(model.modules()):
        for names in SIBLINGS:
            linears = [linear for name in names if _is_plain(linear := getattr(parent, name, None))]
            if len(linears) < len(names) or not _fit_together(linears):
                continue
            group = FusedLinears(linears)
            for member, name in enumerate(names):
                setattr(parent, name, FusedMember(group, member))
                yield parent, name
        for name, child in list(parent.named_children()):
            if _is_plain(child):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                yield parent, name


def _is_plain(module: Any) -> TypeGuard[nn.Linear]:
    """An ``nn.Linear`` with nothing special to it: no subclass, no quantised weight, no hooks."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in _DTYPES
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def _fit_together(linears: Sequence[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return len(kinds) == 1 and len({id(linear) for linear in linears}) == len(linears)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
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
