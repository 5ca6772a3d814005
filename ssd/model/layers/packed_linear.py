"""Linear layers on a CPU, with their weights laid out as oneDNN's kernels read them.

torch computes a linear layer from weights as they lie in the checkpoint. For one to some dozens of rows, which is what
a decode or verify pass has, the same product from weights in blocks takes half the time. torch's
own compiler uses the same two operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from ssd.model.layers.fused_linear import FusedMember, fuse_linears, is_plain, linear_again
from ssd.model.layers.packed_embedding import reader_of
from ssd.model.layers.replace import Replaced, parents

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
        self.hold(packed_weight(weight), bias)

    def hold(self, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The same with what `packed_weight` made."""
        self.packed = packed
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight, [out, in], as oneDNN's kernels read it; the order follows from its shape and type. O(size)."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def pack_linears(model: nn.Module) -> Iterator[Replaced]:
    """Put packed layers in the place of plain ones, one for those that read the same input; what was replaced.

    Weights are held once: those of a layer go when it is packed, and an embedding that is tied to it reads rows of what
    was packed, see `PackedEmbedding`; where it cannot, both stay. O(weights), and memory for one layer more.
    """
    if not has_operators():
        return
    dtypes = packed_types()
    yield from fuse_linears(model, PackedLinear, dtypes)
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
    again = cache(partial(linear_again, packed))
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


Product = Callable[[torch.Tensor], torch.Tensor]
"""Of rows [n, in], n >= 1, a tensor [n, out]."""

EXACT_ROWS: Final = 16
_FEW: Final = (1, 2, 3, 4, 8, 12, EXACT_ROWS)
"""Least rows of one product: MKL gives two threads of an EPYC parts of 5 rows that are computed in another order."""
_MOST: Final = (512, 256, 64, 32, 16)
"""Most rows, tried in this order."""
_MOST_WORK = 1 << 35
"""Weights of a layer times rows that are tried and then computed at once; 64 are always tried."""
_LARGE = 1 << 21
"""Weights of a layer whose products take long enough to be timed."""
_ROUNDS = 5
_WORTH = 0.9
"""Of the time that the fewest rows take, what more rows may take: two rows of some layers take less than one."""
_SOME = 16
"""Different rows that are tried, at least."""
_NUMBERS = 256
_ROUNDED_NUMBERS = 1 << 16
"""Results that are compared for each number of rows, at least: two of two may be equal by chance. Sums in another order
differ in every other float32, and in one of some thousands once they are rounded to a shorter type.
"""


class RowPlan(NamedTuple):
    """``least``, ``most`` : rows of one product. ``is_exact`` : whether all these numbers gave the same bits.
    ``is_free`` : one row did, too, so that the plan takes no time.
    """

    least: int = 1
    most: int = _MOST[0]
    is_exact: bool = True
    is_free: bool = True

    def product(self, compute: Product, x: torch.Tensor) -> torch.Tensor:
        """``compute`` of rows [n, in], in parts of allowed numbers of rows: [n, out]."""
        count = len(x)
        if count <= self.most:
            wanted = max(self.least, rounded_rows(count))
            return compute(x) if wanted == count else compute(pad(x, (0, 0, 0, wanted - count)))[:count]
        return torch.cat([self.product(compute, part) for part in torch.split(x, self.most)])


PLAIN: Final = RowPlan(1, 1 << 30, is_exact=False)
"""What is computed at once is what is asked for."""


def rounded_rows(num_rows: int) -> int:
    """How many rows are computed: up to 16 as many, above one of eight numbers between a power of two and the next.

    oneDNN makes machine code for each number of rows, which takes longer than a pass of a small model, and keeps that
    of the last thousand products. So there are few numbers; the rows added are an eighth at most.
    """
    if num_rows <= EXACT_ROWS:
        return num_rows
    step = 1 << ((num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


def row_counts(most: int) -> list[int]:
    """All numbers of rows that products of up to ``most`` have."""
    return sorted({rounded_rows(count) for count in range(1, most + 1)})


@torch.inference_mode()
def find_rows(compute: Product, size: int, num_outputs: int, dtype: torch.dtype) -> RowPlan:
    """The plan of a layer [num_outputs, size]: the most rows that can be, and the least that take the least time.

    O(products of 6,000 rows in all), fewer for layers of more than 64 million weights.
    """
    numbers = _NUMBERS if dtype == torch.float32 else _ROUNDED_NUMBERS
    num_rows = -(-numbers // (num_outputs * _SOME)) * _SOME
    some = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = torch.cat([compute(part) for part in torch.split(some, _SOME)])
    allowed = [most for most in _MOST if most <= 64 or most * size * num_outputs <= _MOST_WORK]
    good = {count for count in row_counts(allowed[0]) if _is_same(compute, some, count, wanted, numbers)}
    for most in allowed:
        if good.issuperset(count for count in row_counts(most) if count >= _FEW[-1]):
            few = [count for count in _FEW if good.issuperset(range(count, _FEW[-1]))]
            least = few[0]
            if size * num_outputs >= _LARGE:
                seconds = {count: seconds_of(compute, some[:count]) for count in few[:4]}
                best = min(seconds, key=seconds.__getitem__)
                least = best if seconds[best] < _WORTH * seconds[least] else least
            return RowPlan(least, most, is_free=few[0] == 1)
    return RowPlan(1, allowed[0], is_exact=False)


def _is_same(compute: Product, some: torch.Tensor, count: int, wanted: torch.Tensor, numbers: int) -> bool:
    """Whether ``count`` rows, of ``some`` or these again and again, give each time and place what was ``wanted``."""
    again = -(-count // len(some))
    rows, results = some.repeat(again, 1), wanted.repeat(again, 1)
    tried = min(-(-numbers // wanted.shape[1]), len(rows) - count + 1)
    return all(
        torch.equal(compute(rows[first : first + count]), results[first : first + count])
        for first in range(0, tried, count)
    )


def seconds_of(compute: Product, x: torch.Tensor) -> float:
    """The least time of some products of ``x``."""
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        compute(x)
        found.append(time.perf_counter() - began)
    return min(found)
