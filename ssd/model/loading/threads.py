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
    """Return whether one CPU thread computes a pass over a dozen positions in about half a second or less."""
    return model.device.type == "cpu" and weight_bytes(model) <= _MAX_BYTES


@contextmanager
def one_thread_if_small(model: PreTrainedModel) -> Iterator[None]:
    """Use one CPU thread for a small model's forward passes in this context, until `tune_threads` has measured.

    If other processes are busy, several threads wait for each other at the end of every layer, which makes the start of
    the server many times slower.
    """
    before = torch.get_num_threads()
    if is_small(model):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tune_threads(target: Target) -> int:
    """Set and return the number of CPU threads that currently makes forward passes of this model fastest.

    torch uses one thread per core. A small model's layers are too short to be shared by threads, and a thread whose
    core is used by another process delays all other threads at the end of every layer. So for a small model all cores,
    half of them and so on are measured, unless the environment sets the number (OMP_NUM_THREADS). The number is set for
    the calling thread, which must be the thread that runs the passes; ``target`` is left empty. Call
    `verify_batch_invariance` afterwards, because with more threads a product may be split in another way.
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
