"""Linear layers on a CPU whose weights are in the blocked layout of oneDNN's kernels.

torch computes a linear layer from weights in the checkpoint's layout. For one to several dozen rows, as in decoding and
verification passes, the same product from weights in blocks takes half the time. torch's own compiler also packs and
multiplies weights by the two operators used here. Layers that read the same input are computed as one product, because
a wider matrix needs fewer reads and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ssd.model.cpu.packed_embedding import pack_embedding
from ssd.model.cpu.row_plan import EXACT_ROWS, RowPlan, row_counts
from ssd.model.layers.replace import Joint, Replaced, is_plain, parents, siblings

_PREPARED_ROWS = 64
_LONG = 1 << 22


ModulePlaces = list[tuple[nn.Module, str]]  # The parents of modules in a model, and the modules' names there.


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored only in oneDNN's packed layout, which is faster but cannot be trained."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().clone()
        self.weight = torch.empty_like(weight, device="meta")  # for models that look at its shape and type
        self.packed = pack_weight(weight)
        # Layers of one kind share their machine code.
        self.kind = (self.in_features, self.out_features, bias is not None, weight.dtype)
        self.rows = RowPlan()  # the numbers of rows that a product may have

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows.min_rows <= x.numel() // self.in_features <= EXACT_ROWS:
            return self.product(x)
        rows = x.reshape(-1, self.in_features)
        return self.rows.product(self.product, rows).view(*x.shape[:-1], self.out_features)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output [..., out] for x [..., in] by one matrix product, without adding padding rows."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self._bias, "none", [], "")
        return out

    __call__ = forward  # without torch's search for hooks

    @property
    def num_bytes(self) -> int:
        return int(torch.ops.mkldnn._nbytes(self.packed))

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's weight [out, in] and bias in the checkpoint's layout. O(size)."""
        return self.packed.to_dense(), self._bias

    def replace_weight(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Replace weight and bias by new tensors of the same shapes and dtype.

        The layer may keep ``weight`` itself instead of a copy, so do not change it afterwards.
        """
        self.packed = pack_weight(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Convert a weight [out, in] to oneDNN's packed layout, which is determined by its shape and dtype. O(size)."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


class PackedGroup(Joint):
    """Linear layers with the same input, such as q_proj, k_proj and v_proj, computed as one packed product."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.product = PackedLinear(
            torch.cat([linear.weight.detach() for linear in linears]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class PackedMember(nn.Module):
    """One linear layer of a `PackedGroup`; it returns its part of the output that the group computes for all layers."""

    def __init__(self, group: PackedGroup, member: int) -> None:
        super().__init__()
        self.group, self.member = group, member

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.output(x, self.member)

    __call__ = forward  # without torch's search for hooks

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's weight [out, in] and bias in the checkpoint's layout. O(size of the group)."""
        weight, bias = self.group.product.unpacked()
        own = slice(sum(self.group.sizes[: self.member]), sum(self.group.sizes[: self.member + 1]))
        return weight[own], None if bias is None else bias[own]


def _pack_groups(model: nn.Module, dtypes: Sequence[torch.dtype]) -> Iterator[Replaced]:
    for parent, linears in siblings(model, lambda module: is_plain(module, dtypes)):
        group = PackedGroup(list(linears.values()))
        for member, name in enumerate(linears):
            part = PackedMember(group, member)
            setattr(parent, name, part)
            yield Replaced(parent, name, partial(_restore_linear, part))


def pack_linears(model: nn.Module) -> Iterator[Replaced]:
    """Replace the plain linear layers of a model by layers with weights in oneDNN's packed layout.

    Layers with the same input, such as q_proj, k_proj and v_proj, are computed as one product. Each weight is stored
    only once: the original is freed when it is packed, and an embedding tied to a linear layer reads the packed weight
    (see `PackedEmbedding`). If it cannot, neither is packed. Yields for each layer a `Replaced` record, which can
    restore it. O(weights), with memory for one more layer.
    """
    if not (dtypes := packable_dtypes()):
        return
    yield from _pack_groups(model, dtypes)
    tied = _find_tied_modules(model)
    for parent in parents(model):
        for name in dict(parent.named_children()):
            linear = getattr(parent, name)
            if is_plain(linear, dtypes):
                yield from _pack(linear, tied.pop(id(linear.weight), [(parent, name)]))
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor:  # one mapped parameter keeps its whole file mapped
            parameter.data = parameter.data.clone()


def _pack(linear: nn.Linear, places: ModulePlaces) -> Iterator[Replaced]:
    """Replace a linear layer and embeddings tied to it by packed ones; if one cannot be packed, none is replaced."""
    packed = PackedLinear(linear.weight, linear.bias)
    again = cache(partial(_restore_linear, packed))
    replaced: list[tuple[nn.Module, str, nn.Module, Callable[[], nn.Module]]] = []
    for parent, name in places:
        module = getattr(parent, name)
        if module is linear:
            replaced.append((parent, name, packed, again))
        elif (reader := pack_embedding(module, packed.packed)) is not None:
            replaced.append((parent, name, reader, partial(_restore_tied, module, again)))
        else:
            return
    for parent, name, layer, undo in replaced:
        module = getattr(parent, name)
        setattr(parent, name, layer)
        if module is not linear:
            module.weight = None
        yield Replaced(parent, name, undo)


def _restore_linear(layer: Any) -> nn.Linear:
    weight, bias = layer.unpacked()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _find_tied_modules(model: nn.Module) -> dict[int, ModulePlaces]:
    """Return the modules that share a weight with another module, grouped by the weight's ``id``."""
    places: dict[int, ModulePlaces] = {}
    for parent in parents(model):
        for name, child in parent.named_children():
            weight = child._parameters.get("weight")
            if weight is not None:
                places.setdefault(id(weight), []).append((parent, name))
    return {weight: found for weight, found in places.items() if len(found) > 1}


def _restore_tied(module: nn.Module, linear: Callable[[], nn.Linear]) -> nn.Module:
    module.weight = linear().weight
    return module


def packed_linears(model: nn.Module) -> list[PackedLinear]:
    """Return all packed linear layers of a model; layers that are computed as one group are listed as one layer."""
    found = [module.group.product if isinstance(module, PackedMember) else module for module in model.modules()]
    return list({id(layer): layer for layer in found if isinstance(layer, PackedLinear)}.values())


@torch.inference_mode()
def prepare_linears(model: nn.Module) -> None:
    """Generate oneDNN's machine code for matrix products of up to 64 rows, before requests need it.

    Only layers of fewer than 4 million weights are prepared. Generating the code takes 0.7 ms, which is less than a
    product with more weights takes.
    """
    layers = {layer.kind: layer for layer in packed_linears(model)}
    for num_rows in row_counts(_PREPARED_ROWS):
        for (size, num_outputs, _, dtype), packed in layers.items():
            if size * num_outputs < _LONG:
                packed(torch.zeros(1, num_rows, size, dtype=dtype))


@cache
def packable_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes of weights that oneDNN can pack on this CPU; empty without oneDNN.

    bfloat16 needs AVX-512, or AVX2 with conversion instructions.
    """
    return tuple(dtype for dtype in (torch.float32, torch.bfloat16) if _can_pack(dtype))


def _can_pack(dtype: torch.dtype) -> bool:
    try:
        pack_weight(torch.zeros(16, 16, dtype=dtype))
    except (AttributeError, RuntimeError):  # the operator does not exist, or not for this dtype
        return False
    return True
