"""What a drafted token costs, in tokens accepted elsewhere: how much a drafter is told to draft."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from benchmarks.replay.cost import CostCurve
from ssd.drafting.protocol import Prices

_FORGETTING = 0.99


class Pricing(Protocol):
    """Gives the prices of each step and hears what came of it."""

    def prices(self) -> Prices | None:
        """`DraftRequest.prices` of the next draft."""
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

    def learn(self, num_drafted: int, num_output: int) -> None:
        """It stays what it is."""


class CurvePrice:
    """What the wider pass costs more, times the tokens that such time gives elsewhere.

    The i-th token costs rate * (cost(i + 1) - cost(i)); rate is tokens per unit of cost so far, over all requests,
    older steps forgotten exponentially. It begins with plain decoding's, 1.
    """

    def __init__(self, curve: CostCurve, max_draft: int) -> None:
        self._costs = curve.upto(max_draft + 1)
        self._more = np.diff(self._costs)[1:] if max_draft else np.zeros(1)
        self._num_tokens = self._cost = 1.0

    def prices(self) -> Prices | None:
        prices: Prices = np.maximum(0.0, self._num_tokens / self._cost * self._more)  # noise may make a curve fall
        return prices

    def learn(self, num_drafted: int, num_output: int) -> None:
        self._num_tokens = _FORGETTING * self._num_tokens + num_output
        self._cost = _FORGETTING * self._cost + float(self._costs[1 + num_drafted])
