"""The price list of an engine: what its passes take, and so what a drafted token costs and how much of a draft pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Records
from ssd.pricing.pass_costs import (
    PassCosts,
    begin_serving,
    calibrate_pass,
    num_paying,
    observe_pass,
    pass_seconds,
    paying_width_of_chains,
    token_price,
)
from ssd.pricing.rate import FORGETTING

Floats = npt.NDArray[np.float64]


class PassTime(NamedTuple):
    """Seconds of a pass: ``fixed + per_position * positions``, and ``wide`` more with several positions of a row."""

    fixed: float
    per_position: float
    wide: float


class EstimatedDraft(Protocol):
    """Drafts as they are cut, see ``ssd.drafting.protocol.Draft``."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Tokens, int32[k]."""

    @property
    def probabilities(self) -> Floats | None:
        """Chance of each token once those before it are accepted, float64[k]; None without estimates."""

    @property
    def parents(self) -> npt.NDArray[np.int32] | None:
        """Of a tree, of each token the index of the one before it; None of a chain."""

    def chances(self) -> Floats:
        """Chance that each token and all before it are accepted, float64[k]; with estimates only."""


class PriceList:
    """Learns what a pass takes while serving, and cuts drafts to what pays.

    A pass computes positions: one for each row and one for each draft token, padding included where rows are padded. On
    a CPU time is close to linear in them, but for a step from one position of a row to two, where products of a matrix
    and a vector become products of matrices; where a GPU is flat, both come out near 0 and nothing is cut. Least
    squares over the recent passes, which are forgotten exponentially, and with little weight those of the warm-up,
    which are kept for the sizes not seen lately: a change of load or context length is followed within some fifty
    passes. What gives most is said by `Rate`. Only speed depends on it, never a token.
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
        """Count a pass of the warm-up, which is never forgotten."""
        calibrate_pass(self.address, num_positions, is_wide, seconds)

    def begin(self) -> None:
        """End the warm-up: of all that it did, only what was calibrated says something about requests to come."""
        begin_serving(self.address)
        # Compiled before the first request needs it.
        num_paying(self.address, 1, 1, np.zeros(1))
        paying_width_of_chains(self.address, np.zeros(1), np.ones(1, np.int64), np.ones(1))

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

    def paying_width(self, drafts: Sequence[EstimatedDraft], shares: Sequence[float]) -> int:
        """Draft tokens per row that give most where every row is padded to the widest; drafts without estimates are
        kept whole.

        With the draft cut to w tokens a row is expected to emit 1 + s (P1 + ... + Pw) tokens, where Pi is the estimated
        chance that its i-th token is accepted and s, of ``shares``, how far the row's estimates are trusted. O(tokens
        drafted).
        """
        widest = max((len(draft.token_ids) for draft in drafts), default=0)
        if widest == 0 or not self._costs.is_known:
            return widest
        estimates = [draft.probabilities for draft in drafts if len(draft.token_ids)]
        known = [estimate for estimate in estimates if estimate is not None]
        if len(known) < len(estimates):
            return widest
        if all(draft.parents is None for draft in drafts):
            sizes = np.array([len(draft.token_ids) for draft in drafts])
            return paying_width_of_chains(self.address, np.concatenate(known), sizes, np.array(shares))
        gains = np.zeros(widest)
        for draft, share in zip(drafts, shares, strict=True):
            if len(draft.token_ids):
                gains[: len(draft.token_ids)] += share * draft.chances()
        return num_paying(self.address, len(drafts), len(drafts), gains)
