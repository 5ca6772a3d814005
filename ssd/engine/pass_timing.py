"""Measure the latency of forward passes of several sizes before any request is served."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import product

import numpy as np

from ssd.model.sampling.sampler import greedy_tokens
from ssd.model.target import Target

Size = tuple[int, int]
"""The size of a forward pass: the number of sequences, and the number of tokens of each sequence."""

_ROWS = 8
_WIDTHS = (1, 2, 5)
_SAMPLES = 3  # the minimum number of samples of each size, unless passes are very slow
_USUAL_SAMPLES = 5
_USUAL_S = 2.0  # no more than `_SAMPLES` samples are taken after this time
_LONGEST_S = 10.0  # no further sample is taken after this time


def timed_passes(target: Target, max_width: int) -> dict[Size, float]:
    """Measure the seconds of forward passes with 1 and with 8 sequences and of several widths, for the cost model.

    The passes have up to ``max_width`` tokens per sequence, and at most as many sequences as the target has slots. All
    sizes are measured alternately, and the fastest sample of each size is used, because other work on the machine can
    only make passes slower. All slots of the target must be free.
    """
    sizes = list(product({1, min(_ROWS, target.num_slots)}, {*(w for w in _WIDTHS if w < max_width), max_width}))
    fastest = dict.fromkeys(sizes, math.inf)
    started = time.perf_counter()
    for sample in range(1 + _USUAL_SAMPLES):
        for num_rows, width in sizes:
            seconds = _time_pass(target, num_rows, width)
            if sample:  # the first one allocates
                fastest[num_rows, width] = min(fastest[num_rows, width], seconds)
        passed = time.perf_counter() - started
        if sample and passed > (_USUAL_S if sample >= _SAMPLES else _LONGEST_S):
            break
    return plausible_times(fastest)


def _time_pass(target: Target, num_rows: int, width: int) -> float:
    slots, tokens = list(range(num_rows)), np.ones((num_rows, width), np.int64)
    started = time.perf_counter()
    greedy_tokens(target.forward(slots, tokens, [width] * num_rows).logits)
    seconds = time.perf_counter() - started
    for slot in slots:
        target.rollback(slot, 0)
    return seconds


def plausible_times(seconds: Mapping[Size, float]) -> dict[Size, float]:
    """Lower the times of passes that are implausibly long because other work interrupted every sample.

    If a larger pass took less time, its time is used. If several smaller passes that together have its rows and width
    took less time in total, that total is used. O(sizes squared).
    """

    def num_passes(size: Size, other: Size) -> int:
        return math.ceil(size[0] / other[0]) * math.ceil(size[1] / other[1])

    return {size: min(num_passes(size, other) * s for other, s in seconds.items()) for size in seconds}
