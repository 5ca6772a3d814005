"""What a drafted token costs, in tokens accepted elsewhere: how much a drafter is told to draft."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cache_builder.replay.cost import CostCurve, Floats
from ssd.drafting.protocol import Draft, Prices
from ssd.pricing.rate import Rate


class Pricing(Protocol):
    """Gives the prices of each step and hears what came of it."""

    def prices(self) -> Prices | None:
        """`DraftRequest.prices` of the next draft."""
        ...

    def paying(self, draft: Draft) -> Draft:
        """What of the draft is verified."""
        ...

    def learn(self, num_drafted: int, num_output: int) -> None:
        """A step verified ``num_drafted`` tokens and emitted ``num_output``."""
        ...


class FixedPrice:
    """The same price for every token; None leaves it to the drafter."""

    def __init__(self, price: float | None) -> None:
        self._prices = None if price is None else np.array([price])

    def prices(self) -> Prices | None:
        return self._prices

    def paying(self, draft: Draft) -> Draft:
        return draft

    def learn(self, num_drafted: int, num_output: int) -> None:
        """It stays what it is."""


class CurvePrice:
    """Draft as `Rate` says, where passes take what a curve says."""

    def __init__(self, curve: CostCurve, max_draft: int) -> None:
        self._costs = curve.upto(max_draft + 1)[1:]
        self._more = rising(self._costs)
        self._rate = Rate()

    def prices(self) -> Prices | None:
        return np.array([self._rate.price(1, self._costs[0], more) for more in self._more])

    def paying(self, draft: Draft) -> Draft:
        if draft.probabilities is None:
            return draft
        expected = np.append(1.0, 1.0 + np.cumsum(draft.chances()))
        return draft.cut(self._rate.best(expected, self._costs[: len(expected)]))

    def learn(self, num_drafted: int, num_output: int) -> None:
        self._rate.observe(num_output, float(self._costs[num_drafted]))


def rising(costs: Floats) -> Floats:
    """What each token more costs on the greatest convex curve below ``costs``: prices never fall along a draft.

    float64[max(1, n - 1)] of float64[n]. A measured curve has steps and noise; a draft may pay beyond a steep part.
    """
    corners = [0]
    for width in range(1, len(costs)):
        while len(corners) > 1 and _slope(costs, *corners[-2:]) >= _slope(costs, corners[-1], width):
            corners.pop()
        corners.append(width)
    below = np.interp(np.arange(len(costs)), corners, costs[corners])
    return np.maximum(0.0, np.diff(below)) if len(costs) > 1 else np.zeros(1)


def _slope(costs: Floats, begin: int, end: int) -> float:
    return float(costs[end] - costs[begin]) / (end - begin)
