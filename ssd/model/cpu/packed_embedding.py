"""Embeddings on a CPU that read their rows from the output layer's packed weights, if the model ties both weights.

oneDNN does not document its packed weight layout. So the layout is found by packing a small matrix of known numbers,
and checked by reading every row of the packed weights and comparing the row with the original weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ssd.model.layers.replace import has_hooks

# The layout of a packed matrix repeats after this number of rows, a multiple of all row block sizes of oneDNN.
_PERIOD = 192
# The digits of an index of the small matrix, and the bits of a digit, which is exact in bfloat16.
_DIGITS, _DIGIT_BITS = 4, 7
_ROWS_COMPARED = 1024  # the number of rows that are compared at a time, to limit memory


class PackedLayout(NamedTuple):
    """The memory layout of a weight matrix packed by oneDNN: element [r, c] is at index ``rows[r] + columns[c]``."""

    rows: torch.Tensor
    columns: torch.Tensor


class PackedEmbedding(nn.Module):
    """An embedding that reads rows of a weight in oneDNN's packed layout; bit-identical to the original embedding.

    So an embedding that is tied to the output layer needs no weight of its own. Rows are multiplied by ``factor``, a
    tensor of one number, or not at all if ``factor`` is None.
    """

    def __init__(
        self, packed: torch.Tensor, order: PackedLayout, dtype: torch.dtype, factor: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.packed, self._order, self._factor = packed, order, factor
        self._numbers = packed_numbers(packed, dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = read_rows(self._numbers, self._order, ids)
        return found if self._factor is None else found * self._factor

    __call__ = forward  # without torch's search for hooks

    def repack(self, packed: torch.Tensor) -> None:
        """Replace the packed weight by another one of the same shape and dtype, which therefore has the same layout."""
        self.packed, self._numbers = packed, packed_numbers(packed, self._numbers.dtype)


def packed_numbers(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory of a weight packed by oneDNN as a flat tensor, which is valid only while ``packed`` exists."""
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def read_rows(numbers: torch.Tensor, order: PackedLayout, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows ``ids`` of a matrix packed by oneDNN; raises IndexError if a row does not exist."""
    starts = order.rows.index_select(0, ids.reshape(-1).long())
    return numbers.take(starts[:, None] + order.columns).view(*ids.shape, len(order.columns))


def find_layout(packed: torch.Tensor, weight: torch.Tensor) -> PackedLayout | None:
    """Return the memory layout of a weight packed by oneDNN; None if `PackedLayout` cannot describe it. O(size)."""
    num_rows, num_columns = weight.shape
    places = _packed_indices(min(num_rows, 2 * _PERIOD), num_columns, weight.dtype)
    if places is None:
        return None
    index = torch.arange(num_rows)
    rows = places[index % _PERIOD, 0]
    if num_rows > _PERIOD:
        rows += index // _PERIOD * (places[_PERIOD, 0] - places[0, 0])
    order, numbers = PackedLayout(rows, places[0] - places[0, 0]), packed_numbers(packed, weight.dtype)
    if int(order.rows.max() + order.columns.max()) >= len(numbers):
        return None
    parts = zip(torch.split(index, _ROWS_COMPARED), torch.split(weight, _ROWS_COMPARED), strict=True)
    return order if all(torch.equal(read_rows(numbers, order, ids), part) for ids, part in parts) else None


def pack_embedding(embedding: nn.Module, packed: torch.Tensor) -> PackedEmbedding | None:
    """Return an embedding that reads ``packed`` weights; None if it cannot reproduce the outputs of ``embedding``."""
    weight = getattr(embedding, "weight", None)
    if (
        not isinstance(embedding, nn.Embedding)
        or not isinstance(weight, nn.Parameter)
        or embedding.max_norm is not None
        or has_hooks(embedding)
    ):
        return None
    order = find_layout(packed, weight.detach())
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
    """Yield the factors by which a model may scale its embeddings: None (no scaling), then its ``embed_scale``."""
    yield None
    scale: Any = getattr(embedding, "embed_scale", None)
    if scale is not None:
        yield torch.as_tensor(scale).detach().to(dtype)


def _packed_indices(num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the memory index of each element of a matrix packed by oneDNN; None for 2^28 elements or more."""
    size = num_rows * num_columns
    if size >= 1 << _DIGITS * _DIGIT_BITS:
        return None
    numbers = torch.arange(1, size + 1).view(num_rows, num_columns)  # starts at 1, because blocks are padded with 0
    found = torch.zeros((), dtype=torch.int64)
    for shift in range(0, _DIGITS * _DIGIT_BITS, _DIGIT_BITS):
        digits = (numbers >> shift & (1 << _DIGIT_BITS) - 1).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(digits)
        found = found + (packed_numbers(packed, dtype).long() << shift)
    places = torch.empty(size, dtype=torch.int64)
    filled = found.nonzero()[:, 0]
    places[found[filled] - 1] = filled
    return places.view(num_rows, num_columns)
