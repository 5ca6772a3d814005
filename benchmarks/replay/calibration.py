"""Are the estimated chances of acceptance true?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_BINS = 15


@dataclass(frozen=True, slots=True)
class Calibration:
    """Estimates against what came true, in bins of equal mass from the lowest estimates to the highest.

    ``estimated``, ``accepted`` : float64[b], means of each bin; ``num_tokens`` : int64[b].
    """

    estimated: Floats
    accepted: Floats
    num_tokens: npt.NDArray[np.int64]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean over tokens of |accepted - estimated| of their bin."""
        return float((self.num_tokens * np.abs(self.accepted - self.estimated)).sum() / self.num_tokens.sum())


def calibrate(estimates: Floats, hits: Floats, num_bins: int = NUM_BINS) -> Calibration | None:
    """Bin ``estimates``, float64[t], and ``hits``, float64[t]; None without any. O(t log t).

    Equal-mass bins as in Nguyen & O'Connor (2015, section 3); equal estimates may fall into two bins.
    """
    if not len(estimates):
        return None
    order = np.argsort(estimates, kind="stable")
    parts = [part for part in np.array_split(order, num_bins) if len(part)]
    return Calibration(
        np.array([estimates[part].mean() for part in parts]),
        np.array([hits[part].mean() for part in parts]),
        np.array([len(part) for part in parts], np.int64),
    )
