"""Linear layers on a GPU: one product for layers that read the same input, by a Triton kernel if there are few rows.

Tensor cores sum a row's products sixteen at a time, in the order of its inputs, into a float32, whatever the tile size.
So tiles may be chosen by the number of rows, and a row's bits still depend only on the row. Libraries compute the same
bits unless they split a sum among processors, which they do for few rows.

A pass of few rows is limited by memory bandwidth, which is idle between two products. So a product prefetches the first
of its weights while it waits for the previous kernel. Import this module only if triton is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import nn

from ssd.model.layers.replace import MAX_ERROR, Joint, Replaced, is_plain, siblings, swap_forward
from ssd.model.triton.triton_launch import early_launch_options, wait_for_previous_kernel

log = logging.getLogger(__name__)

FEW_ROWS = 16
"""The maximum number of rows for which SSD's matrix product, which reads weights only once, is preferred to cuBLAS."""
_MAX_ROWS = 64  # the number of rows up to which the kernel replaces a library that would split sums
# The outputs up to which narrow tiles occupy a processor at most once, and from which wide tiles occupy all.
_SMALL, _LARGE = 4224, 8192
_ROOMY = 160 << 10
# The numbers of rows for which a library's bits are compared with the kernel's.
_TRIED = (65, 96, 128, 192, 256, 512, 1024, 2048)
_ALIGNED = 16
_PREFETCH_BYTES = 1024  # the bytes of each row of weights that are prefetched; more bytes were slower on an H100


class MatmulTiles(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    stages: int


def tiles_of(
    num_rows: int, num_outputs: int, dtype: torch.dtype, *, has_large_shared_memory: bool = True
) -> MatmulTiles:
    """Return the tile sizes of the matrix-product kernel that were fastest on an H200.

    Unless ``has_large_shared_memory``, only tiles that need less than 100 KB of shared memory are used.
    """
    if dtype == torch.float32:
        return MatmulTiles(64, 32, 32, 4)
    if num_rows <= FEW_ROWS:
        if num_outputs >= _LARGE:
            return MatmulTiles(16, 64, 128, 4)
        return MatmulTiles(16, 64, 256, 4) if has_large_shared_memory else MatmulTiles(16, 32, 256, 4)
    if num_outputs >= _LARGE:
        return MatmulTiles(64, 128, 64, 4)
    if not has_large_shared_memory:
        return MatmulTiles(64, 32, 128, 4)
    return MatmulTiles(64, 64, 128, 5) if num_outputs > _SMALL else MatmulTiles(64, 32, 256, 4)


@cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Return whether a GPU has the shared memory for larger tiles, as A100 and H100 have; True without a GPU."""
    if device.type != "cuda":
        return True
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(properties["max_shared_mem"]) > _ROOMY


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a linear layer, ``x @ weight.T + bias``, with a batch-invariant Triton kernel.

    The shapes are x [..., in], weight [out, in], bias [out] and the result [..., out]. Each row is summed in float32,
    in the order of its inputs, so its bits do not depend on the other rows.
    """
    num_outputs, size = weight.shape
    assert x.shape[-1] == size and x.dtype == weight.dtype and weight.stride(1) == 1
    rows = x.reshape(-1, size)
    if not rows.is_contiguous() or rows.data_ptr() % _ALIGNED:  # unaligned rows would need another kernel
        rows = rows.clone(memory_format=torch.contiguous_format)
    out = torch.empty(len(rows), num_outputs, dtype=x.dtype, device=x.device)
    tiles = tiles_of(len(rows), num_outputs, x.dtype, has_large_shared_memory=_has_large_shared_memory(x.device))
    if len(rows):
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _product[(triton.cdiv(len(rows), tiles.rows), triton.cdiv(num_outputs, tiles.outputs))](
                rows,
                weight,
                weight if bias is None else bias,
                out,
                len(rows),
                weight.stride(0),
                SIZE=size,
                NUM_OUTPUTS=num_outputs,
                HAS_BIAS=bias is not None,
                IS_TRANSPOSED=tiles.outputs >= 64,
                BLOCK_ROWS=tiles.rows,
                BLOCK_OUTPUTS=tiles.outputs,
                BLOCK_INPUTS=tiles.inputs,
                PREFETCH_BYTES=prefetched_bytes(weight, tiles),
                num_stages=tiles.stages,
                num_warps=4,
                **early_launch_options(x.device),
            )
    return out.view(*x.shape[:-1], num_outputs)


def prefetched_bytes(weight: torch.Tensor, tiles: MatmulTiles) -> int:
    """Return the number of bytes of weights that each thread prefetches, 0 if weight rows are short or unaligned."""
    row_bytes, num_bytes = weight.stride(0) * weight.element_size(), _PREFETCH_BYTES * tiles.outputs // _THREADS.value
    is_aligned = not (weight.data_ptr() % _ALIGNED or row_bytes % _ALIGNED or _THREADS.value % tiles.outputs)
    return num_bytes if is_aligned and weight.shape[1] * weight.element_size() >= _PREFETCH_BYTES else 0


class Product(Joint):
    """A linear layer on a GPU, or several linear layers with the same input that are computed as one matrix product."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        self._linears = linears
        self.is_exact = self._is_library_exact = False
        self._joined: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if len(linears) > 1:
            names = ("weight",) if linears[0].bias is None else ("weight", "bias")
            joined = [torch.cat([getattr(each, name).detach() for each in linears]) for name in names]
            for name, whole in zip(names, joined, strict=True):
                for each, part in zip(linears, torch.split_with_sizes(whole, self.sizes), strict=True):
                    getattr(each, name).data = part
            self._joined = joined[0], joined[1] if len(joined) > 1 else None

    @property
    def _weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._joined or (self._linears[0].weight, self._linears[0].bias)

    def be_exact(self, wanted: bool) -> None:
        """Switch batch invariance on or off. If it is on, the bits of a row do not depend on the other rows."""
        self.is_exact = wanted
        if wanted:
            self._is_library_exact = _is_library_exact(*self._weights)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weights
        num_rows = x.numel() // max(1, x.shape[-1])
        if self.is_exact:
            if num_rows <= _MAX_ROWS or not self._is_library_exact:
                return linear(x, weight, bias)
        elif num_rows <= FEW_ROWS and x.dtype != torch.float32:
            return linear(x, weight, bias)
        return nn.functional.linear(x, weight, bias)


# The results of `_is_library_exact` in this process, by kind of product.
_library_is_exact: dict[tuple[Any, ...], bool] = {}


@torch.inference_mode()
def _is_library_exact(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether cuBLASLt, within `without_split_sums`, gives large batches the same bits as SSD's kernel does."""
    kind = *weight.shape, weight.dtype, weight.device, bias is None
    if kind not in _library_is_exact:
        _library_is_exact[kind] = weight.dtype != torch.float32 and _agree(weight, bias)
    return _library_is_exact[kind]


def _agree(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    x = torch.randn(_TRIED[-1], weight.shape[1], dtype=weight.dtype, device=weight.device)
    wanted = linear(x, weight, bias)
    try:
        with without_split_sums():
            return all(torch.equal(nn.functional.linear(x[:rows], weight, bias), wanted[:rows]) for rows in _TRIED)
    except Exception as failure:  # a library that always splits sums, or has no such setting
        log.debug("a library's products are not exact: %s", failure)
        return False


@contextmanager
def without_split_sums() -> Iterator[None]:
    """Prevent matrix products in this context from splitting sums among processors and from rounding partial sums.

    A row's bits then do not depend on the number of rows. Only cuBLASLt supports this, so torch uses cuBLASLt in the
    context. The settings affect the whole process, and are restored when the context ends.
    """
    cuda: Any = torch.backends.cuda
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = [(getattr(cuda.matmul, name), getattr(cuda.matmul, f"{name}_split_k")) for name in names]
    library = cuda.preferred_blas_library()
    try:
        cuda.preferred_blas_library("cublaslt")
        for name in names:
            setattr(cuda.matmul, name, (False, False))
        yield
    finally:
        for name, each in zip(names, before, strict=True):
            setattr(cuda.matmul, name, each)
        cuda.preferred_blas_library(library)


def own_linears(model: nn.Module) -> Iterator[Replaced]:
    """Replace the ``forward`` of plain linear layers by a `Product`, SSD's matrix product.

    Layers with the same input share one `Product`. Yields for each layer a `Replaced` record, which can restore it.
    """
    for _parent, linears in siblings(model, _is_replaceable):
        yield from _replace_by_product(list(linears.values()))
    for module in model.modules():
        if _is_replaceable(module):
            yield from _replace_by_product([module])


def products_of(model: nn.Module) -> list[Product]:
    found = {id(each): each for module in model.modules() if isinstance(each := vars(module).get("product"), Product)}
    return list(found.values())


def _replace_by_product(linears: Sequence[Any]) -> Iterator[Replaced]:
    product = Product(linears)
    for member, module in enumerate(linears):
        module.product, module.member = product, member
        yield swap_forward(module, _forward)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.product.output(x, module.member)
    return found


def _is_replaceable(module: Any) -> TypeGuard[nn.Linear]:
    return is_plain(module, list(MAX_ERROR)) and getattr(module.forward, "__func__", None) is nn.Linear.forward


_THREADS: Final = tl.constexpr(128)
# Prefetches a number of bytes at an address if the last operand is above 0, without waiting.
_ASK: Final = tl.constexpr(
    "{ .reg .pred p; setp.gt.s32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)


# A kernel that is specialised for one row, or for complete tiles, might compute other bits.
@triton.jit(do_not_specialize=["num_rows"])
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    num_rows,
    weight_row,
    SIZE: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PREFETCH_BYTES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Compute one tile of a matrix product's result ``out``, [num_rows, NUM_OUTPUTS] and contiguous.

    Tensor cores compute 64 rows at a time. If IS_TRANSPOSED, the transposed product is computed, whose rows are the
    tile's outputs. PREFETCH_BYTES is the number of bytes that each thread prefetches. The grid is (tiles of rows, tiles
    of outputs).
    """
    if IS_EARLY and PREFETCH_BYTES > 0:
        thread = tl.arange(0, _THREADS)
        wanted = tl.program_id(1) * BLOCK_OUTPUTS + thread % BLOCK_OUTPUTS
        first = (weight + wanted.to(tl.int64) * weight_row).to(tl.int64)
        tl.inline_asm_elementwise(
            _ASK,
            "=r,l,r,r",
            [first + thread // BLOCK_OUTPUTS * PREFETCH_BYTES, thread * 0 + PREFETCH_BYTES, NUM_OUTPUTS - wanted],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    wait_for_previous_kernel(IS_EARLY)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_row, is_output = row < num_rows, output < NUM_OUTPUTS
    x_at = x + row.to(tl.int64)[:, None] * SIZE
    weight_at = weight + output.to(tl.int64)[None, :] * weight_row
    if IS_TRANSPOSED:
        total = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    else:
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for begin in range(0, SIZE, BLOCK_INPUTS):
        at = begin + inputs
        some = tl.load(x_at + at[None, :], mask=is_row[:, None] & (at < SIZE)[None, :], other=0.0)
        weights = tl.load(weight_at + at[:, None], mask=is_output[None, :] & (at < SIZE)[:, None], other=0.0)
        if IS_TRANSPOSED:
            total = tl.dot(tl.trans(weights), tl.trans(some), total, input_precision="ieee")
        else:
            total = tl.dot(some, weights, total, input_precision="ieee")
    if IS_TRANSPOSED:
        total = tl.trans(total)
    if HAS_BIAS:
        # Subtracted, because in some tiles the compiler might start the sum of a product of few inputs with the bias.
        total -= -tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :],
        total.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )
