"""What a draft model's pass takes, learned while it runs."""

from __future__ import annotations

import numpy as np

_FORGETTING = 0.98
_OUTLIER = 5.0


class PassSeconds:
    """Seconds of a pass of one position a row: a part for the pass and a part for each row, least squares over recent
    passes.

    A pass that took many times what was expected was probably interrupted and counts as slow, but not as that slow.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((2, 3))  # (1, rows) by (1, rows, seconds), the older the less

    def of(self, num_rows: int) -> float:
        """Expected seconds of a pass of ``num_rows`` rows, >= 0; 0 before any was seen."""
        (passes, rows, seconds), (_, squares, products) = self._sums
        if passes == 0:
            return 0.0
        spread = squares - rows * rows / passes
        slope = (products - rows * seconds / passes) / spread if spread > 1e-6 * squares else 0.0
        slope = min(max(slope, 0.0), seconds / rows)  # neither part is negative
        return float(seconds / passes + slope * (num_rows - rows / passes))

    def observe(self, num_rows: int, seconds: float) -> None:
        """One pass."""
        expected = self.of(num_rows)
        if expected:
            seconds = min(seconds, _OUTLIER * expected)
        features = np.array([1.0, num_rows])
        self._sums = _FORGETTING * self._sums + np.outer(features, np.append(features, seconds))
