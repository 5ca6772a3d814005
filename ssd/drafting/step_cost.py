"""How many draft tokens pay in another engine, given what its steps have taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd.compiled.addresses import address
from ssd.drafting.protocol import Draft, Prices
from ssd.drafting.step_cost_kernel import COST_FLOATS, FIXED, PER_POSITION, cut_to_paying, observe_step, token_price


class StepCost:
    """Learns ``seconds = fixed + per_position * positions`` of steps, and cuts drafts to what pays.

    A step computes one position for each row and one for each draft token, without padding. Least squares over recent
    steps, forgotten exponentially: a change of load is followed within some fifty. Only speed depends on it. Kernels
    that draft for a whole batch find it at ``address``.
    """

    def __init__(self, fixed_s: float = 0.0, per_position_s: float = 0.0) -> None:
        """``fixed_s``, ``per_position_s`` : what is known before any step was seen."""
        self._words = np.zeros(COST_FLOATS)
        self._words[FIXED], self._words[PER_POSITION] = fixed_s, per_position_s
        self.address = address(self._words)

    @property
    def fixed_s(self) -> float:
        """Of a step, >= 0; 0 before enough steps were seen."""
        return float(self._words[FIXED])

    @property
    def per_position_s(self) -> float:
        """Of a position in it, >= 0; 0 before enough steps were seen."""
        return float(self._words[PER_POSITION])

    def observe(self, num_positions: int, num_tokens: int, seconds: float) -> None:
        """One step, which put out ``num_tokens``. One many times slower than expected was interrupted and says nothing.

        O(1).
        """
        observe_step(self._words, num_positions, num_tokens, seconds)

    def prices(self, num_rows: int) -> Prices | None:
        """What a drafted token costs, float64[1], in output tokens; None while it is not known."""
        price = token_price(self._words, num_rows)
        return np.array([price]) if price > 0.0 else None

    def paying(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The beginnings of ``drafts``, chains and one a row, that together give most: see `Worth`.

        The i-th token of a draft adds Pi to the expected output, the estimated chance that it and all before it are
        accepted. Pi never grows along a draft, so the best m tokens of all rows are beginnings, and m is found by
        trying all. Drafts without estimates stay whole. O(n log n) in the tokens drafted.
        """
        sizes = np.array([len(draft.token_ids) for draft in drafts], np.int64)
        if not sizes.any() or any(d.probabilities is None and len(d.token_ids) for d in drafts):
            return list(drafts)
        probabilities = np.zeros((len(sizes), sizes.max()))
        for row, draft in enumerate(drafts):
            if draft.probabilities is not None:
                probabilities[row, : sizes[row]] = draft.probabilities
        cut_to_paying(self._words, probabilities, sizes, np.empty(int(sizes.sum())))
        return [draft.cut(size) for draft, size in zip(drafts, sizes.tolist(), strict=True)]
