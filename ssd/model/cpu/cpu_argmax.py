"""The most probable token of each position on a CPU: a SIMD search on the threads of torch.

torch's argmax is not vectorised for bfloat16 and float16, and numpy's runs on one thread and needs float32 copies.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types

from ssd.jit.addresses import address, float32_array, int64_array, kernel
from ssd.model.cpu.parallel import next_task, numbers_of, run_parallel
from ssd.model.cpu.simd import (
    ITEMSIZES,
    KINDS,
    LANES,
    WORD,
    constant,
    for_kinds,
    loop,
    offset_address,
    read,
    reduce_lanes,
)
from ssd.model.cpu.simd_functions import higher, to_float32

_BLOCK: Final = 1 << 15  # logits per task
_PART: Final = 1 << 10  # logits of which the maximum is computed first
_UNROLL: Final = 4  # vectors per iteration of `_highest`
_NUMBERS: Final = 6  # the number of arguments of `_search_blocks`


def cpu_argmax(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the index of the highest logit, int64[...], for logits [..., V] on a CPU; the first one if some are equal.

    NaN counts as the highest value. O(V) per position.
    """
    best: npt.NDArray[np.int64]
    width = logits.shape[-1]
    if width < LANES or str(logits.dtype) not in KINDS:
        best = logits.float().numpy().argmax(-1)
        return best
    rows = logits.reshape(-1, width).contiguous()
    num_blocks = -(-width // _BLOCK)
    highest, places = np.empty((len(rows), num_blocks), np.float32), np.empty((len(rows), num_blocks), np.int64)
    numbers = KINDS[str(rows.dtype)], rows.data_ptr(), width, num_blocks, address(highest), address(places)
    run_parallel(_search_blocks, numbers, len(rows) * num_blocks, rows.numel())
    best = places[np.arange(len(rows)), highest.argmax(-1)].reshape(logits.shape[:-1])
    return best


@kernel
def _search_blocks(call: int) -> None:  # pragma: no cover - compiled
    """Find the highest number of each block of a row. A task is one block, see `run_parallel`."""
    numbers = numbers_of(call, _NUMBERS)
    kind, logits, width, num_blocks = numbers[0], numbers[1], numbers[2], numbers[3]
    itemsize, values = 2 if kind else 4, np.empty(2 * _PART, np.float32)
    task = next_task(call, -1)
    while task >= 0:
        row, block = task // num_blocks, task % num_blocks
        begin, end = width * block // num_blocks, width * (block + 1) // num_blocks
        source = logits + (row * width + begin) * itemsize
        parts = max(1, (end - begin) // _PART)
        best, best_part = _highest(kind, source, (end - begin) // parts), 0
        for part in range(1, parts):
            first, last = (end - begin) * part // parts, (end - begin) * (part + 1) // parts
            found = _highest(kind, source + first * itemsize, last - first)
            if found > best or (np.isnan(found) and not np.isnan(best)):
                best, best_part = found, part
        first, last = (end - begin) * best_part // parts, (end - begin) * (best_part + 1) // parts
        to_float32(kind, source + first * itemsize, values.ctypes.data, last - first, np.float32(1.0))
        place = 0
        while values[place] != best and not np.isnan(values[place]):
            place += 1
        float32_array(numbers[4], task + 1)[task] = best
        int64_array(numbers[5], task + 1)[task] = begin + first + place
        task = next_task(call, task)


@for_kinds(types.int64, types.int64, result=types.float32)
def _highest(builder: Any, kind: int, source: Any, count: Any) -> Any:
    """Return the highest of ``count`` >= 16 numbers; NaN if one is NaN."""
    size, last = ir.Constant(WORD, _UNROLL * LANES), builder.sub(count, ir.Constant(WORD, LANES))

    def search(index: Any, carried: Any) -> Any:
        found = []
        for number, best in enumerate(carried):  # several at once, because each waits for its last comparison
            begin = builder.add(builder.mul(index, size), ir.Constant(WORD, number * LANES))
            begin = builder.select(builder.icmp_signed("<", begin, last), begin, last)
            x = read(builder, offset_address(builder, source, (begin, ITEMSIZES[kind])), kind)
            found.append(higher(builder, best, x))
        return found

    rounds = builder.sdiv(builder.add(count, builder.sub(size, ir.Constant(WORD, 1))), size)
    best, *others = loop(builder, rounds, [constant(float("-inf"))] * _UNROLL, search)
    for other in others:
        best = higher(builder, best, other)
    return reduce_lanes(builder, best, partial(higher, builder))
