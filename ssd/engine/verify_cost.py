"""How many draft tokens pay, given what a pass costs at the current batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.drafting.protocol import Draft, Prices
from ssd.drafting.worth import Worth
from ssd.model.target import Target

_FORGETTING = 0.98
_OUTLIER = 5.0
_RIDGE = 1e-9
_FIT_EVERY = 16
_LASTING_SHARE = 0.05
_CALIBRATION_ROWS = 8
_CALIBRATION_WIDTHS = (1, 2, 5)
_CALIBRATION_PASSES = 4


class PassTime(NamedTuple):
    """Seconds of a pass: ``fixed + per_position * rows * width``, and ``wide`` more when the width exceeds 1."""

    fixed: float
    per_position: float
    wide: float

    def of(self, num_rows: int, width: int) -> float:
        """Seconds for a pass of ``num_rows`` rows and ``width`` positions each."""
        return self.fixed + self.per_position * num_rows * width + self.wide * (width > 1)

    def up_to(self, num_rows: int, width: int) -> npt.NDArray[np.float64]:
        """Seconds for passes of 1, 2, ... ``width`` positions, float64[width]."""
        seconds = np.arange(1.0, width + 1)
        seconds *= self.per_position * num_rows
        seconds += self.fixed
        seconds[1:] += self.wide
        return seconds


class Sums(NamedTuple):
    """What least squares needs of passes: sums of features, of their products and of those with the seconds."""

    passes: float
    positions: float
    wide: float
    positions_squared: float
    wide_positions: float
    seconds: float
    positions_seconds: float
    wide_seconds: float

    def plus(self, weight: float, other: Sums) -> Sums:
        """These, and ``weight`` times others."""
        return Sums(*[own + weight * more for own, more in zip(self, other, strict=True)])


class VerifyCost:
    """Learns what a pass takes while serving, and cuts drafts to what pays.

    A pass computes rows * width positions, padding included. On a CPU time is close to linear in them, but for a step
    from one position to two, where products of a matrix and a vector become products of matrices; where a GPU is flat,
    both come out near 0 and nothing is cut. Least squares over the recent passes, which are forgotten
    exponentially, and with little weight those of the warm-up, which are kept for the sizes not seen lately: a change
    of load or context length is followed within some fifty passes. Only speed depends on it, never a token.
    """

    def __init__(self) -> None:
        self._lasting = self._recent = Sums(*[0.0] * len(Sums._fields))
        self._num_passes = 0
        self._pass_time: PassTime | None = None
        self._worth = Worth()

    @property
    def pass_time(self) -> PassTime | None:
        """What has been learned, every part >= 0; None before enough passes of different size have been seen."""
        return self._pass_time

    def calibrate(self, num_rows: int, width: int, seconds: float) -> None:
        """One pass of the warm-up."""
        self._lasting = self._lasting.plus(1.0, _terms(num_rows, width, seconds))
        self._pass_time = _fit(self._lasting)

    def begin(self) -> None:
        """The warm-up is over: what it put out and took says nothing about requests to come."""
        self._worth.forget()

    def observe(self, num_rows: int, width: int, num_tokens: int, seconds: float) -> None:
        """One pass, which put out ``num_tokens``.

        One many times slower than expected was interrupted and says nothing about its size.
        """
        if self._pass_time is not None and seconds > _OUTLIER * self._pass_time.of(num_rows, width):
            return
        self._worth.observe(num_tokens, seconds)
        self._recent = _terms(num_rows, width, seconds).plus(_FORGETTING, self._recent)
        self._num_passes += 1
        if self._num_passes % _FIT_EVERY == 0:
            # Real passes also sample, over longer contexts: the warm-up only stands in for sizes not seen lately.
            self._pass_time = _fit(self._recent.plus(_LASTING_SHARE, self._lasting))

    def prices(self, num_rows: int) -> Prices | None:
        """What a drafted token of a row costs, float64[1], in output tokens; None while it is not known.

        All rows are taken to draft alike. That a pass of two positions costs more than its second position is left to
        `paying_width`, which sees whole drafts.
        """
        pass_time = self._pass_time
        if pass_time is None:
            return None
        return np.array([self._worth.price(num_rows, pass_time.of(num_rows, 1), pass_time.per_position)])

    def paying_width(self, drafts: Sequence[Draft], shares: Sequence[float]) -> int:
        """Draft tokens per row that give most, see `Worth`; drafts without estimates are kept whole.

        With the draft cut to w tokens a row is expected to emit 1 + s (P1 + ... + Pw) tokens, where Pi is the estimated
        chance that its i-th token is accepted and s, of ``shares``, how far the row's estimates are trusted. Every row
        is padded to the widest. O(tokens drafted).
        """
        widest = max((len(draft.token_ids) for draft in drafts), default=0)
        if widest == 0 or any(d.probabilities is None and len(d.token_ids) for d in drafts):
            return widest
        pass_time = self._pass_time
        if pass_time is None:
            return widest
        gain = np.zeros(widest + 1)
        for draft, share in zip(drafts, shares, strict=True):
            if draft.probabilities is not None:
                gain[1 : len(draft.token_ids) + 1] += share * draft.chances()
        expected = len(drafts) + np.cumsum(gain)
        return self._worth.best(expected, pass_time.up_to(len(drafts), widest + 1))


def calibrate(cost: VerifyCost, target: Target, max_width: int) -> None:
    """Time passes of several widths at two batch sizes, on free slots."""
    for num_rows in {1, min(_CALIBRATION_ROWS, target.num_slots)}:
        slots = list(range(num_rows))
        for width in {*(width for width in _CALIBRATION_WIDTHS if width < max_width), max_width}:
            tokens = np.ones((num_rows, width), np.int64)
            for attempt in range(_CALIBRATION_PASSES + 1):
                started = time.perf_counter()
                target.forward(slots, tokens, [width] * num_rows).logits.argmax(-1).cpu()
                if attempt:  # the first one allocates
                    cost.calibrate(num_rows, width, time.perf_counter() - started)
                for slot in slots:
                    target.rollback(slot, 0)
    cost.begin()


def _fit(sums: Sums) -> PassTime | None:
    """Least squares with no part below 0: a part that comes out negative is left out and the others fitted again."""
    s = sums
    moments = np.array([
        [s.passes, s.positions, s.wide],
        [s.positions, s.positions_squared, s.wide_positions],
        [s.wide, s.wide_positions, s.wide],
    ])  # fmt: skip
    products = np.array([s.seconds, s.positions_seconds, s.wide_seconds])
    if np.linalg.matrix_rank(moments) < 3:
        return None
    scale = np.sqrt(np.diag(moments))
    parts, used = np.zeros(3), [0, 1, 2]
    while used:
        grid = np.ix_(used, used)
        scaled = (moments / np.outer(scale, scale))[grid] + _RIDGE * np.eye(len(used))
        solution = np.linalg.solve(scaled, (products / scale)[used])
        parts[:] = 0.0
        parts[used] = solution / scale[used]
        if solution.min() >= 0:
            break
        del used[int(solution.argmin())]
    return PassTime(*(float(part) for part in parts))


def _terms(num_rows: int, width: int, seconds: float) -> Sums:
    positions, wide = float(num_rows * width), float(width > 1)
    return Sums(
        1.0, positions, wide, positions * positions, wide * positions, seconds, positions * seconds, wide * seconds
    )
