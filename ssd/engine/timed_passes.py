"""Timed passes: what passes of several sizes take on free slots, before the first request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product

import numpy as np

from ssd.model.target import Target

_ROWS = 8
_WIDTHS = (1, 2, 5)
_TIMES = 4
_MOST_S = 2.0
"""After which no size is timed again: what long passes take shows in one."""


def timed_passes(target: Target, max_width: int) -> Iterator[tuple[int, int, float]]:
    """Rows, positions of each row and seconds of passes of several widths at two batch sizes, each at least once."""
    all_rows = {1, min(_ROWS, target.num_slots)}
    widths = {*(width for width in _WIDTHS if width < max_width), max_width}
    began = time.perf_counter()
    for attempt in range(_TIMES + 1):
        for num_rows, width in product(all_rows, widths):
            slots, tokens = list(range(num_rows)), np.ones((num_rows, width), np.int64)
            started = time.perf_counter()
            target.forward(slots, tokens, [width] * num_rows).logits.argmax(-1).cpu()
            seconds = time.perf_counter() - started
            for slot in slots:
                target.rollback(slot, 0)
            if attempt:  # the first one allocates
                yield num_rows, width, seconds
        if attempt and time.perf_counter() - began > _MOST_S:
            return
