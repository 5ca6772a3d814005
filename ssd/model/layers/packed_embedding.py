"""Embeddings on a CPU that read the rows of an output layer's packed weights, where a model ties the two.

oneDNN does not say how it lays weights out: a small matrix of known numbers is packed and looked at, and what is read
by the order found there is compared with every weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ssd.model.layers.replace import has_hooks

_PERIOD = 192
"""Rows after which the order of a packed matrix comes again: a multiple of all numbers of rows that oneDNN blocks."""
_DIGITS, _DIGIT_BITS = 4, 7
"""A number of the small matrix is packed as so many digits, each exact in bfloat16."""
_ROWS_COMPARED = 1024
"""At once, so that comparing takes little memory."""


class Order(NamedTuple):
    """Where the numbers of a packed matrix lie: [r, c] at ``rows[r] + columns[c]``, both int64 in numbers."""

    rows: torch.Tensor
    columns: torch.Tensor


class PackedEmbedding(nn.Module):
    """``weight[ids] * factor`` from packed weights, bit for bit."""

    def __init__(self, packed: torch.Tensor, order: Order, dtype: torch.dtype, factor: torch.Tensor | None) -> None:
        """``packed`` : as oneDNN packed a weight of ``dtype``. ``factor`` : of one number."""
        super().__init__()
        self.packed, self._order, self._factor = packed, order, factor
        self._numbers = packed_numbers(packed, dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids : integers of any shape. Returns [..., size]. Raises IndexError where an id has no row."""
        found = read_rows(self._numbers, self._order, ids)
        return found if self._factor is None else found * self._factor

    __call__ = forward  # without torch's search for hooks

    def hold(self, packed: torch.Tensor) -> None:
        """Read another weight from now on, of the same shape and type: so it lies in the same order."""
        self.packed, self._numbers = packed, packed_numbers(packed, self._numbers.dtype)


def packed_numbers(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a packed weight as one row of numbers: a view, valid while ``packed`` is."""
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def read_rows(numbers: torch.Tensor, order: Order, ids: torch.Tensor) -> torch.Tensor:
    """The rows ``ids`` of a packed matrix. Raises IndexError where there is no such row."""
    starts = order.rows.index_select(0, ids.reshape(-1).long())
    return numbers.take(starts[:, None] + order.columns).view(*ids.shape, len(order.columns))


def find_order(packed: torch.Tensor, weight: torch.Tensor) -> Order | None:
    """The order of ``packed``, made of ``weight``, [out, in]; None where it follows no simple rule. O(size)."""
    num_rows, num_columns = weight.shape
    places = _places(min(num_rows, 2 * _PERIOD), num_columns, weight.dtype)
    if places is None:
        return None
    index = torch.arange(num_rows)
    rows = places[index % _PERIOD, 0]
    if num_rows > _PERIOD:
        rows += index // _PERIOD * (places[_PERIOD, 0] - places[0, 0])
    order, numbers = Order(rows, places[0] - places[0, 0]), packed_numbers(packed, weight.dtype)
    if int(order.rows.max() + order.columns.max()) >= len(numbers):
        return None
    parts = zip(torch.split(index, _ROWS_COMPARED), torch.split(weight, _ROWS_COMPARED), strict=True)
    return order if all(torch.equal(read_rows(numbers, order, ids), part) for ids, part in parts) else None


def reader_of(embedding: nn.Module, packed: torch.Tensor) -> PackedEmbedding | None:
    """What does the work of ``embedding`` from its packed weight; None where it does more than look rows up."""
    weight = getattr(embedding, "weight", None)
    if (
        not isinstance(embedding, nn.Embedding)
        or not isinstance(weight, nn.Parameter)
        or embedding.max_norm is not None
        or has_hooks(embedding)
    ):
        return None
    order = find_order(packed, weight.detach())
    if order is None:
        return None
    ids = torch.linspace(0, len(weight) - 1, 7).long()
    wanted = embedding(ids)
    for factor in _factors(embedding, weight.dtype):
        reader = PackedEmbedding(packed, order, weight.dtype, factor)
        if torch.equal(reader(ids), wanted):
            return reader
    return None


def _factors(embedding: nn.Module, dtype: torch.dtype) -> Iterator[torch.Tensor | None]:
    """What rows may be multiplied by; some models scale them, under this name."""
    yield None
    scale: Any = getattr(embedding, "embed_scale", None)
    if scale is not None:
        yield torch.as_tensor(scale).detach().to(dtype)


def _places(num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Where oneDNN puts each number of a matrix of this shape, int64[num_rows, num_columns]; None of too many."""
    size = num_rows * num_columns
    if size >= 1 << _DIGITS * _DIGIT_BITS:
        return None
    numbers = torch.arange(1, size + 1).view(num_rows, num_columns)  # what is added to fill a block is 0
    found = torch.zeros((), dtype=torch.int64)
    for shift in range(0, _DIGITS * _DIGIT_BITS, _DIGIT_BITS):
        digits = (numbers >> shift & (1 << _DIGIT_BITS) - 1).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(digits)
        found = found + (packed_numbers(packed, dtype).long() << shift)
    places = torch.empty(size, dtype=torch.int64)
    filled = found.nonzero()[:, 0]
    places[found[filled] - 1] = filled
    return places.view(num_rows, num_columns)
