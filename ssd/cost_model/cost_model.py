"""Estimate what passes and draft tokens cost an engine, and how long drafts should be."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.cost_model.pass_costs import (
    PassCostRecord,
    calibrate_pass,
    draft_token_cost,
    num_steps_to_verify,
    observe_pass,
    pass_seconds,
    start_serving,
)
from ssd.cost_model.throughput import FORGETTING
from ssd.jit.addresses import Records

Floats = npt.NDArray[np.float64]


class PassTimeModel(NamedTuple):
    """The seconds of a pass: ``fixed + per_position * positions``, and ``wide`` more if a row has several positions."""

    fixed: float
    per_position: float
    wide: float


class CostModel:
    """Learns the time of passes while serving, and chooses the length of drafts.

    A pass computes positions: one for each row and one for each draft token, including padding if rows are padded. On a
    CPU its time is close to linear in them, except for the step from one position per row to two, where products of a
    matrix and a vector become products of matrices. Where the time of a GPU is constant, both coefficients become about
    0, and nothing is cut. The estimate is a least-squares fit over recent passes with exponential forgetting, so a
    change of load or context length is followed within about fifty passes. A measured time that contradicts the
    estimate replaces it at once. `PassCostRecord` explains probes, and `combined_rate` which length is best. Only speed
    depends on it, never a token.
    """

    def __init__(self) -> None:
        self._records = Records(PassCostRecord)
        self._costs = self._records[0]
        self._costs.rate.forgetting = FORGETTING
        self.address = self._records.address
        """The address of the `PassCostRecord`."""

    @property
    def pass_time(self) -> PassTimeModel | None:
        """Return the estimate, each part >= 0; None before enough passes of different size were measured."""
        costs = self._costs
        return PassTimeModel(costs.fixed, costs.per_position, costs.wide) if costs.is_known else None

    def seconds(self, num_positions: int, *, is_wide: bool = False) -> float:
        """Return the expected seconds of a pass, >= 0; 0 before enough passes were measured.

        Args:
            num_positions: The number of its positions.
            is_wide: Whether a row has several positions.
        """
        return pass_seconds(self.address, num_positions, is_wide)

    def calibrate(self, num_positions: int, seconds: float, *, is_wide: bool) -> None:
        """Record a pass timed at start-up."""
        calibrate_pass(self.address, num_positions, is_wide, seconds)

    def begin(self) -> None:
        """End the warm-up: of all passes so far, keep only those that ``calibrate`` recorded."""
        start_serving(self.address)
        # Compile it before the first request needs it.
        num_steps_to_verify(self.address, 1, 1, np.zeros(1))

    def observe(self, num_positions: int, num_tokens: int, seconds: float, *, is_wide: bool = False) -> None:
        """Learn from a pass that produced ``num_tokens``. O(1).

        A pass that took many times longer than expected was interrupted, and says nothing about its size.
        """
        observe_pass(self.address, num_positions, is_wide, num_tokens, seconds)

    def token_cost(self, num_rows: int) -> float:
        """Return the cost of a draft token of a row in output tokens; 0 while it is unknown, and if it costs nothing.

        All rows are assumed to draft alike. The additional time of the second position is left to `best_draft_length`,
        which sees whole drafts.
        """
        return draft_token_cost(self.address, num_rows)

    def best_draft_length(self, gains: Floats, num_rows: int = 1) -> int:
        """Return how many draft tokens of each row to verify if all rows are padded to the same length. O(n).

        It is the length with the greatest throughput, or more if a probe is due.

        Args:
            gains: The output tokens that the i-th draft tokens of all rows together are expected to add, float64[n]:
                the sum of the probabilities that they and all tokens before them are accepted.
            num_rows: The number of rows of the pass.

        Returns:
            The length; n until the time of passes is known.
        """
        return num_steps_to_verify(self.address, num_rows, num_rows, gains) if self._costs.is_known else len(gains)

    @property
    def num_withheld(self) -> int:
        """Return the number of passes since likely drafts were first withheld because of their cost; 0 if none are."""
        return self._costs.num_withheld

    def relative_cost(self, width: int) -> float:
        """Return the time of a pass of ``width`` tokens of one row, relative to a pass of one token; 0 if unknown."""
        plain = self.seconds(1)
        return self.seconds(width, is_wide=width > 1) / plain if plain > 0.0 else 0.0
