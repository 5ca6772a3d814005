"""The price list of an engine: what its passes take, and so what a drafted token costs and how much of a draft pays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Records
from ssd.pricing.pass_costs import (
    PassCosts,
    begin_serving,
    calibrate_pass,
    num_verified,
    observe_pass,
    pass_seconds,
    token_price,
)
from ssd.pricing.rate import FORGETTING

Floats = npt.NDArray[np.float64]


class PassTime(NamedTuple):
    """Seconds of a pass: ``fixed + per_position * positions``, and ``wide`` more with several positions of a row."""

    fixed: float
    per_position: float
    wide: float


class PriceList:
    """Learns what a pass takes while serving, and cuts drafts to what pays.

    A pass computes positions: one for each row and one for each draft token, padding included where rows are padded. On
    a CPU time is close to linear in them, but for a step from one position of a row to two, where products of a matrix
    and a vector become products of matrices; where a GPU is flat, both come out near 0 and nothing is cut. The estimate
    is a least squares fit over recent passes, which are forgotten exponentially, so a change of load or context length
    is followed within some fifty passes. A measured time that contradicts the estimate replaces it at once. While a
    likely draft is withheld because of its cost, it is verified now and then all the same, see `PassCosts`: a wrong
    estimate does not last. `joint_rate` says which width gives most. Only speed depends on it, never a token.
    """

    def __init__(self) -> None:
        self._records = Records(PassCosts)
        self._costs = self._records[0]
        self._costs.rate.forgetting = FORGETTING
        self.address = self._records.address
        """Of the `PassCosts`, for kernels."""

    @property
    def pass_time(self) -> PassTime | None:
        """What has been learned, every part >= 0; None before enough passes of different size have been seen."""
        costs = self._costs
        return PassTime(costs.fixed, costs.per_position, costs.wide) if costs.is_known else None

    def seconds(self, num_positions: int, *, is_wide: bool = False) -> float:
        """Expected seconds of a pass, >= 0; 0 before enough passes were seen.

        ``is_wide`` : whether there are several positions of a row.
        """
        return pass_seconds(self.address, num_positions, is_wide)

    def calibrate(self, num_positions: int, seconds: float, *, is_wide: bool) -> None:
        """Record a pass timed at start-up."""
        calibrate_pass(self.address, num_positions, is_wide, seconds)

    def begin(self) -> None:
        """End the warm-up: of all that it did, only what was calibrated says something about requests to come."""
        begin_serving(self.address)
        # Compiled before the first request needs it.
        num_verified(self.address, 1, 1, np.zeros(1))

    def observe(self, num_positions: int, num_tokens: int, seconds: float, *, is_wide: bool = False) -> None:
        """Learn from a pass that put out ``num_tokens``. O(1).

        One many times slower than expected was interrupted and says nothing about its size.
        """
        observe_pass(self.address, num_positions, is_wide, num_tokens, seconds)

    def price(self, num_rows: int) -> float:
        """What a drafted token of a row costs in output tokens; 0 while it is not known, and where it costs nothing.

        All rows are taken to draft alike. That a pass of two positions costs more than its second position is left to
        `paying_width`, which sees whole drafts.
        """
        return token_price(self.address, num_rows)

    def paying_width(self, gains: Floats, num_rows: int = 1) -> int:
        """Return how many draft tokens of each row to verify in a pass of ``num_rows``, all padded to as many.

        Those that give most, or more if the cost of longer drafts is to be measured again. ``gains`` : float64[n],
        output tokens that the i-th drafted token of the rows is expected to add: the chance, in all rows together, that
        it and all before it are accepted. All n before it is known what passes take. O(n).
        """
        return num_verified(self.address, num_rows, num_rows, gains) if self._costs.is_known else len(gains)

    @property
    def num_withheld(self) -> int:
        """Passes since likely drafts were first withheld because of their estimated cost; 0 if none are."""
        return self._costs.num_withheld

    def relative_cost(self, width: int) -> float:
        """Return the estimated time of a pass of ``width`` tokens of one row, in passes of one token; 0 if unknown."""
        plain = self.seconds(1)
        return self.seconds(width, is_wide=width > 1) / plain if plain > 0.0 else 0.0
