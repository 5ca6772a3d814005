"""How many threads a pass on a CPU should use."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import torch

from ssd.model.target import Target

log = logging.getLogger(__name__)

_SAID_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CONTEXT = 64
_WIDTHS = (1, 8)
_ROUNDS = 3
_PASSES = 4
_LONG_PASS_S = 0.25
"""A pass that takes so long has work for all threads; trying them would only delay the start."""


def settle_threads(target: Target) -> int:
    """Use the number of threads that makes passes of this model shortest, on this machine as it is now; how many.

    torch takes one for each core. A small model's layers are too short to be shared, and a thread that another process
    keeps from its core holds up all others at the end of every layer. Tried are all cores and halves of them, unless
    the environment says how many (OMP_NUM_THREADS). For the calling thread, which must be the one that makes the
    passes; ``target`` is left empty. Only the time of passes depends on it, up to rounding.
    """
    default = torch.get_num_threads()
    if target.device.type != "cpu" or default == 1 or any(name in os.environ for name in _SAID_BY):
        return default
    if _seconds(target, _WIDTHS[0]) > _LONG_PASS_S:
        return default
    candidates = sorted(_halves(default))
    seconds: dict[int, list[list[float]]] = {count: [[] for _ in _WIDTHS] for count in candidates}
    for _ in range(_ROUNDS):  # by turns, as the machine's load changes
        for count in candidates:
            torch.set_num_threads(count)
            for found, width in zip(seconds[count], _WIDTHS, strict=True):
                _seconds(target, width)  # the first pass starts threads
                found += [_seconds(target, width) for _ in range(_PASSES)]
    best = fastest({count: [median(times) for times in found] for count, found in seconds.items()})
    torch.set_num_threads(best)
    log.info("passes use %d of %d threads", best, default)
    return best


def fastest(seconds: dict[int, list[float]]) -> int:
    """The key of the shortest times, of several kinds of pass that count alike: by their geometric mean."""
    return min(seconds, key=lambda count: float(np.log(seconds[count]).sum()))


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        yield count
        count //= 2
    yield 1


def _seconds(target: Target, width: int) -> float:
    """Of one pass of a row of ``width`` positions behind a short text."""
    width = min(width, target.max_length - 1)
    length = min(_CONTEXT, target.max_length - width)
    target.prefill([0], np.ones((1, length), np.int64), [length])
    began = time.perf_counter()
    target.forward([0], np.ones((1, width), np.int64), [width])
    took = time.perf_counter() - began
    target.rollback(0, 0)
    return took
