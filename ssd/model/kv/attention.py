"""One attention function for all Hugging Face models, which reads and writes the slot KV cache.

It is registered under a name without a mask entry, so that transformers builds no mask. The model is called with
``use_cache=False``, explicit ``position_ids`` and ``slot_rows=``, which its layers pass on to this function.

On a CPU the results are bit-identical whatever else a pass computes. A query's scores are sums of products in the order
of a head's dimensions. Their exponentials are summed in sixteen lanes by the position of the key, and the values are
added in the order of positions. A node of a draft tree reads the keys of its path in that order too. So the result does
not depend on the width of the pass, on other rows, or on whether this pass or an earlier one wrote a key. Rows read
their keys and values in place, without a mask, a copy or padding.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ssd.jit.addresses import check_memory, float32_array, inlined, int64_array, kernel, uint8_array
from ssd.jit.simd import KINDS, LANES, TILE_ROWS, TILE_VECTORS, tile
from ssd.jit.simd_functions import exp_and_sum, from_float32, highest_of, run_parallel, soft_cap, to_float32
from ssd.model.kv.kv_cache import AttentionKernel, AttentionRules, Pair, SlotRows

_QUERIES = 16  # the number of queries that are computed together and share the keys and values that are read

_wide, _row = tile(TILE_ROWS, TILE_VECTORS), tile(1, TILE_VECTORS)
_column, _cell = tile(TILE_ROWS, 1), tile(1, 1)
_HUGE = 1 << 62


def cpu_attention(
    query: torch.Tensor, stored_keys: torch.Tensor, stored_values: torch.Tensor, rows: SlotRows, rules: AttentionRules
) -> torch.Tensor:
    """Compute attention over the KV cache slots on a CPU, for float32, bfloat16 and float16, with float32 sums.

    Implements `AttentionKernel`. The last axis but one of the keys is contiguous, as in `SlotKVCache` on a CPU. O(keys
    visible) per query.
    """
    scale, window, chunk, softcap, sinks = rules
    batch, heads, width, dim = query.shape
    kv_heads, value_dim = stored_keys.shape[1], stored_values.shape[3]
    assert stored_keys.stride(2) == 1 and stored_values.stride(3) == 1 and stored_keys.stride(3) % LANES == 0
    query = query if query.stride(3) == 1 else query.contiguous()
    out = torch.empty(batch, width, heads, value_dim, dtype=query.dtype)
    held = None if sinks is None else sinks.float().contiguous()
    trees = None if rows.sees is None else rows.sees.contiguous()
    slots, starts, positions = rows.slots, rows.starts.contiguous(), rows.positions.contiguous()
    blocks = -(-heads // kv_heads * width // _QUERIES)
    tasks = batch * kv_heads * blocks
    size = query.itemsize
    arguments = (
        KINDS[str(query.dtype)],
        query.data_ptr(), query.stride(0) * size, query.stride(1) * size, query.stride(2) * size,
        stored_keys.data_ptr(), stored_keys.stride(0) * size, stored_keys.stride(1) * size,
        stored_keys.stride(3) * size,
        stored_values.data_ptr(), stored_values.stride(0) * size, stored_values.stride(1) * size,
        stored_values.stride(2) * size,
        out.data_ptr(), slots.data_ptr(), starts.data_ptr(), positions.data_ptr(),
        0 if trees is None else trees.data_ptr(), 0 if held is None else held.data_ptr(),
        batch, kv_heads, heads // kv_heads, width, dim, value_dim,
        scale, window or _HUGE, chunk or _HUGE, softcap or 0.0,
    )  # fmt: skip
    work = batch * heads * width * rows.num_keys * (dim + value_dim)
    run_parallel(_attend, arguments, tasks, work, torch.get_num_threads)
    return out


@kernel
def _add_product(  # pragma: no cover - compiled
    kind: int, rows: int, vectors: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, n: int
) -> None:
    """Compute the matrix product ``c += a @ b``, where b has any supported dtype and a and c are float32.

    The shapes are a [rows, n] and b [n, 16 * vectors]. Arrays are given by their addresses and by the bytes between
    rows.
    """
    step = 2 if kind else 4
    row = 0
    while row < rows:
        some = TILE_ROWS if rows - row >= TILE_ROWS else 1
        vector = 0
        while vector < vectors:
            wide = TILE_VECTORS if vectors - vector >= TILE_VECTORS else 1
            given, out = b + vector * LANES * step, c + row * c_row + vector * LANES * 4
            if some == 1:
                if wide == 1:
                    _cell(kind, a + row * a_row, a_row, given, b_row, out, c_row, n)
                else:
                    _row(kind, a + row * a_row, a_row, given, b_row, out, c_row, n)
            elif wide == 1:
                _column(kind, a + row * a_row, a_row, given, b_row, out, c_row, n)
            else:
                _wide(kind, a + row * a_row, a_row, given, b_row, out, c_row, n)
            vector += wide
        row += some


@kernel
def _attend(  # pragma: no cover - compiled
    kind: int, query: int, query_row: int, query_head: int, query_position: int,
    keys: int, key_slot: int, key_head: int, key_number: int,
    values: int, value_slot: int, value_head: int, value_position: int,
    out: int, slots: int, starts: int, positions: int, sees: int, sinks: int,
    batch: int, kv_heads: int, groups: int, width: int, dim: int, value_dim: int,
    scale: float, window: int, chunk: int, softcap: float, first_task: int, step: int,
) -> None:  # fmt: skip
    """Compute the attention of every ``step``-th task from ``first_task`` on, so that threads can share the tasks.

    A task consists of up to 16 queries of one row and key head. Its query q is that of position q // groups and of the
    (q % groups)-th query head of the key head. Arrays are given by addresses, and strides are in bytes.
    """
    size = 2 if kind else 4
    slot_of, start_of = int64_array(slots, batch), int64_array(starts, batch)
    num_queries = width * groups
    blocks = (num_queries + _QUERIES - 1) // _QUERIES
    value_vectors = (value_dim + LANES - 1) // LANES
    scaled_queries = np.empty((_QUERIES, dim + LANES), np.float32)
    found = np.empty((_QUERIES, value_vectors * LANES), np.float32)
    lows, highs = np.empty(_QUERIES, np.int64), np.empty(_QUERIES, np.int64)
    shares = np.empty(_QUERIES, np.float32)
    for task in range(first_task, batch * kv_heads * blocks, step):
        row, kv_head, block = task // blocks // kv_heads, task // blocks % kv_heads, task % blocks
        begin = block * _QUERIES
        count = min(_QUERIES, num_queries - begin)
        start, stands = start_of[row], int64_array(positions + 8 * row * width, width)
        low, high = start + width, 0
        for q in range(count):
            at, head = (begin + q) // groups, kv_head * groups + (begin + q) % groups
            to_float32(
                kind, query + row * query_row + head * query_head + at * query_position,
                scaled_queries[q].ctypes.data, dim, np.float32(scale),
            )  # fmt: skip
            position = stands[at]
            lows[q] = max(0, position - window + 1, position - position % chunk)
            highs[q] = position + 1
            low, high = min(low, lows[q]), max(high, highs[q])
        if sees:
            low, high = min(low, start), start + width
        base = low // LANES * LANES
        vectors = (high - base + LANES - 1) // LANES
        key_at = keys + slot_of[row] * key_slot + kv_head * key_head + base * size
        value_at = values + slot_of[row] * value_slot + kv_head * value_head
        check_memory(key_at + (dim - 1) * key_number, vectors * LANES * size)
        check_memory(value_at + (high - 1) * value_position, value_vectors * LANES * size)
        scores = np.zeros((count, vectors * LANES), np.float32)
        scores_row, queries_row, found_row = scores.strides[0], scaled_queries.strides[0], found.strides[0]
        for vector in range(0, vectors, TILE_VECTORS):
            _add_product(
                kind, count, min(TILE_VECTORS, vectors - vector), scaled_queries.ctypes.data, queries_row,
                key_at + vector * LANES * size, key_number, scores.ctypes.data + vector * LANES * 4, scores_row, dim,
            )  # fmt: skip
        for q in range(count):
            at, head = (begin + q) // groups, kv_head * groups + (begin + q) % groups
            own = scores[q]
            if softcap > 0.0:
                soft_cap(own.ctypes.data, vectors, np.float32(softcap))
            if sees:
                _straighten(own, start - base, sees + (row * width + at) * width, width)
            own[: lows[q] - base] = -np.inf
            own[highs[q] - base :] = -np.inf
            sink = np.float32(-np.inf)
            if sinks:
                sink = float32_array(sinks, kv_heads * groups)[head]
            highest = highest_of(own.ctypes.data, vectors, sink)
            total = exp_and_sum(own.ctypes.data, vectors, highest)
            if sinks:
                total += np.exp(sink - highest)
            found[q] = 0.0
            shares[q] = np.float32(1.0) / total
        q = 0
        while q < count:  # queries with nearly the same visible keys read the values together
            some = min(TILE_ROWS, count - q)
            from_key, to_key = lows[q : q + some].max(), highs[q : q + some].min()
            if sees:
                to_key = min(to_key, start)
            if some < TILE_ROWS:
                some = 1
                from_key, to_key = lows[q], min(highs[q], start) if sees else highs[q]
            if to_key <= from_key:
                from_key = to_key = _HUGE
            for each in range(q, q + some):
                until = min(highs[each], start) if sees else highs[each]
                first = min(from_key, until)
                if first > lows[each]:
                    _add_product(
                        kind, 1, value_vectors, scores[each].ctypes.data + (lows[each] - base) * 4, scores_row,
                        value_at + lows[each] * value_position, value_position, found[each].ctypes.data, found_row,
                        first - lows[each],
                    )  # fmt: skip
            if from_key < to_key:
                _add_product(
                    kind, some, value_vectors, scores[q].ctypes.data + (from_key - base) * 4, scores_row,
                    value_at + from_key * value_position, value_position, found[q].ctypes.data, found_row,
                    to_key - from_key,
                )  # fmt: skip
                for each in range(q, q + some):
                    until = min(highs[each], start) if sees else highs[each]
                    if until > to_key:
                        _add_product(
                            kind, 1, value_vectors, scores[each].ctypes.data + (to_key - base) * 4, scores_row,
                            value_at + to_key * value_position, value_position, found[each].ctypes.data, found_row,
                            until - to_key,
                        )  # fmt: skip
            q += some
        for q in range(count):
            at, head = (begin + q) // groups, kv_head * groups + (begin + q) % groups
            if sees:
                seen = uint8_array(sees + (row * width + at) * width, width)
                depth = 0
                for node in range(width):
                    if seen[node]:
                        if start + depth >= lows[q]:
                            _add_product(
                                kind, 1, value_vectors, scores[q].ctypes.data + (start + depth - base) * 4, scores_row,
                                value_at + (start + node) * value_position, value_position, found[q].ctypes.data,
                                found_row, 1,
                            )  # fmt: skip
                        depth += 1
            from_float32(
                kind, found[q].ctypes.data,
                out + ((row * width + at) * kv_heads * groups + head) * value_dim * size, value_dim, shares[q],
            )  # fmt: skip


@inlined
def _straighten(scores: npt.NDArray[np.float32], first: int, sees: int, width: int) -> None:
    """Move the attention scores of a draft tree's path together, in the order of depth, from ``first`` on."""
    seen = uint8_array(sees, width)
    depth = 0
    for node in range(width):
        if seen[node]:
            scores[first + depth] = scores[first + node]
            depth += 1


ATTENTION_NAME = "ssd_slots"

# The attention kernel for each type of device; other devices use torch's attention, unless a pass has its own kernel.
KERNELS: Final[dict[str, AttentionKernel]] = {"cpu": cpu_attention}


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slot_rows: SlotRows | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of T new positions of B sequences over all positions in their KV cache slots.

    This is the attention function that transformers' layers call. ``query`` is [B, num_heads, T, head_dim]; ``key`` and
    ``value`` are those of the new positions, [B, num_kv_heads, T, ...]. The default of ``scaling`` is head_dim ** -0.5.
    With ``softcap``, scores become softcap * tanh(scores / softcap). ``s_aux`` are attention sinks, [num_heads]: logits
    that take weight but have no value. Returns the output, [B, T, num_heads, value_dim], and None in place of the
    attention weights. Raises TypeError if a layer does not pass ``slot_rows`` on, or has a mask beyond position and
    window.
    """
    if slot_rows is None:
        raise TypeError("this model's layers do not pass slot_rows to the attention function")
    if attention_mask is not None:
        raise TypeError("this model's layers bring a mask of their own")
    layer: int = module.layer_idx  # type: ignore[assignment]
    chunk = chunk_size(module)
    slot_rows.kv_cache.reach[layer] = sliding_window if chunk is None else chunk
    if (ratio := temperature_ratio(module, slot_rows.positions)) is not None:
        query = query * ratio.to(query.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    stored = slot_rows.kv_cache.store(layer, slot_rows, key, value)
    return attended(query, stored, slot_rows, AttentionRules(scale, sliding_window, chunk, softcap, s_aux)), None


def attended(query: torch.Tensor, stored: Pair, rows: SlotRows, rules: AttentionRules) -> torch.Tensor:
    """Return attention of queries [B, num_heads, T, head_dim] over a layer's KV cache: [B, T, num_heads, value_dim]."""
    kernel = rows.kv_cache.kernel or rows.kernel or KERNELS.get(query.device.type)
    if kernel is not None:
        return kernel(query, *stored, rows, rules)
    keys, values = map(rows.seen_of, stored)
    batch, heads, width, _dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    mask = rows.mask(rules.window, rules.chunk, groups, query.dtype)
    # The query heads of one key head are merged into the query axis, which avoids copies of keys and values.
    packed = query.reshape(batch, kv_heads, groups * width, query.shape[-1])
    if rules.softcap is None and rules.sinks is None:
        out = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=rules.scale)
    else:
        out = _explicit(packed, keys, values, mask, rules, groups, width)
    out = out.reshape(batch, heads, width, values.shape[-1])
    return out.transpose(1, 2).contiguous()


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rules: AttentionRules,
    groups: int,
    width: int,
) -> torch.Tensor:
    """Compute attention step by step, with soft caps and attention sinks, which torch's fused kernel lacks."""
    scale, _window, _chunk, softcap, s_aux = rules
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if s_aux is not None:
        kv_heads = keys.shape[1]
        sink = s_aux.reshape(1, kv_heads, groups, 1).expand(len(query), -1, -1, width).reshape(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return weights.to(values.dtype) @ values


AttentionInterface.register(ATTENTION_NAME, slot_attention)


def chunk_size(module: torch.nn.Module) -> int | None:
    """Return the chunk size of a layer with chunked attention, as in Llama 4; None for other layers."""
    config: Any = getattr(module, "config", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    layer_types = getattr(config, "layer_types", None)
    if chunk is None or layer_types is None or layer_types[module.layer_idx] != "chunked_attention":
        return None
    return chunk


def temperature_ratio(module: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """Return the factor that corrects the attention temperature of queries, float32[B, 1, T, 1]; None if it is 1.

    A layer with attention temperature counts positions from the length of transformers' cache. This cache is not used
    here, so the layer has scaled the queries as if their ``positions``, int64[B, T], were 0..T-1. The scale is 1 +
    attn_scale * log(1 + floor((position + 1) / floor_scale)), after Nakanishi 2025 (Scalable-Softmax).
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    taken = torch.arange(positions.shape[1], device=positions.device)
    return (_temperature(module, positions) / _temperature(module, taken))[:, None, :, None]


def _temperature(module: Any, positions: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = (
        torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    )
    return scale
