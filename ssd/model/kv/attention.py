"""One attention function for all Hugging Face models, which reads and writes the slot KV cache.

It is registered under a name without a mask entry, so that transformers builds no mask. The model is called with
``use_cache=False``, explicit ``position_ids`` and ``slot_rows=``, which its layers pass on to this function.

On a CPU the results are bit-identical whatever else a pass computes. A query's scores are sums of products in the order
of a head's dimensions. Their exponentials are summed in sixteen lanes by the position of the key, and the values are
added in the order of positions. A node of a draft tree reads the keys of its path in that order too. So the result does
not depend on the width of the pass, on other rows, or on whether this pass or an earlier one wrote a key. The keys and
values of a row are read in place, without a mask, a copy or padding.
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
Rows = npt.NDArray[np.float32]
Strided = tuple[int, int, int, int]  # an address, and the strides of three axes in bytes


def cpu_attention(
    query: torch.Tensor, stored_keys: torch.Tensor, stored_values: torch.Tensor, rows: SlotRows, rules: AttentionRules
) -> torch.Tensor:
    """Compute attention over the KV cache slots on a CPU, for float32, bfloat16 and float16, with float32 sums.

    Implements `AttentionKernel`. The keys are contiguous along the last axis but one, as in `SlotKVCache` on a CPU.
    O(visible keys) per query.
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
    row, head, position, _ = query.stride()
    queries = query.data_ptr(), row * size, head * size, position * size
    slot, head, _, number = stored_keys.stride()
    keys = stored_keys.data_ptr(), slot * size, head * size, number * size
    slot, head, position, _ = stored_values.stride()
    values = stored_values.data_ptr(), slot * size, head * size, position * size
    masks = 0 if trees is None else trees.data_ptr(), 0 if held is None else held.data_ptr()
    arrays = out.data_ptr(), slots.data_ptr(), starts.data_ptr(), positions.data_ptr(), *masks
    sizes = batch, kv_heads, heads // kv_heads, width, dim, value_dim
    limits = scale, window or _HUGE, chunk or _HUGE, softcap or 0.0
    arguments = KINDS[str(query.dtype)], queries, keys, values, arrays, sizes, limits
    work = batch * heads * width * rows.num_keys * (dim + value_dim)
    run_parallel(_attend, arguments, tasks, work, torch.get_num_threads)
    return out


@kernel
def _add_product(  # pragma: no cover - compiled
    kind: int, rows: int, vectors: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, n: int
) -> None:
    """Add a matrix product, ``c += a @ b``, where b has any supported dtype and a and c are float32.

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


@inlined
def _add_values(  # pragma: no cover - compiled
    kind: int, rows: int, scores: Rows, values: tuple[int, int], found: Rows, q: int, key: int, at: int, count: int
) -> None:
    """Add ``count`` values, weighted by attention scores, to the attention output of ``rows`` queries from query q on.

    The weights are the scores from index ``key`` on, and the values those from position ``at`` on; ``values`` are an
    address and the bytes between positions.
    """
    weights, given = scores[q].ctypes.data + key * 4, values[0] + at * values[1]
    row, out, out_row = scores.strides[0], found[q].ctypes.data, found.strides[0]
    _add_product(kind, rows, found.shape[1] // LANES, weights, row, given, values[1], out, out_row, count)


@kernel
def _attend(  # pragma: no cover - compiled
    kind: int,
    queries: Strided,
    stored_keys: Strided,
    stored_values: Strided,
    arrays: tuple[int, int, int, int, int, int],
    sizes: tuple[int, int, int, int, int, int],
    limits: tuple[float, int, int, float],
    first_task: int,
    step: int,
) -> None:
    """Compute one thread's part of the attention of a forward pass: every ``step``-th task from ``first_task`` on.

    A task consists of up to 16 queries of one row and key head. Query q of a task is at position q // groups and
    belongs to the (q % groups)-th query head of the key head. Arrays are given by addresses, and strides are in bytes.
    """
    query, query_row, query_head, query_position = queries
    keys, key_slot, key_head, key_number = stored_keys
    values, value_slot, value_head, value_position = stored_values
    out, slots, starts, positions, sees, sinks = arrays
    batch, kv_heads, groups, width, dim, value_dim = sizes
    scale, window, chunk, softcap = limits
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
            given = query + row * query_row + head * query_head + at * query_position
            to_float32(kind, given, scaled_queries[q].ctypes.data, dim, np.float32(scale))
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
        row_values = value_at, value_position
        scores_row, queries_row = scores.strides[0], scaled_queries.strides[0]
        for vector in range(0, vectors, TILE_VECTORS):
            wide, given = min(TILE_VECTORS, vectors - vector), key_at + vector * LANES * size
            target = scores.ctypes.data + vector * LANES * 4
            _add_product(
                kind, count, wide, scaled_queries.ctypes.data, queries_row, given, key_number, target, scores_row, dim
            )
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
                    key = lows[each]
                    _add_values(kind, 1, scores, row_values, found, each, key - base, key, first - key)
            if from_key < to_key:
                _add_values(kind, some, scores, row_values, found, q, from_key - base, from_key, to_key - from_key)
                for each in range(q, q + some):
                    until = min(highs[each], start) if sees else highs[each]
                    if until > to_key:
                        _add_values(kind, 1, scores, row_values, found, each, to_key - base, to_key, until - to_key)
            q += some
        for q in range(count):
            at, head = (begin + q) // groups, kv_head * groups + (begin + q) % groups
            if sees:
                seen = uint8_array(sees + (row * width + at) * width, width)
                depth = 0
                for node in range(width):
                    if seen[node]:
                        if start + depth >= lows[q]:
                            key = start + depth - base
                            _add_values(kind, 1, scores, row_values, found, q, key, start + node, 1)
                        depth += 1
            target = out + ((row * width + at) * kv_heads * groups + head) * value_dim * size
            from_float32(kind, found[q].ctypes.data, target, value_dim, shares[q])


@inlined
def _straighten(scores: npt.NDArray[np.float32], first: int, sees: int, width: int) -> None:
    """Move the attention scores of the nodes on a draft tree's path next to each other, in the order of depth."""
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
    that add to the softmax's denominator but have no value. Returns the output, [B, T, num_heads, value_dim], and None
    in place of the attention weights. Raises TypeError if a layer does not pass ``slot_rows`` on, or has a mask that
    position and window do not determine.
    """
    if slot_rows is None:
        raise TypeError("this model's layers do not pass slot_rows to the attention function")
    if attention_mask is not None:
        raise TypeError("this model's layers pass their own attention mask")
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
    """Compute attention step by step, because torch's fused kernel supports neither soft caps nor attention sinks."""
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
