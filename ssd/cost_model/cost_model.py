"""Estimate the time of forward passes and the cost of draft tokens, and choose the length of drafts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.cost_model.pass_costs import (
    KNEES,
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
    """The coefficients of the estimated time of a forward pass.

    The time is ``fixed + per_position * effective_positions(positions, knee)``, plus ``wide`` if the pass has drafts.
    See `ssd.cost_model.pass_costs.effective_positions`.
    """

    fixed: float
    per_position: float
    wide: float
    knee: float


class CostModel:
    """Learns the time of forward passes while serving, and chooses the length of drafts from it.

    A forward pass computes one position for each row and one for each draft token, including padding. Its time grows
    little with the first positions, which are computed while the weights are read, and then in proportion to their
    number. On a CPU it also jumps from one position per row to two, where matrix-vector products become matrix
    products. On a GPU whose time does not depend on the number of positions, the coefficients become about 0, and no
    draft is shortened.

    The estimate is a least-squares fit over recent passes with exponential forgetting, so it follows a change of load
    or context length within about fifty passes. A measured time that contradicts the estimate replaces it immediately.
    """

    def __init__(self) -> None:
        self._records = Records(PassCostRecord)
        self._costs = self._records[0]
        self._costs.rate.forgetting, self._costs.slowdown = FORGETTING, 1.0
        self.address = self._records.address
        """The memory address of the `PassCostRecord`, which numba kernels read and update."""

    @property
    def pass_time(self) -> PassTimeModel | None:
        """Return the estimated time of a forward pass; None until passes of different sizes have been measured."""
        costs = self._costs
        if not costs.is_known:
            return None
        fixed, per_position, wide = (costs.slowdown * each for each in (costs.fixed, costs.per_position, costs.wide))
        return PassTimeModel(fixed, per_position, wide, KNEES[costs.knee_index])

    def seconds(self, num_positions: int, *, is_wide: bool = False) -> float:
        """Return the estimated seconds of a forward pass with ``num_positions`` positions; 0 if unknown.

        ``is_wide`` is whether the pass verifies drafts, so that a row has several positions.
        """
        return pass_seconds(self.address, num_positions, is_wide)

    def calibrate(self, num_positions: int, seconds: float, *, is_wide: bool) -> None:
        """Record the time of a forward pass that was measured at start-up."""
        calibrate_pass(self.address, num_positions, is_wide, seconds)

    def end_warm_up(self) -> None:
        """End the warm-up: discard the times of all forward passes except those recorded with ``calibrate``."""
        start_serving(self.address)
        # Compile it before the first request needs it.
        num_steps_to_verify(self.address, 1, 1, np.zeros(1))

    def observe(self, num_positions: int, num_tokens: int, seconds: float, *, is_wide: bool = False) -> None:
        """Record that a forward pass took ``seconds`` and produced ``num_tokens`` output tokens.

        A pass that took many times longer than expected is ignored, because it was probably interrupted.
        """
        observe_pass(self.address, num_positions, is_wide, num_tokens, seconds)

    def token_cost(self, num_rows: int) -> float:
        """Return the cost of each draft token if each row verifies one, in output tokens; 0 if it is unknown.

        The extra time of a forward pass that has any draft (``PassTimeModel.wide``) is considered by
        `num_steps_to_verify` only.
        """
        return draft_token_cost(self.address, num_rows)

    def num_steps_to_verify(self, gains: Floats, num_rows: int = 1) -> int:
        """Return the number of draft tokens per row to verify in a pass that pads all rows to this number. O(n).

        It is the number with the greatest expected throughput. If a probe is due, it may be greater: a probe verifies a
        longer draft to check the estimated cost.

        Args:
            gains: For each draft position, the expected number of accepted draft tokens of all rows together at that
                position, float64[n].
            num_rows: The number of rows of the forward pass.

        Returns:
            The length; n until the time of forward passes has been measured.
        """
        return num_steps_to_verify(self.address, num_rows, num_rows, gains) if self._costs.is_known else len(gains)

    @property
    def num_withheld(self) -> int:
        """The number of forward passes since promising drafts began to be left out because of their cost.

        It is 0 if no promising draft is left out now.
        """
        return self._costs.num_withheld

    def relative_cost(self, width: int) -> float:
        """Return the cost of a forward pass over ``width`` tokens of one row, as a multiple of a pass over one token.

        It is the ratio of the estimated times, and 0 until enough passes have been measured.
        """
        plain = self.seconds(1)
        return self.seconds(width, is_wide=width > 1) / plain if plain > 0.0 else 0.0
