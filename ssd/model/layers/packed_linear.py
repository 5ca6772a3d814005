"""Linear layers on a CPU, with their weights laid out as oneDNN's kernels read them.

torch computes a linear layer from weights as they lie in the checkpoint. For one to some dozens of rows, which is what
a decode or verify pass has, the same product from weights in blocks takes half the time. torch's own compiler uses the
same two operators. Layers that read the same input are one product: a wider matrix reads and launches less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ssd.model.layers.packed_embedding import reader_of
from ssd.model.layers.replace import Joint, Replaced, is_plain, parents, siblings
from ssd.model.layers.row_plan import EXACT_ROWS, RowPlan, row_counts

_PREPARED_ROWS = 64
_LONG = 1 << 22


Places = list[tuple[nn.Module, str]]
"""Where in a model modules stand: what holds them, and their names there."""


class PackedLinear(nn.Module):
    """``nn.Linear`` from packed weights, which it holds alone: they are no parameters and cannot be trained."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` : [out, in]; ``bias`` : [out]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().clone()
        self.packed = packed_weight(weight)
        self.weight = torch.empty_like(weight, device="meta")
        """The shape and type alone, for models that look at them."""
        self.kind = (self.in_features, self.out_features, bias is not None, weight.dtype)
        """Layers of one kind share their machine code."""
        self.rows = RowPlan()
        """How many rows a product has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x : [..., in]. Returns [..., out]."""
        if self.rows.least <= x.numel() // self.in_features <= EXACT_ROWS:
            return self.product(x)
        rows = x.reshape(-1, self.in_features)
        return self.rows.product(self.product, rows).view(*x.shape[:-1], self.out_features)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows [..., in], computed as so many: [..., out]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self._bias, "none", [], "")
        return out

    __call__ = forward  # without torch's search for hooks

    @property
    def num_bytes(self) -> int:
        """Size of the packed weight, what fills up its blocks included."""
        return int(torch.ops.mkldnn._nbytes(self.packed))

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias as they came. O(size)."""
        return self.packed.to_dense(), self._bias

    def take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Compute with others from now on, of the same shapes and type; ``weight`` is nobody else's: it may be kept."""
        self.packed = packed_weight(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight, [out, in], as oneDNN's kernels read it; the order follows from its shape and type. O(size)."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


class FusedLinears(Joint):
    """Layers that read the same input: one packed product."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        """``linears`` : see `siblings`."""
        super().__init__(linears)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.product = PackedLinear(
            torch.cat([linear.weight.detach() for linear in linears]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """As `Joint.compute`."""
        return self.product(x)


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


def _fuse(model: nn.Module, dtypes: Sequence[torch.dtype]) -> Iterator[Replaced]:
    for parent, linears in siblings(model, lambda module: is_plain(module, dtypes)):
        group = FusedLinears(list(linears.values()))
        for member, name in enumerate(linears):
            part = FusedMember(group, member)
            setattr(parent, name, part)
            yield Replaced(parent, name, partial(_linear_again, part))


def pack_linears(model: nn.Module) -> Iterator[Replaced]:
    """Put packed layers in the place of plain ones, one for those that read the same input; what was replaced.

    Weights are held once: those of a layer go when it is packed, and an embedding that is tied to it reads rows of what
    was packed, see `PackedEmbedding`; where it cannot, both stay. O(weights), and memory for one layer more.
    """
    if not (dtypes := packed_types()):
        return
    yield from _fuse(model, dtypes)
    tied = _tied(model)
    for parent in parents(model):
        for name in dict(parent.named_children()):
            linear = getattr(parent, name)
            if is_plain(linear, dtypes):
                yield from _pack(linear, tied.pop(id(linear.weight), [(parent, name)]))
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor:  # while one is mapped from a file, all of the file is
            parameter.data = parameter.data.clone()


def _pack(linear: nn.Linear, places: Places) -> Iterator[Replaced]:
    """Replace all that stands in ``places``, which are those of the layer's weight, or nothing."""
    packed = PackedLinear(linear.weight, linear.bias)
    again = cache(partial(_linear_again, packed))
    replaced: list[tuple[nn.Module, str, nn.Module, Callable[[], nn.Module]]] = []
    for parent, name in places:
        module = getattr(parent, name)
        if module is linear:
            replaced.append((parent, name, packed, again))
        elif (reader := reader_of(module, packed.packed)) is not None:
            replaced.append((parent, name, reader, partial(_tied_again, module, again)))
        else:
            return
    for parent, name, layer, undo in replaced:
        module = getattr(parent, name)
        setattr(parent, name, layer)
        if module is not linear:
            module.weight = None
        yield Replaced(parent, name, undo)


def _linear_again(layer: Any) -> nn.Linear:
    """An ``nn.Linear`` of what a layer was made of."""
    weight, bias = layer.unpacked()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _tied(model: nn.Module) -> dict[int, Places]:
    """Where the modules stand that own a weight with others, by the weight's ``id``."""
    places: dict[int, Places] = {}
    for parent in parents(model):
        for name, child in parent.named_children():
            weight = child._parameters.get("weight")
            if weight is not None:
                places.setdefault(id(weight), []).append((parent, name))
    return {weight: found for weight, found in places.items() if len(found) > 1}


def _tied_again(module: nn.Module, linear: Callable[[], nn.Linear]) -> nn.Module:
    module.weight = linear().weight
    return module


def packed_linears(model: nn.Module) -> list[PackedLinear]:
    """All there are in a model, those that stand for several layers once."""
    found = [module.group.product if isinstance(module, FusedMember) else module for module in model.modules()]
    return list({id(layer): layer for layer in found if isinstance(layer, PackedLinear)}.values())


@torch.inference_mode()
def prepare_linears(model: nn.Module) -> None:
    """Have the machine code made for products of up to 64 rows, which are most of what a server computes.

    Of layers with fewer than 4 million weights: a product of more takes longer than its code, 0.7 ms each.
    """
    layers = {layer.kind: layer for layer in packed_linears(model)}
    for num_rows in row_counts(_PREPARED_ROWS):
        for (size, num_outputs, _, dtype), packed in layers.items():
            if size * num_outputs < _LONG:
                packed(torch.zeros(1, num_rows, size, dtype=dtype))


@cache
def packed_types() -> tuple[torch.dtype, ...]:
    """Of weights that can be packed here: bfloat16 takes AVX-512, or AVX2 that converts it; none without oneDNN."""
    return tuple(dtype for dtype in (torch.float32, torch.bfloat16) if _can_pack(dtype))


def _can_pack(dtype: torch.dtype) -> bool:
    try:
        packed_weight(torch.zeros(16, 16, dtype=dtype))
    except (AttributeError, RuntimeError):  # no operator, or none for this type
        return False
    return True
