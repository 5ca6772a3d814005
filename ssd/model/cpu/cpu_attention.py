"""Attention over the slot KV cache on a CPU, with results that do not depend on what else a pass computes.

The score of a query and a key is summed over the head's dimensions in their order. The exponentials of the scores are
summed in sixteen SIMD lanes by key position, and the values are added in the order of positions. A node of a draft tree
reads the keys on its path in this order too. So the result does not depend on the width of the pass, on other rows, or
on whether this pass or an earlier one wrote a key. Keys and values are read in place, without a mask, a copy or
padding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ssd.jit.addresses import check_memory, float32_array, inlined, int64_array, kernel, uint8_array
from ssd.model.cpu.parallel import factors_of, next_task, numbers_of, run_parallel
from ssd.model.cpu.simd import KINDS, LANES, TILE_ROWS, TILE_VECTORS, tile
from ssd.model.cpu.simd_functions import exp_and_sum, from_float32, highest_of, soft_cap, to_float32
from ssd.model.kv.attention import KERNELS
from ssd.model.kv.kv_cache import KEY_ALIGNMENT, AttentionRules, SlotRows

assert KEY_ALIGNMENT % LANES == 0

_QUERIES = 16  # the number of queries that are computed together and share the keys and values that are read

_wide, _row = tile(TILE_ROWS, TILE_VECTORS), tile(1, TILE_VECTORS)
_column, _cell = tile(TILE_ROWS, 1), tile(1, 1)
_HUGE = 1 << 62
Rows = npt.NDArray[np.float32]


def cpu_attention(
    query: torch.Tensor, stored_keys: torch.Tensor, stored_values: torch.Tensor, rows: SlotRows, rules: AttentionRules
) -> torch.Tensor:
    """Compute attention over the KV cache on a CPU, without a mask and without copying the keys and values.

    Implements `AttentionKernel` for float32, bfloat16 and float16, with float32 sums. The keys must be stored
    contiguously along the positions and the values along the head dimension, as `SlotKVCache` does on a CPU. O(visible
    keys) per query.
    """
    scale, window, chunk, softcap, sinks = rules
    batch, heads, width, dim = query.shape
    kv_heads, value_dim = stored_keys.shape[1], stored_values.shape[3]
    assert stored_keys.stride(2) == 1 and stored_values.stride(3) == 1 and stored_keys.stride(3) % LANES == 0
    query = query if query.stride(3) == 1 else query.contiguous()
    out = torch.empty(batch, width, heads, value_dim, dtype=query.dtype)
    held = None if sinks is None else sinks.float().contiguous()
    trees = None if rows.tree_mask is None else rows.tree_mask.contiguous()
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
    limits = window or _HUGE, chunk or _HUGE
    numbers = KINDS[str(query.dtype)], *queries, *keys, *values, *arrays, *sizes, *limits
    work = batch * heads * width * rows.num_keys * (dim + value_dim)
    run_parallel(_attend, numbers, tasks, work, factors=(scale, softcap or 0.0))
    return out


@kernel
def _add_product(  # pragma: no cover - compiled
    kind: int, rows: int, vectors: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, n: int
) -> None:
    """Add a matrix product, ``c += a @ b``; a and c are float32, and b has the dtype ``kind`` (see `KINDS`).

    The shapes are a [rows, n], b [n, 16 * vectors] and c [rows, 16 * vectors]. Each matrix is given by its address and
    the number of bytes from one row to the next.
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
    """Add attention-weighted values from the KV cache to the attention outputs ``found`` of several queries.

    The queries are ``rows`` queries from index ``q`` on, and the values are those of ``count`` positions from ``at``
    on. The weights are in ``scores``, from column ``key`` on. ``values`` contains the address of the value at position
    0 and the number of bytes from one position to the next.
    """
    weights, given = scores[q].ctypes.data + key * 4, values[0] + at * values[1]
    row, out, out_row = scores.strides[0], found[q].ctypes.data, found.strides[0]
    _add_product(kind, rows, found.shape[1] // LANES, weights, row, given, values[1], out, out_row, count)


_NUMBERS = 27  # the number of integer arguments of `_attend`


@kernel
def _attend(call: int) -> None:  # pragma: no cover - compiled
    """Compute tasks of the attention of a forward pass, see `run_parallel`.

    A task consists of up to 16 queries of one row and key head. Query q of a task is at position q // groups and
    belongs to the (q % groups)-th query head of the key head. Arrays are given by addresses, and strides are in bytes.
    """
    numbers, factors = numbers_of(call, _NUMBERS), factors_of(call, _NUMBERS, 2)
    kind = numbers[0]
    query, query_row, query_head, query_position = numbers[1], numbers[2], numbers[3], numbers[4]
    keys, key_slot, key_head, key_number = numbers[5], numbers[6], numbers[7], numbers[8]
    values, value_slot, value_head, value_position = numbers[9], numbers[10], numbers[11], numbers[12]
    out, slots, starts = numbers[13], numbers[14], numbers[15]
    positions, tree_mask, sinks = numbers[16], numbers[17], numbers[18]
    batch, kv_heads, groups, width = numbers[19], numbers[20], numbers[21], numbers[22]
    dim, value_dim, window, chunk = numbers[23], numbers[24], numbers[25], numbers[26]
    scale, softcap = factors[0], factors[1]
    size = 2 if kind else 4
    slot_of, start_of = int64_array(slots, batch), int64_array(starts, batch)
    num_queries = width * groups
    blocks = (num_queries + _QUERIES - 1) // _QUERIES
    value_vectors = (value_dim + LANES - 1) // LANES
    scaled_queries = np.empty((_QUERIES, dim + LANES), np.float32)
    found = np.empty((_QUERIES, value_vectors * LANES), np.float32)
    lows, highs = np.empty(_QUERIES, np.int64), np.empty(_QUERIES, np.int64)
    shares = np.empty(_QUERIES, np.float32)
    task = next_task(call, -1)
    while task >= 0:
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
        if tree_mask:
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
            if tree_mask:
                _straighten(own, start - base, tree_mask + (row * width + at) * width, width)
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
            if tree_mask:
                to_key = min(to_key, start)
            if some < TILE_ROWS:
                some = 1
                from_key, to_key = lows[q], min(highs[q], start) if tree_mask else highs[q]
            if to_key <= from_key:
                from_key = to_key = _HUGE
            for each in range(q, q + some):
                until = min(highs[each], start) if tree_mask else highs[each]
                first = min(from_key, until)
                if first > lows[each]:
                    key = lows[each]
                    _add_values(kind, 1, scores, row_values, found, each, key - base, key, first - key)
            if from_key < to_key:
                _add_values(kind, some, scores, row_values, found, q, from_key - base, from_key, to_key - from_key)
                for each in range(q, q + some):
                    until = min(highs[each], start) if tree_mask else highs[each]
                    if until > to_key:
                        _add_values(kind, 1, scores, row_values, found, each, to_key - base, to_key, until - to_key)
            q += some
        for q in range(count):
            at, head = (begin + q) // groups, kv_head * groups + (begin + q) % groups
            if tree_mask:
                seen = uint8_array(tree_mask + (row * width + at) * width, width)
                depth = 0
                for node in range(width):
                    if seen[node]:
                        if start + depth >= lows[q]:
                            key = start + depth - base
                            _add_values(kind, 1, scores, row_values, found, q, key, start + node, 1)
                        depth += 1
            target = out + ((row * width + at) * kv_heads * groups + head) * value_dim * size
            from_float32(kind, found[q].ctypes.data, target, value_dim, shares[q])
        task = next_task(call, task)


@inlined
def _straighten(scores: npt.NDArray[np.float32], first: int, tree_mask: int, width: int) -> None:
    """Move the scores of a query's draft-tree path to adjacent entries, so that they are summed as in a draft chain."""
    seen = uint8_array(tree_mask, width)
    depth = 0
    for node in range(width):
        if seen[node]:
            scores[first + depth] = scores[first + node]
            depth += 1


KERNELS["cpu"] = cpu_attention
