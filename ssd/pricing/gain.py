"""The gain of a draft at given prices: expected accepted tokens less what they cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def price_of(prices: Floats, i: int) -> float:
    """Price of the i-th token of a draft; the last one named holds for all beyond."""
    return float(prices[min(i, len(prices) - 1)])


def best_gain(chances: Floats, prices: Floats) -> float:
    """Expected accepted tokens less prices, of the draft cut where that is greatest; at least 0, of no draft.

    ``chances`` : float64[k], that each token and all before it are accepted. ``prices`` : float64[n]. O(k).
    """
    prices = prices[np.minimum(np.arange(len(chances)), len(prices) - 1)]
    return float(np.cumsum(chances - prices).max(initial=0.0))
