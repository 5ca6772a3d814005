"""The choice of the number of CPU threads for forward passes."""

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

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CONTEXT = 64
_WIDTHS = (1, 8)
_ROUNDS = 12
# The time limit in seconds after which no further round of measurements starts: a busy machine must not delay the
# start.
_MAX_S = 3.0
# Fewer threads must take at most this share of the time of all threads. A short burst of other work during a few rounds
# then does not cost half of the speed until the next start.
_CLEARLY_FASTER = 0.9
# The maximum size of a small model's weights. Larger models use all threads, and measuring would only delay the start.
_MAX_BYTES = 2_000_000_000


def is_small(model: PreTrainedModel) -> bool:
    """Return whether a model is on a CPU and has at most 2 GB of weights, so that using all cores may be slower."""
    return model.device.type == "cpu" and weight_bytes(model) <= _MAX_BYTES


@contextmanager
def one_thread_if_small(model: PreTrainedModel) -> Iterator[None]:
    """Run a small model's forward passes in this context on one CPU thread.

    Startup tests run before `tune_threads` has chosen a number of threads. With several threads they would be many
    times slower while other processes are busy, because the threads wait for each other at the end of every layer.
    """
    before = torch.get_num_threads()
    if is_small(model):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tune_threads(target: Target) -> int:
    """Set the number of CPU threads with which this model's forward passes are fastest at present, and return it.

    By default torch uses one thread per core. In a small model, layers are too short for so many threads. If other
    processes are busy too, one delayed thread delays all others at the end of every layer. So for a small model, the
    time with all cores, half of them and so on is measured, unless OMP_NUM_THREADS or MKL_NUM_THREADS is set.

    Torch sets the number for the calling thread only, so this must be the thread that runs the forward passes. Slot 0
    of ``target`` must be free, and is free afterwards. Call `verify_batch_invariance` afterwards, because the number of
    threads may change rounding.
    """
    default = torch.get_num_threads()
    if not is_small(target.model) or default == 1 or any(name in os.environ for name in _VARIABLES):
        return default
    counts = [default >> halvings for halvings in range(default.bit_length())]
    seconds: dict[int, list[list[float]]] = {count: [[] for _ in _WIDTHS] for count in counts}
    began = time.perf_counter()
    for _ in range(_ROUNDS):  # alternately, because the machine's load changes
        for count in counts:
            torch.set_num_threads(count)
            _time_pass(target, _WIDTHS[0])  # the first pass starts threads
            for found, width in zip(seconds[count], _WIDTHS, strict=True):
                found.append(_time_pass(target, width))
        if time.perf_counter() - began > _MAX_S:
            break
    target.rollback(0, 0)
    # The geometric mean gives both widths the same weight.
    means = {count: float(np.exp(np.log([median(times) for times in seconds[count]]).mean())) for count in counts}
    best = min(counts, key=means.__getitem__)
    if means[best] > _CLEARLY_FASTER * means[default]:
        best = default
    torch.set_num_threads(best)
    log.info("forward passes use %d of %d CPU threads", best, default)
    return best


def _time_pass(target: Target, width: int) -> float:
    length = max(1, min(_CONTEXT, target.max_length - max(_WIDTHS)))
    width = min(width, target.max_length - length)
    if not target.length(0):
        target.prefill([0], np.ones((1, length), np.int64), [length])
    began = time.perf_counter()
    target.forward([0], np.ones((1, width), np.int64), [width])
    took = time.perf_counter() - began
    target.rollback(0, length if target.can_roll_back else 0)
    return took
