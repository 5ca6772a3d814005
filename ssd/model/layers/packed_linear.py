"""Linear layers on a CPU, with their weights laid out as oneDNN's kernels read them.

torch computes a linear layer from weights as they lie in the checkpoint. For one to some dozens of rows, which is what
a decode or verify pass has, the same product from weights in blocks takes half the time. torch's own compiler uses the
same two operators. Layers that read the same input are one product: a wider matrix reads and launches less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ssd.model.layers.packed_embedding import reader_of
from ssd.model.layers.replace import Replaced, is_plain, parents
from ssd.model.layers.row_plan import EXACT_ROWS, RowPlan, row_counts

SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers of one module that read the same input in nearly every model; where they do not it only costs time."""
_PREPARED_ROWS = 64
_LONG = 1 << 22


class Place(NamedTuple):
    """Where in a model a module stands."""

    parent: nn.Module
    name: str


class PackedLinear(nn.Module):
    """``nn.Linear`` from packed weights, which it holds alone: they are no parameters and cannot be trained."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` : [out, in]; ``bias`` : [out]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().clone()
        self.packed = packed_weight(weight)
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


class FusedLinears:
    """Layers that read the same input, computed as one when the first of them is asked."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        """``linears`` : as many inputs each; with a bias all or none."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.sizes = [linear.out_features for linear in linears]
        self.product = PackedLinear(
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


def _fuse(model: nn.Module, dtypes: Sequence[torch.dtype]) -> Iterator[Replaced]:
    for parent in parents(model):
        for names in SIBLINGS:
            linears = [linear for name in names if is_plain(linear := getattr(parent, name, None), dtypes)]
            if len(linears) < len(names) or not _fit_together(linears):
                continue
            group = FusedLinears(linears)
            for member, name in enumerate(names):
                part = FusedMember(group, member)
                setattr(parent, name, part)
                yield Replaced(parent, name, partial(_linear_again, part))


def pack_linears(model: nn.Module) -> Iterator[Replaced]:
    """Put packed layers in the place of plain ones, one for those that read the same input; what was replaced.

    Weights are held once: those of a layer go when it is packed, and an embedding that is tied to it reads rows of what
    was packed, see `PackedEmbedding`; where it cannot, both stay. O(weights), and memory for one layer more.
    """
    if not has_operators():
        return
    dtypes = packed_types()
    yield from _fuse(model, dtypes)
    tied = _tied(model)
    for parent in parents(model):
        for name in dict(parent.named_children()):
            linear = getattr(parent, name)
            if is_plain(linear, dtypes):
                yield from _pack(linear, tied.pop(id(linear.weight), [Place(parent, name)]))
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor:  # while one is mapped from a file, all of the file is
            parameter.data = parameter.data.clone()


def _pack(linear: nn.Linear, places: list[Place]) -> Iterator[Replaced]:
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


def _fit_together(linears: Sequence[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return len(kinds) == 1 and len({id(linear) for linear in linears}) == len(linears)


def _tied(model: nn.Module) -> dict[int, list[Place]]:
    """Where the modules stand that own a weight with others, by the weight's ``id``."""
    places: dict[int, list[Place]] = {}
    for parent in parents(model):
        for name, child in parent.named_children():
            weight = child._parameters.get("weight")
            if weight is not None:
                places.setdefault(id(weight), []).append(Place(parent, name))
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


def has_operators() -> bool:
    """Whether this torch has the two operators."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.mkldnn, name) for name in names
    )


@cache
def packed_types() -> tuple[torch.dtype, ...]:
    """Of weights that can be packed here: bfloat16 takes AVX-512, or AVX2 that converts it."""
    return tuple(dtype for dtype in (torch.float32, torch.bfloat16) if _can_pack(dtype))


def _can_pack(dtype: torch.dtype) -> bool:
    try:
        packed_weight(torch.zeros(16, 16, dtype=dtype))
    except RuntimeError:
        return False
    return True
