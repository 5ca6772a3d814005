"""Linear layers on a device whose rows have the same bits in any pass: a Triton kernel.

Libraries choose tiles, and splits of the sum, by the number of rows. Here a layer has one of each, and a decode pass
fills the tile that a prefill fills. Import this module only where triton is installed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import nn

from ssd.model.layers.replace import MOST_ERROR, Replaced, is_plain, swap_forward

BLOCK_ROWS = 64
"""A whole tile of Hopper's tensor cores: fewer rows would be summed by other instructions."""
NUM_STAGES, NUM_WARPS = 4, 4
_LARGE = 8192
"""Outputs from which wider tiles still give each processor some."""
_ALIGNED = 16


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``: x [..., in], weight [out, in], bias [out]. Returns [..., out].

    A row's sum is taken over blocks of inputs in their order, in float32, whatever other rows there are.
    """
    num_outputs, size = weight.shape
    assert x.shape[-1] == size and x.dtype == weight.dtype and weight.stride(1) == 1
    rows = x.reshape(-1, size)
    if not rows.is_contiguous() or rows.data_ptr() % _ALIGNED:  # what is not aligned would have a kernel of its own
        rows = rows.clone(memory_format=torch.contiguous_format)
    out = torch.empty(len(rows), num_outputs, dtype=x.dtype, device=x.device)
    block_outputs, block_inputs = blocks_of(num_outputs, x.dtype)
    if len(rows):
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _product[(triton.cdiv(len(rows), BLOCK_ROWS), triton.cdiv(num_outputs, block_outputs))](
                rows, weight, weight if bias is None else bias, out, len(rows), weight.stride(0),
                SIZE=size, NUM_OUTPUTS=num_outputs, HAS_BIAS=bias is not None,
                BLOCK_ROWS=BLOCK_ROWS, BLOCK_OUTPUTS=block_outputs, BLOCK_INPUTS=block_inputs,
                num_stages=NUM_STAGES, num_warps=NUM_WARPS,
            )  # fmt: skip
    return out.view(*x.shape[:-1], num_outputs)


def blocks_of(num_outputs: int, dtype: torch.dtype) -> tuple[int, int]:
    """Outputs and inputs of a tile; the number of rows has no say."""
    return 32 if num_outputs < _LARGE else 64, 32 if dtype == torch.float32 else 64


def exact_linears(model: nn.Module) -> Iterator[Replaced]:
    """Have plain linear layers compute by `linear`; what was replaced, as it goes. Weights stay where they are."""
    for module in model.modules():
        if is_plain(module, list(MOST_ERROR)) and getattr(module.forward, "__func__", None) is nn.Linear.forward:
            yield swap_forward(module, _forward)


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, module.weight, module.bias)


# A kernel compiled for one row only, or for whole tiles, might be another one.
@triton.jit(do_not_specialize=["num_rows"])
def _product(  # type: ignore[no-untyped-def]
    x, weight, bias, out, num_rows, weight_row,
    SIZE: tl.constexpr, NUM_OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """One tile of out, [num_rows, NUM_OUTPUTS] and contiguous. Grid (tiles of rows, tiles of outputs)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_row, is_output = row < num_rows, output < NUM_OUTPUTS
    x_at = x + row.to(tl.int64)[:, None] * SIZE
    weight_at = weight + output.to(tl.int64)[None, :] * weight_row
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for begin in range(0, SIZE, BLOCK_INPUTS):
        at = begin + inputs
        some = tl.load(x_at + at[None, :], mask=is_row[:, None] & (at < SIZE)[None, :], other=0.0)
        weights = tl.load(weight_at + at[:, None], mask=is_output[None, :] & (at < SIZE)[:, None], other=0.0)
        total = tl.dot(some, weights, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )
