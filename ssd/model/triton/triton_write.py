"""A Triton kernel that writes the new keys and values of all rows to their KV cache slots in one launch.

Import this module only if triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_HEADS = 8


def write_by_triton(
    keys: torch.Tensor,
    values: torch.Tensor,
    stored_keys: torch.Tensor,
    stored_values: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Write new keys and values, [B, heads, T, dim], to the positions ``places``, int64[B, T], of KV cache slots."""
    batch, heads, width, dim = keys.shape
    value_dim = values.shape[3]
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        _write[(batch * width, triton.cdiv(heads, _BLOCK_HEADS))](
            keys,
            values,
            stored_keys,
            stored_values,
            slots,
            places.contiguous(),
            width,
            *keys.stride()[:3],
            *values.stride()[:3],
            *stored_keys.stride()[:3],
            *stored_values.stride()[:3],
            HEADS=heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            BLOCK_HEADS=_BLOCK_HEADS,
            BLOCK_DIM=triton.next_power_of_2(dim),
            BLOCK_VALUE=triton.next_power_of_2(value_dim),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots", "places"])
def _write(  # type: ignore[no-untyped-def]
    keys,
    values,
    stored_keys,
    stored_values,
    slots,
    places,
    width,
    key_row,
    key_head,
    key_position,
    value_row,
    value_head,
    value_position,
    stored_key_slot,
    stored_key_head,
    stored_key_place,
    stored_value_slot,
    stored_value_head,
    stored_value_place,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Write keys and values of some heads of one position to the KV cache. The grid is (B * T, blocks of heads)."""
    position = tl.program_id(0).to(tl.int64)
    row, at = position // width, position % width
    slot, place = tl.load(slots + row), tl.load(places + position)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    dims, value_dims = tl.arange(0, BLOCK_DIM)[None, :], tl.arange(0, BLOCK_VALUE)[None, :]
    inside = (head < HEADS) & (dims < DIM)
    some = tl.load(keys + row * key_row + head * key_head + at * key_position + dims, mask=inside, other=0.0)
    tl.store(
        stored_keys + slot * stored_key_slot + head * stored_key_head + place * stored_key_place + dims,
        some,
        mask=inside,
    )
    inside = (head < HEADS) & (value_dims < VALUE_DIM)
    some = tl.load(
        values + row * value_row + head * value_head + at * value_position + value_dims, mask=inside, other=0.0
    )
    tl.store(
        stored_values + slot * stored_value_slot + head * stored_value_head + place * stored_value_place + value_dims,
        some,
        mask=inside,
    )
