"""Timed passes: what passes of several sizes take on free slots, before the first request."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from ssd.model.target import Target

_ROWS = 8
_WIDTHS = (1, 2, 5)
_TIMES = 4


def timed_passes(target: Target, max_width: int) -> Iterator[tuple[int, int, float]]:
    """Rows, positions of each row and seconds of passes of several widths at two batch sizes."""
    for num_rows in {1, min(_ROWS, target.num_slots)}:
        slots = list(range(num_rows))
        for width in {*(width for width in _WIDTHS if width < max_width), max_width}:
            tokens = np.ones((num_rows, width), np.int64)
            for attempt in range(_TIMES + 1):
                started = time.perf_counter()
                target.forward(slots, tokens, [width] * num_rows).logits.argmax(-1).cpu()
                seconds = time.perf_counter() - started
                for slot in slots:
                    target.rollback(slot, 0)
                if attempt:  # the first one allocates
                    yield num_rows, width, seconds
