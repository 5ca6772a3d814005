"""Triton kernels for gated activations, norms and rotary positions on a GPU, with one launch per operation.

Import this module only if triton is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from ssd.model.cpu.cpu_layers import fuse_norms
from ssd.model.layers.replace import MAX_ERROR, Replaced, agrees, has_plain_forward, swap_forward
from ssd.model.triton.triton_launch import early_launch_options, wait_for_previous_kernel

_BLOCK = 1024


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up``, the activation of a gated feed-forward layer, in one kernel launch.

    silu(gate) is rounded before the product, as in transformers. Both arguments may be slices of one tensor.
    """
    gate_rows, up_rows = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, size = gate_rows.shape
    with torch.cuda.device_of(gate):  # type: ignore[no-untyped-call]
        _gate[(rows, triton.cdiv(size, _BLOCK))](
            gate_rows,
            up_rows,
            out,
            gate_rows.stride(0),
            up_rows.stride(0),
            size,
            BLOCK=_BLOCK,
            **early_launch_options(gate.device),
        )
    return out


def fuse_gates_by_triton(model: nn.Module) -> Iterator[Replaced]:
    """Make gated feed-forward layers compute the product ``silu(gate_proj(x)) * up_proj(x)`` in one kernel launch.

    Yields for each feed-forward layer a `Replaced` record, which can restore it.
    """
    for module in model.modules():
        if _is_gated(module):
            yield swap_forward(module, _forward)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    down: torch.Tensor = module.down_proj(silu_times(module.gate_proj(x), module.up_proj(x)))
    return down


@torch.inference_mode()
def _is_gated(module: nn.Module) -> bool:
    """Return whether a module computes ``down_proj(silu(gate_proj(x)) * up_proj(x))``, checked on a test input."""
    weight = getattr(getattr(module, "gate_proj", None), "weight", None)
    if (
        not isinstance(weight, torch.Tensor)
        or weight.dim() != 2
        or weight.dtype not in MAX_ERROR
        or not all(callable(getattr(module, name, None)) for name in ("up_proj", "down_proj", "act_fn"))
        or not has_plain_forward(module)
    ):
        return False
    x = torch.randn(1, 3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    try:
        return agrees(_forward(module, x), module(x), MAX_ERROR[weight.dtype])
    except Exception:  # its layers are of another kind
        return False


@triton.jit
def _gate(  # type: ignore[no-untyped-def]
    gate, up, out, gate_row, up_row, size, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):
    """Compute ``silu(gate) * up`` for a block of one row, [rows, size]. The grid is (rows, blocks)."""
    wait_for_previous_kernel(IS_EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(gate + row * gate_row + at, mask=at < size, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + at, mask=at < size, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    opened = (given / (1.0 + tl.exp(-given))).to(kind).to(tl.float32)
    tl.store(out + row * size + at, (opened * factor).to(kind), mask=at < size)


class TritonNorm(nn.Module):
    """An RMS norm on a GPU: ``weight * x / sqrt(mean(x ** 2) + eps)`` (Zhang and Sennrich 2019, section 3).

    The norm is computed in float32 and rounded to the dtype of the input. ``offset`` is added to the weight, [n]: 1 in
    Gemma, whose checkpoints store the weight minus 1, and 0 in most models. If ``rounds_first``, the normalised input
    is also rounded before it is multiplied by the weight.
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, offset: float, rounds_first: bool) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self._offset, self._rounds_first, self._block = offset, rounds_first, triton.next_power_of_2(len(weight))
        self._ready: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is x:
            return ready[1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, out, None, out)
        return out

    def added(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """Return the residual sum ``x + more``, and compute the norm of the sum in the same kernel launch.

        If the returned tensor is the argument of the next call of `forward`, that call returns this norm without a
        launch.
        """
        assert x.shape == more.shape
        total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        self._launch(x, out, more, total)
        self._ready = total, out
        return total

    def _launch(self, x: torch.Tensor, out: torch.Tensor, more: torch.Tensor | None, total: torch.Tensor) -> None:
        rows, added = (
            rows if rows.stride(-1) == 1 else rows.contiguous()
            for rows in (each.reshape(-1, x.shape[-1]) for each in (x, x if more is None else more))
        )
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _normalise[(len(rows),)](
                rows,
                added,
                total,
                self.weight,
                out,
                rows.stride(0),
                added.stride(0),
                x.shape[-1],
                self.eps,
                self._offset,
                IS_SUM=more is not None,
                ROUNDS_FIRST=self._rounds_first,
                BLOCK=self._block,
                num_warps=min(8, max(1, self._block // 512)),
                **early_launch_options(x.device),
            )

    __call__ = forward  # without torch's search for hooks


def fuse_norms_by_triton(model: nn.Module) -> Iterator[Replaced]:
    """Replace each RMS norm of a model by a `TritonNorm` with the same outputs on test inputs, up to rounding.

    Yields for each norm a `Replaced` record, which can restore it.
    """
    return fuse_norms(
        model,
        lambda weight, eps: (
            TritonNorm(weight, eps, offset=offset, rounds_first=first)
            for offset in (0.0, 1.0)
            for first in (True, False)
        ),
    )


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    x,
    more,
    total,
    weight,
    out,
    row_stride,
    more_stride,
    size,
    eps,
    offset,
    IS_SUM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Compute the RMS norm of one row of x, [rows, size]; ``out`` is contiguous. The grid is (rows,).

    If IS_SUM, compute the norm of x + more instead, and write this sum to ``total``, a contiguous tensor.
    """
    wait_for_previous_kernel(IS_EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    given = tl.load(x + row * row_stride + at, mask=at < size, other=0.0).to(tl.float32)
    weights = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32) + offset
    kind = out.dtype.element_ty
    if IS_SUM:
        given += tl.load(more + row * more_stride + at, mask=at < size, other=0.0).to(tl.float32)
        given = given.to(kind).to(tl.float32)
        tl.store(total + row * size + at, given.to(kind), mask=at < size)
    found = given * tl.rsqrt(tl.sum(given * given, 0) / size + eps)
    if ROUNDS_FIRST:
        found = found.to(kind).to(tl.float32)
    tl.store(out + row * size + at, (found * weights).to(kind), mask=at < size)


BLOCK_HEADS = 8


def rotate_by_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rotary position embeddings to queries and keys in one Triton launch, and return both.

    Implements `cpu_layers.ApplyRotary`. The memory of both results is contiguous as [B, T, heads, dim].
    """
    (batch, query_heads, width, dim), key_heads = q.shape, k.shape[1]
    query_out, key_out = (
        torch.empty(batch, width, heads, dim, dtype=q.dtype, device=q.device) for heads in (query_heads, key_heads)
    )
    blocks = [triton.cdiv(heads, BLOCK_HEADS) for heads in (query_heads, key_heads)]
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        _rotate_both[(batch * width, sum(blocks))](
            q,
            k,
            cos,
            sin,
            query_out,
            key_out,
            width,
            *q.stride()[:3],
            *k.stride()[:3],
            QUERY_HEADS=query_heads,
            KEY_HEADS=key_heads,
            QUERY_BLOCKS=blocks[0],
            HALF=dim // 2,
            BLOCK_HEADS=BLOCK_HEADS,
            BLOCK_HALF=triton.next_power_of_2(dim // 2),
            num_warps=2,
            enable_fp_fusion=False,
        )
    return query_out.transpose(1, 2), key_out.transpose(1, 2)


@triton.jit
def _rotate_both(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    query_out,
    key_out,
    width,
    query_row,
    query_head,
    query_position,
    key_row,
    key_head,
    key_position,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Apply rotary embeddings to a block of heads of one token. The grid is (B * T, blocks of query and key heads)."""
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, at = place // width, place % width
    if block < QUERY_BLOCKS:
        rotate_heads(
            q + row * query_row + at * query_position,
            query_head,
            query_out + place * QUERY_HEADS * 2 * HALF,
            2 * HALF,
            cos + place * 2 * HALF,
            sin + place * 2 * HALF,
            block,
            QUERY_HEADS,
            HALF,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    else:
        rotate_heads(
            k + row * key_row + at * key_position,
            key_head,
            key_out + place * KEY_HEADS * 2 * HALF,
            2 * HALF,
            cos + place * 2 * HALF,
            sin + place * 2 * HALF,
            block - QUERY_BLOCKS,
            KEY_HEADS,
            HALF,
            BLOCK_HEADS,
            BLOCK_HALF,
        )


@triton.jit
def rotate_heads(  # type: ignore[no-untyped-def]
    x,
    x_head,
    out,
    out_head,
    cos,
    sin,
    block,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Apply rotary position embeddings to a block of heads of one token; ``cos`` and ``sin`` are [2 * HALF]."""
    head, pair = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    inside = (head < HEADS) & is_pair
    kind = out.dtype.element_ty
    low = tl.load(x + head * x_head + pair, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + head * x_head + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    low_cos = tl.load(cos + pair, mask=is_pair, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + pair, mask=is_pair, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
    turned_low = (low * low_cos).to(kind).to(tl.float32) - (high * low_sin).to(kind).to(tl.float32)
    turned_high = (high * high_cos).to(kind).to(tl.float32) + (low * high_sin).to(kind).to(tl.float32)
    tl.store(out + head * out_head + pair, turned_low.to(kind), mask=inside)
    tl.store(out + head * out_head + HALF + pair, turned_high.to(kind), mask=inside)
