"""How many threads a pass on a CPU should use."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch
from transformers import PreTrainedModel

from ssd.model.loading.memory import weight_bytes
from ssd.model.target import Target

log = logging.getLogger(__name__)

_SAID_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CONTEXT = 64
_WIDTHS = (1, 8)
_ROUNDS = 12
_MOST_S = 1.0
"""Of trying, after which no round is begun: a start must not wait for a machine that is too busy to say."""
_MOST_BYTES = 2_000_000_000
"""Of a small model's weights. A pass over more has work for all threads; trying fewer would only delay the start."""


def is_small(model: PreTrainedModel) -> bool:
    """Whether one thread makes passes over a dozen positions in about half a second or less."""
    return model.device.type == "cpu" and weight_bytes(model) <= _MOST_BYTES


@contextmanager
def one_thread_if_small(model: PreTrainedModel) -> Iterator[None]:
    """One thread for the passes of a start that nobody has tried threads for yet.

    Beside other work several wait for each other at the end of every layer, and the start takes many times longer.
    """
    before = torch.get_num_threads()
    if is_small(model):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def settle_threads(target: Target) -> int:
    """Use the number of threads that makes passes of this model shortest, on this machine as it is now; how many.

    torch takes one for each core. A small model's layers are too short to be shared, and a thread that another process
    keeps from its core holds up all others at the end of every layer. Tried are all cores and halves of them, for a
    small model and unless the environment says how many (OMP_NUM_THREADS). For the calling thread, which must be the
    one that makes the passes; ``target`` is left empty. `settle_exactness` follows: more threads may share a product in
    another way.
    """
    default = torch.get_num_threads()
    if not is_small(target.model) or default == 1 or any(name in os.environ for name in _SAID_BY):
        return default
    counts = [default >> halvings for halvings in range(default.bit_length())]
    seconds: dict[int, list[list[float]]] = {count: [[] for _ in _WIDTHS] for count in counts}
    began = time.perf_counter()
    for _ in range(_ROUNDS):  # by turns, as the machine's load changes
        for count in counts:
            torch.set_num_threads(count)
            _seconds(target, _WIDTHS[0])  # the first pass starts threads
            for found, width in zip(seconds[count], _WIDTHS, strict=True):
                found.append(_seconds(target, width))
        if time.perf_counter() - began > _MOST_S:
            break
    target.rollback(0, 0)
    # Kinds of pass count alike.
    best = min(counts, key=lambda count: float(np.log([median(times) for times in seconds[count]]).sum()))
    torch.set_num_threads(best)
    log.info("passes use %d of %d threads", best, default)
    return best


def _seconds(target: Target, width: int) -> float:
    """Of one pass of a row of ``width`` positions behind a short text."""
    length = max(1, min(_CONTEXT, target.max_length - max(_WIDTHS)))
    width = min(width, target.max_length - length)
    if not target.length(0):
        target.prefill([0], np.ones((1, length), np.int64), [length])
    began = time.perf_counter()
    target.forward([0], np.ones((1, width), np.int64), [width])
    took = time.perf_counter() - began
    target.rollback(0, length if target.can_roll_back else 0)
    return took
