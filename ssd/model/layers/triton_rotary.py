"""Rotary position embedding of queries and keys on a device in one launch: a Triton kernel.

Import this module only where triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssd.model.layers.fused_rotary import Rotary

_BLOCK_HEADS = 8


class TritonRotary:
    """Turns each pair of numbers ``dim / 2`` apart by its angle (Su et al. 2021, section 3.4.2).

    Rounded where the library rounds: both products, and their sum.
    """

    def __init__(self, plain: Rotary) -> None:
        """``plain`` : the library's function, for whatever is not the usual case."""
        self.plain = plain

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k : [B, heads, T, dim]; cos, sin : [B, T, dim]. Returns both turned, contiguous as [B, T, heads, dim]."""
        if args or kwargs or not (_fits(q, cos, sin) and _fits(k, cos, sin)):
            return self.plain(q, k, cos, sin, *args, **kwargs)
        (batch, query_heads, width, dim), key_heads = q.shape, k.shape[1]
        query_out, key_out = (
            torch.empty(batch, width, heads, dim, dtype=q.dtype, device=q.device) for heads in (query_heads, key_heads)
        )
        blocks = [triton.cdiv(heads, _BLOCK_HEADS) for heads in (query_heads, key_heads)]
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            _turn_both[(batch * width, sum(blocks))](
                q, k, cos, sin, query_out, key_out, width, *q.stride()[:3], *k.stride()[:3],
                QUERY_HEADS=query_heads, KEY_HEADS=key_heads, QUERY_BLOCKS=blocks[0], HALF=dim // 2,
                BLOCK_HEADS=_BLOCK_HEADS, BLOCK_HALF=triton.next_power_of_2(dim // 2),
                num_warps=2, enable_fp_fusion=False,
            )  # fmt: skip
        return query_out.transpose(1, 2), key_out.transpose(1, 2)


def _fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        x.dtype == cos.dtype == sin.dtype
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.dim() == 4
        and cos.shape == sin.shape == (x.shape[0], x.shape[2], x.shape[3])
        and x.shape[3] % 2 == 0
        and x.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


@triton.jit
def _turn_both(  # type: ignore[no-untyped-def]
    q, k, cos, sin, query_out, key_out, width, query_row, query_head, query_position, key_row, key_head, key_position,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, QUERY_BLOCKS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one position, of queries or of keys. Grid (B * T, blocks of query heads + blocks of key heads)."""
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, at = place // width, place % width
    if block < QUERY_BLOCKS:
        _turn(
            q + row * query_row + at * query_position, query_head, query_out + place * QUERY_HEADS * 2 * HALF,
            cos + place * 2 * HALF, sin + place * 2 * HALF, block, QUERY_HEADS, HALF, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip
    else:
        _turn(
            k + row * key_row + at * key_position, key_head, key_out + place * KEY_HEADS * 2 * HALF,
            cos + place * 2 * HALF, sin + place * 2 * HALF, block - QUERY_BLOCKS, KEY_HEADS, HALF, BLOCK_HEADS,
            BLOCK_HALF,
        )  # fmt: skip


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, x_head, out, cos, sin, block,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """The heads of one block at one position: x [HEADS, 2 * HALF] by cos and sin, [2 * HALF], to out."""
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
    tl.store(out + head * 2 * HALF + pair, turned_low.to(kind), mask=inside)
    tl.store(out + head * 2 * HALF + HALF + pair, turned_high.to(kind), mask=inside)
