"""Slow twin of what another engine's steps cost, and of which draft tokens pay: numpy, one draft at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.drafting.protocol import Draft, Prices
from ssd.drafting.worth import Worth

_FORGETTING = 0.98
_OUTLIER = 5.0
_MIN_STEPS = 8.0
_MIN_VARIANCE = 0.05


class SlowStepCost:
    """Learns ``seconds = fixed + per_position * positions`` of steps, and cuts drafts to what pays.

    A step computes one position for each row and one for each draft token, without padding. Least squares over recent
    steps, forgotten exponentially: a change of load is followed within some fifty. Only speed depends on it.
    """

    def __init__(self) -> None:
        self.fixed_s = self.per_position_s = 0.0
        """What was learned, both >= 0; both 0 before enough steps were seen."""
        self._worth = Worth()
        self._sums = np.zeros(5)  # of 1, positions, positions^2, seconds, positions * seconds

    def observe(self, num_positions: int, num_tokens: int, seconds: float) -> None:
        """One step, which put out ``num_tokens``. One many times slower than expected was interrupted and says nothing.

        O(1).
        """
        expected = self.fixed_s + self.per_position_s * num_positions
        if 0 < _OUTLIER * expected < seconds:
            return
        self._worth.observe(num_tokens, seconds)
        x, t = float(num_positions), seconds
        self._sums = self._sums * _FORGETTING + (1.0, x, x * x, t, x * t)
        weight, positions, squares, total, products = self._sums.tolist()
        spread = weight * squares - positions * positions
        if weight < _MIN_STEPS or spread < _MIN_VARIANCE * weight * weight:
            return  # steps of one size do not tell what a position costs
        slope = (weight * products - positions * total) / spread
        self.per_position_s = min(max(0.0, slope), total / positions)
        self.fixed_s = (total - self.per_position_s * positions) / weight

    def prices(self, num_rows: int) -> Prices | None:
        """What a drafted token costs, float64[1], in output tokens; None while it is not known."""
        if self.per_position_s == 0.0:
            return None
        seconds = self.fixed_s + self.per_position_s * num_rows
        return np.array([self._worth.price(num_rows, seconds, self.per_position_s)])

    def paying(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The beginnings of ``drafts``, chains and one a row, that together give most: see `Worth`.

        The i-th token of a draft adds Pi to the expected output, the estimated chance that it and all before it are
        accepted. Pi never grows along a draft, so the best m tokens of all rows are beginnings, and m is found by
        trying all. Drafts without estimates stay whole. O(n log n) in the tokens drafted.
        """
        if self.per_position_s == 0.0 or any(d.probabilities is None and len(d.token_ids) for d in drafts):
            return list(drafts)
        gains = [draft.chances() if draft.probabilities is not None else np.empty(0) for draft in drafts]
        best_first = np.sort(np.concatenate(gains))[::-1] if gains else np.empty(0)
        expected = np.full(len(best_first) + 1, float(len(drafts)))
        expected[1:] += np.cumsum(best_first)
        seconds = self.fixed_s + self.per_position_s * (len(drafts) + np.arange(len(expected), dtype=np.float64))
        num_paying = self._worth.best(expected, seconds)
        if num_paying == len(best_first):
            return list(drafts)
        least = best_first[num_paying - 1] if num_paying else np.inf
        return [draft.cut(int((gain >= least).sum())) for draft, gain in zip(drafts, gains, strict=True)]
