"""What drafters by a network have in common: prices, times of passes, and what its probabilities are worth."""

from __future__ import annotations

import numpy as np

from ssd.config import SamplingParams
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import SamplingRow
from ssd.pricing.calibration import PlattScaling
from ssd.pricing.pass_costs import OUTLIER
from ssd.pricing.price_list import PriceList

UNKNOWN_SAMPLING = SamplingRow(params=SamplingParams(temperature=0.0), noise=SequenceNoise.seeded(0))
WARM_UP_ROWS = 8
WARM_UP_TOKENS = 64


class NetworkDrafter:
    """Drafts token by token while the next pays, going by the network's probabilities and what came of those before."""

    def __init__(self, price: float) -> None:
        """``price`` : of a drafted token, in expected accepted tokens, where a request names none."""
        self._price = np.array([price])
        self._greedy_chances = PlattScaling(shift=0.5, scale=1.0)
        self._sampled_chances = PlattScaling(shift=1.0, scale=0.5)
        self._price_list = PriceList()

    def seconds_per_token(self, num_rows: int) -> float:
        """Measured time to draft one more token for each of ``num_rows`` requests together; 0 until it is known."""
        return self._price_list.seconds(num_rows)

    def _observe_pass(self, num_rows: int, seconds: float) -> None:
        expected = self._price_list.seconds(num_rows)
        # One that took many times as long was probably interrupted: it counts as slow, but not as that slow.
        self._price_list.observe(num_rows, 0, min(seconds, OUTLIER * expected) if expected else seconds)

    def _chances_of(self, greedy: bool) -> PlattScaling:
        return self._greedy_chances if greedy else self._sampled_chances
