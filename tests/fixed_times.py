"""Passes of fixed length: in tests, which drafts pay does not hang on how busy the machine is.

An engine cuts its drafts to what pays by what it measures passes to take, and asks seldom for drafts that take long to
make. On a busy machine that is anything. So what it is told here depends on the size of a pass alone, and asking takes
nothing.

Servers that are processes of their own measure as they always do, but for one that is started as
``python -m tests.fixed_times`` instead of ``python -m server``.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from server.__main__ import main as serve
from ssd.engine import speculation
from ssd.engine.draft_buffers import learn_from_pass
from ssd.engine.pass_timing import Size, timed_passes
from ssd.model.target import Target

_FIXED_S = 1e-3
_PER_POSITION_S = 2e-5
"""A drafted token costs a fiftieth of a pass, as on a device that is wide beside the model."""

unfixed_passes = timed_passes
"""What `fix_times` replaces."""


def seconds_of(num_positions: int) -> float:
    """What a pass over so many positions is said to take."""
    return _FIXED_S + _PER_POSITION_S * num_positions


def fix_times(patch: pytest.MonkeyPatch) -> None:
    """Have all engines of this process be told fixed times, until ``patch`` is undone."""

    def learn_fixed(*told: Any) -> int:
        batch, buffer, settings, sizes, paths, width, num_tokens, seconds = told
        fixed = seconds_of(len(sizes) * width) if seconds else 0.0  # it is 0 if a prefill was in the pass
        return learn_from_pass(batch, buffer, settings, sizes, paths, width, num_tokens, fixed)

    def timed(target: Target, max_width: int) -> dict[Size, float]:
        return {size: seconds_of(size[0] * size[1]) for size in unfixed_passes(target, max_width)}

    patch.setattr(speculation, "learn_from_pass", learn_fixed)
    patch.setattr(speculation, "timed_passes", timed)
    patch.setattr(speculation, "time", SimpleNamespace(perf_counter=lambda: 0.0))


def measure_asking(patch: pytest.MonkeyPatch) -> None:
    """Have engines measure what asking for drafts takes after all, until ``patch`` is undone."""
    patch.setattr(speculation, "time", time)


if __name__ == "__main__":
    fix_times(pytest.MonkeyPatch())
    sys.exit(serve())
