"""Triton kernels for attention of a few new positions over the slot KV cache, in place.

Keys are split among programs (flash-decoding, Dao et al. 2023), each with a running softmax (Milakov and Gimelshein
2018); a second kernel combines the splits' results by their log-sum-exps. The programs of a row read only its own keys,
so one launch, and one captured graph, serves all lengths. The query heads that share a key head form one tile. Import
this module only if triton is installed, which comes with CUDA builds of torch.

`exact_triton_attention` is batch-invariant for draft chains: tiles of queries have one size, splits and blocks of keys
start at fixed positions, and masked keys add exactly nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from ssd.model.triton.triton_launch import early_launch_options, wait_for_previous_kernel

if TYPE_CHECKING:
    from ssd.model.kv.kv_cache import AttentionRules, SlotRows

_MAX_SPLITS = 32
_BLOCKS_PER_PROCESSOR = 2
_EXACT_QUERIES = 16
_FEWEST_SPLIT_KEYS = 64
# The maximum number of values in the splits' results of one exact launch, 64 MiB; wider passes are launched in parts.
_MAX_PARTIAL = 1 << 24
NUM_STAGES = 2
"""The number of blocks of keys in the software pipeline of a Triton program, including the block being computed."""


def triton_attention(
    query: torch.Tensor, stored_keys: torch.Tensor, stored_values: torch.Tensor, rows: SlotRows, rules: AttentionRules
) -> torch.Tensor:
    """Compute attention over the KV cache on a GPU with Triton kernels, without a mask and without copying the cache.

    Implements `AttentionKernel` for float32, bfloat16 and float16, with float32 sums. The result equals that of torch's
    attention up to rounding. O(visible keys) per row, because keys that a sliding window or chunk hides are not read.
    """
    batch, heads, width, dim = query.shape
    kv_heads, value_dim = stored_keys.shape[1], stored_values.shape[3]
    groups = heads // kv_heads
    tiles = tiles_of(query.dtype, dim, value_dim, groups * width, is_tree=rows.tree_mask is not None)
    num_tiles = triton.cdiv(groups * width, tiles.queries)
    most_keys = min(
        rows.num_keys, *(limit + width for limit in (rules.window, rules.chunk) if limit is not None), 1 << 31
    )
    most_splits = min(triton.cdiv(most_keys, tiles.keys), _MAX_SPLITS)
    splits = num_splits(query.device, batch * kv_heads * num_tiles, most_splits)
    return _launch(query, stored_keys, stored_values, rows, rules, tiles, splits=splits, all_splits=splits)


def exact_triton_attention(
    query: torch.Tensor, stored_keys: torch.Tensor, stored_values: torch.Tensor, rows: SlotRows, rules: AttentionRules
) -> torch.Tensor:
    """Compute attention like `triton_attention`, but batch-invariant, except for draft trees.

    The bits of a result depend only on the row's own text and on the maximum length of slots. In a draft tree, the keys
    of a node's path are not adjacent, so the results equal those of a draft chain only up to rounding.
    """
    heads, width, dim = query.shape[1:]
    value_dim, length = stored_values.shape[3], stored_keys.shape[2]
    split_keys = split_keys_of(length)
    splits = triton.cdiv(min(rows.num_keys, length), split_keys)
    tiles = tiles_of(query.dtype, dim, value_dim, _EXACT_QUERIES, is_tree=rows.tree_mask is not None)
    all_splits = triton.next_power_of_2(triton.cdiv(length, split_keys))
    most = max(1, _MAX_PARTIAL // (len(query) * heads * splits * value_dim))
    if all_splits == 1 or rows.tree_mask is not None:
        most = width
    found = [
        _launch(
            query[:, :, first : first + most],
            stored_keys,
            stored_values,
            rows if width <= most else _part(rows, first, most),
            rules,
            tiles,
            splits=splits,
            all_splits=all_splits,
            split_keys=split_keys,
        )
        for first in range(0, width, most)
    ]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def split_keys_of(length: int) -> int:
    """Return the number of keys per Triton program in batch-invariant attention over slots of ``length`` positions."""
    return max(_FEWEST_SPLIT_KEYS, int(triton.next_power_of_2(triton.cdiv(length, _MAX_SPLITS))))


def _part(rows: SlotRows, first: int, most: int) -> SlotRows:
    return replace(rows, starts=rows.starts + first, positions=rows.positions[:, first : first + most].contiguous())


def _launch(
    query: torch.Tensor,
    stored_keys: torch.Tensor,
    stored_values: torch.Tensor,
    rows: SlotRows,
    rules: AttentionRules,
    tiles: AttentionTiles,
    *,
    splits: int,
    all_splits: int,
    split_keys: int = 0,
) -> torch.Tensor:
    """Launch the attention kernel and, if there are several splits of the keys or sinks, the kernel that combines them.

    A split is the part of the keys that one program processes: ``split_keys`` keys, or an equal share if this is 0.
    ``splits`` is the number of splits that are computed, and ``all_splits``, a power of two, the number with empty
    splits.
    """
    batch, heads, width, dim = query.shape
    kv_heads, value_dim = stored_keys.shape[1], stored_values.shape[3]
    groups = heads // kv_heads
    query = query if query.stride(-1) == 1 else query.contiguous()
    num_tiles = triton.cdiv(groups * width, tiles.queries)
    scale, window, chunk, softcap, sinks = rules
    out = torch.empty(batch, width, heads, value_dim, dtype=query.dtype, device=query.device)
    is_whole = all_splits == 1 and sinks is None
    partial, weights = (
        torch.empty(batch, heads, width, 0 if is_whole else splits, *last, dtype=torch.float32, device=query.device)
        for last in ((value_dim,), ())
    )
    attend, combine = (_attend_split_exact, _combine_splits_exact) if split_keys else (_attend_split, _combine_splits)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        attend[(num_tiles, batch * kv_heads, splits)](
            query,
            stored_keys,
            stored_values,
            out if is_whole else partial,
            weights,
            rows.slots,
            rows.starts.contiguous(),
            rows.positions,
            rows.tree_mask.view(torch.uint8) if rows.tree_mask is not None else rows.slots,
            scale,
            softcap or 0.0,
            width,
            *query.stride()[:3],
            *stored_keys.stride()[:3],
            *stored_values.stride()[:3],
            GROUPS=groups,
            KV_HEADS=kv_heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            IS_WHOLE=is_whole,
            SPLIT_KEYS=split_keys,
            WINDOW=window or 0,
            CHUNK=chunk or 0,
            IS_CAPPED=softcap is not None,
            IS_TREE=rows.tree_mask is not None,
            BLOCK_QUERIES=tiles.queries,
            BLOCK_KEYS=tiles.keys,
            BLOCK_DIM=tiles.dim,
            BLOCK_VALUE=tiles.value_dim,
            num_stages=NUM_STAGES,
            num_warps=tiles.num_warps,
            **early_launch_options(query.device),
        )
        if not is_whole:
            combine[(batch * heads * width,)](
                partial,
                weights,
                out,
                sinks if sinks is not None else weights,
                heads,
                width,
                splits,
                VALUE_DIM=value_dim,
                SPLITS=all_splits,
                HAS_SINKS=sinks is not None,
                BLOCK_VALUE=tiles.value_dim,
                **early_launch_options(query.device),
            )
    return out


class AttentionTiles(NamedTuple):
    queries: int
    keys: int
    dim: int
    value_dim: int
    num_warps: int


def tiles_of(dtype: torch.dtype, dim: int, value_dim: int, num_queries: int, *, is_tree: bool) -> AttentionTiles:
    """Return the tile sizes of the attention kernel for ``num_queries`` queries per key head, tuned for Hopper GPUs."""
    block_dim, block_value = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    is_wide, is_exact = max(block_dim, block_value) > 128, dtype == torch.float32
    most_queries = 16 if is_exact else 32 if is_wide else 64
    queries = min(most_queries, max(16, triton.next_power_of_2(num_queries)))
    num_warps = 8 if is_exact or (is_tree and queries == 64) else 4
    return AttentionTiles(queries, 32 if is_wide or is_exact else 64, block_dim, block_value, num_warps)


def num_splits(device: torch.device, num_programs: int, most_splits: int) -> int:
    """Return the number of parts into which attention divides the keys, so that all processors of a GPU are busy.

    ``num_programs`` is the number of Triton programs for each part. The result is a power of two, at most
    ``most_splits`` rounded up to a power of two.
    """
    wanted = triton.cdiv(_BLOCKS_PER_PROCESSOR * _num_processors(device), num_programs)
    splits = 1
    while splits < min(wanted, most_splits):
        splits *= 2
    return splits


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":  # interpreted
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Where the numbers of a pass begin depends on its shape; kernels that differ in nothing else take long to compile.
@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "positions", "tree_mask"])
def _attend_split(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    found,
    weights,
    slots,
    starts,
    positions,
    tree_mask,
    scale,
    softcap,
    width,
    query_row,
    query_head,
    query_position,
    key_slot,
    key_head,
    key_position,
    value_slot,
    value_head,
    value_position,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    IS_TREE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Compute the attention of one tile of queries, of one row and key head, over one split of the keys.

    Writes the weighted mean of the values to ``found``, float32[B, H, T, splits, VALUE_DIM], and the logarithm of the
    sum of the weights to ``weights``, float32[B, H, T, splits], -inf if no key of the split is visible. If IS_WHOLE,
    there is only one split, and ``found`` is the output, [B, T, H, VALUE_DIM]. If SPLIT_KEYS is not 0, split s consists
    of SPLIT_KEYS keys from s * SPLIT_KEYS on, and blocks of keys start at multiples of their size. The grid is (tiles,
    B * KV_HEADS, splits).
    """
    wait_for_previous_kernel(IS_EARLY)
    tile, row, split = tl.program_id(0), tl.program_id(1) // KV_HEADS, tl.program_id(2)
    splits = tl.num_programs(2)
    kv_head = tl.program_id(1) % KV_HEADS
    # Query q of a tile is position q % width of the q // width-th head of the group.
    q = tile * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    is_query = q < GROUPS * width
    at, head = q % width, kv_head * GROUPS + q // width
    position = tl.load(positions + row * width + at, mask=is_query, other=0).to(tl.int32)
    slot = tl.load(slots + row)
    start = tl.load(starts + row).to(tl.int32)

    dims, value_dims = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    query_at = query + row * query_row + head[:, None] * query_head + at[:, None] * query_position + dims[None, :]
    queries = tl.load(query_at, mask=is_query[:, None] & (dims < DIM)[None, :], other=0.0)

    end = start + width
    first = 0
    if WINDOW > 0:  # the first query is at position start, all others after it
        first = tl.maximum(start - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(start - start % CHUNK, first)
    first = first // BLOCK_KEYS * BLOCK_KEYS
    if SPLIT_KEYS > 0:
        low = tl.maximum(split * SPLIT_KEYS, first)
        high = tl.minimum((split + 1) * SPLIT_KEYS, end)
    else:
        blocks = (end - first + BLOCK_KEYS - 1) // BLOCK_KEYS
        length = (blocks + splits - 1) // splits * BLOCK_KEYS
        low = first + split * length
        high = tl.minimum(low + length, end)

    highest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    mean = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE], tl.float32)
    for begin in range(low, high, BLOCK_KEYS):
        key = begin + tl.arange(0, BLOCK_KEYS)
        is_key = key < high
        key_at = keys + slot * key_slot + kv_head * key_head + key[:, None] * key_position + dims[None, :]
        some_keys = tl.load(key_at, mask=is_key[:, None] & (dims < DIM)[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(some_keys), input_precision="ieee") * scale
        if IS_CAPPED:  # softcap * tanh(scores / softcap)
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        if IS_TREE:
            is_new = is_key & (key >= start)
            seen = tl.load(
                tree_mask + (row * width + at)[:, None] * width + (key - start)[None, :],
                mask=is_query[:, None] & is_new[None, :],
                other=0,
            )
            visible = (key < start)[None, :] | (seen != 0)
            stands = tl.load(positions + row * width + key - start, mask=is_new, other=0).to(tl.int32)
            stands = tl.where(is_new, stands, key)
        else:
            stands = key
            visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (stands[None, :] > position[:, None] - WINDOW)
        if CHUNK > 0:
            visible = visible & (stands[None, :] >= (position - position % CHUNK)[:, None])
        scores = tl.where(visible & is_key[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        grown = tl.exp(highest - base)
        chances = tl.exp(scores - base[:, None])
        value_at = (
            values + slot * value_slot + kv_head * value_head + key[:, None] * value_position + value_dims[None, :]
        )
        some_values = tl.load(value_at, mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        mean = mean * grown[:, None] + tl.dot(chances.to(some_values.dtype), some_values, input_precision="ieee")
        total = total * grown + tl.sum(chances, 1)
        highest = new_highest

    is_some = total > 0
    divisor = tl.where(is_some, total, 1.0)
    if IS_WHOLE:
        place = (row * width + at) * (KV_HEADS * GROUPS) + head
    else:
        place = ((row * KV_HEADS * GROUPS + head) * width + at) * splits + split
        tl.store(weights + place, tl.where(is_some, highest + tl.log(divisor), float("-inf")), mask=is_query)
    tl.store(
        found + place[:, None] * VALUE_DIM + value_dims[None, :],
        (mean / divisor[:, None]).to(found.dtype.element_ty),
        mask=is_query[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@triton.jit
def _combine_splits(  # type: ignore[no-untyped-def]
    partial,
    weights,
    out,
    sinks,
    heads,
    width,
    splits,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Write the weighted mean of the attention outputs of all splits of the keys to ``out``, [B, T, H, VALUE_DIM].

    ``sinks`` [H] add to the softmax's denominator but have no value. ``splits`` is the number of splits in ``partial``;
    SPLITS, a power of two, may be greater, and the splits from ``splits`` on are empty. The grid is (B * H * T,).
    """
    wait_for_previous_kernel(IS_EARLY)
    query = tl.program_id(0)
    at, head = query % width, query // width % heads
    row = query // width // heads
    split, dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_VALUE)
    found = tl.load(weights + query * splits + split, mask=split < splits, other=float("-inf"))
    highest = tl.max(found, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    shares = tl.exp(found - highest)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += tl.exp(sink - highest)
    means = tl.load(
        partial + (query * splits + split)[:, None] * VALUE_DIM + dims[None, :],
        mask=(split < splits)[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    mean = tl.sum(means * shares[:, None], 0) / total
    tl.store(
        out + ((row * width + at) * heads + head) * VALUE_DIM + dims,
        mean.to(out.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )


# What is compiled for a width of one might compute in another order: here all widths have one kernel.
_attend_split_exact = triton.jit(
    do_not_specialize=["width", "query_row", "query_head", "query_position"],
    do_not_specialize_on_alignment=["query", "slots", "starts", "positions", "tree_mask"],
)(_attend_split.fn)
_combine_splits_exact = triton.jit(do_not_specialize=["width", "splits"])(_combine_splits.fn)
