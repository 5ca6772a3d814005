"""How many draft tokens pay, given what a pass costs at the current batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.drafting.protocol import Draft
from ssd.target.target import Target

_FORGETTING = 0.98
_MIN_OBSERVATIONS = 12
_OUTLIER = 5.0
_MIN_SPREAD = 1e-3
_CALIBRATION_ROWS = 8
_CALIBRATION_PASSES = 4


class VerifyCost:
    """Learns the time of a pass as ``fixed + per_position * positions`` while serving, and cuts drafts to what pays.

    A pass computes rows * width positions, padding included. On a CPU time is close to linear in them; where a GPU is
    flat, the slope comes out near 0 and nothing is cut. Least squares over the passes of the warm-up, which are kept,
    and the recent ones, which are forgotten exponentially: a change of load or context length is followed within some
    fifty passes. Only speed depends on it, never a token.
    """

    def __init__(self) -> None:
        # Sums of 1, positions, positions^2, seconds, positions * seconds.
        self._lasting = np.zeros(5)
        self._recent = np.zeros(5)

    def calibrate(self, num_positions: int, seconds: float) -> None:
        """One pass of the warm-up."""
        self._lasting += _terms(num_positions, seconds)

    def observe(self, num_positions: int, seconds: float) -> None:
        """One pass. A pass many times slower than expected was interrupted and says nothing about its size."""
        line = self.line()
        if line is not None and seconds > _OUTLIER * (line[0] + line[1] * num_positions):
            return
        self._recent = self._recent * _FORGETTING + _terms(num_positions, seconds)

    def line(self) -> tuple[float, float] | None:
        """(fixed, per_position) in seconds, both >= 0; None before passes of different size have been seen."""
        weight, x, xx, y, xy = self._lasting + self._recent
        if weight < _MIN_OBSERVATIONS:
            return None
        spread = xx - x * x / weight
        if spread <= _MIN_SPREAD * xx:
            return None
        slope = max(0.0, (xy - x * y / weight) / spread)
        return max(0.0, (y - slope * x) / weight), slope

    def paying_width(self, drafts: Sequence[Draft]) -> int:
        """Draft tokens per row that give most expected tokens per second; drafts without estimates are kept whole.

        With the draft cut to w tokens a row is expected to emit 1 + P1 + ... + Pw tokens, where Pi is the estimated
        chance that its first i tokens are all accepted. Every row is padded to the widest. O(tokens drafted).
        """
        widest = max((len(draft.token_ids) for draft in drafts), default=0)
        line = self.line()
        if widest == 0 or line is None or any(d.probabilities is None and len(d.token_ids) for d in drafts):
            return widest
        gain = np.zeros(widest + 1)
        for draft in drafts:
            if draft.probabilities is not None:
                gain[1 : len(draft.token_ids) + 1] += np.cumprod(draft.probabilities)
        expected = len(drafts) + np.cumsum(gain)
        seconds = line[0] + line[1] * len(drafts) * np.arange(1, widest + 2)
        return int(np.argmax(expected / np.maximum(seconds, 1e-9)))


def calibrate(cost: VerifyCost, target: Target, width: int) -> None:
    """Time passes of 1 and of ``width`` positions at two batch sizes, on free slots."""
    for batch_size in {1, min(_CALIBRATION_ROWS, target.num_slots)}:
        slots = list(range(batch_size))
        for positions in (1, width):
            tokens = np.ones((batch_size, positions), np.int64)
            for attempt in range(_CALIBRATION_PASSES + 1):
                started = time.perf_counter()
                target.forward(slots, tokens, [positions] * batch_size).argmax(-1).cpu()
                if attempt:  # the first one allocates
                    cost.calibrate(tokens.size, time.perf_counter() - started)
                for slot in slots:
                    target.rollback(slot, 0)


def _terms(num_positions: int, seconds: float) -> npt.NDArray[np.float64]:
    return np.array([1.0, num_positions, num_positions**2, seconds, num_positions * seconds])
