"""Layers that read the same input (query, key and value; gate and up) computed as one product.

One product of a wider matrix reads and launches less than two or three of narrower ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from ssd.model.layers.replace import Replaced, has_hooks, parents

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers of one module that read the same input in nearly every model; where they do not it only costs time."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Any]
"""Of weight [out, in] and bias [out] what computes the product, see `PlainProduct`."""


class PlainProduct:
    """torch's own, or what ``compute`` is set to."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = nn.functional.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., in]. Returns [..., out]."""
        return self.compute(x, self._weight, self._bias)

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias as they came."""
        return self._weight, self._bias

    def take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Compute with others from now on, in the memory of the old ones: recorded passes read that."""
        self._weight.copy_(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)


class FusedLinears:
    """Layers that read the same input, computed as one when the first of them is asked."""

    def __init__(self, linears: Sequence[nn.Linear], product: MakeProduct) -> None:
        """``linears`` : as many inputs each; with a bias all or none."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.sizes = [linear.out_features for linear in linears]
        self.product = product(
            torch.cat([linear.weight.detach() for linear in linears]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )
        self.in_features, self.dtype, self.has_bias = linears[0].in_features, linears[0].weight.dtype, bool(biases)
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, x: torch.Tensor, member: int) -> torch.Tensor:
        """What layer ``member`` makes of ``x``; each layer is asked once for an input."""
        found = self._outputs[member] if x is self._input else None
        if found is None:
            self._outputs = list(torch.split_with_sizes(self.product(x), self.sizes, -1))
            self._input = x
            found = self._outputs[member]
            assert found is not None
        self._outputs[member] = None
        if not any(output is not None for output in self._outputs):
            self._input = None  # nothing of a pass stays behind
        return found

    def take(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
        """Compute with others from now on, one a layer, no biases where there are none. O(size)."""
        self.product.take(torch.cat(list(weights)), torch.cat(list(biases)) if biases else None)


class FusedMember(nn.Module):
    """One of the layers."""

    def __init__(self, group: FusedLinears, member: int) -> None:
        super().__init__()
        self.group, self.member = group, member

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., in]. Returns [..., out]."""
        return self.group.output(x, self.member)

    __call__ = forward  # without torch's search for hooks

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias as they came. O(size of all)."""
        weight, bias = self.group.product.unpacked()
        own = slice(sum(self.group.sizes[: self.member]), sum(self.group.sizes[: self.member + 1]))
        return weight[own], None if bias is None else bias[own]


def fuse_linears(
    model: nn.Module, product: MakeProduct = PlainProduct, dtypes: Sequence[torch.dtype] = FLOATS
) -> Iterator[Replaced]:
    """Have layers of ``dtypes`` that read the same input computed as one; what was replaced, as it goes. O(weights)."""
    for parent in parents(model):
        for names in SIBLINGS:
            linears = [linear for name in names if is_plain(linear := getattr(parent, name, None), dtypes)]
            if len(linears) < len(names) or not _fit_together(linears):
                continue
            group = FusedLinears(linears, product)
            for member, name in enumerate(names):
                part = FusedMember(group, member)
                setattr(parent, name, part)
                yield Replaced(parent, name, partial(linear_again, part))


def is_plain(module: Any, dtypes: Sequence[torch.dtype]) -> TypeGuard[nn.Linear]:
    """An ``nn.Linear`` of one of ``dtypes`` with nothing special to it: no subclass, no quantised weight, no hooks."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in dtypes
        and not has_hooks(module)
    )


def linear_again(layer: Any) -> nn.Linear:
    """An ``nn.Linear`` of what a layer was made of."""
    weight, bias = layer.unpacked()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _fit_together(linears: Sequence[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return len(kinds) == 1 and len({id(linear) for linear in linears}) == len(linears)
