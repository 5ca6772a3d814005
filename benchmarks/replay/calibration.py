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

    Equal-mass bins as in Nguyen & O'Connor (2015, section 3), but equal estimates share a bin, so there can be fewer.
    """
    if not len(estimates):
        return None
    num_smaller = np.searchsorted(np.sort(estimates), estimates)
    bins = num_smaller * num_bins // len(estimates)
    num_tokens = np.bincount(bins)
    used = num_tokens > 0
    estimated, accepted = (np.bincount(bins, weights=values)[used] / num_tokens[used] for values in (estimates, hits))
    return Calibration(estimated, accepted, num_tokens[used])
