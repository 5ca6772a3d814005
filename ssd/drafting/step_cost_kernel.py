"""What steps of another engine take, learned as they come, and which draft tokens pay: see ``StepCost``."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, inlined, kernel
from ssd.drafting.worth import FORGETTING as WORTH_FORGETTING

Floats = npt.NDArray[np.float64]

FIXED: Final = 0  # seconds, of a step and of a position in it; both 0 before enough steps were seen
PER_POSITION: Final = 1
_STEPS: Final = 2  # sums over steps, the older the less: of 1, positions, positions^2, seconds, positions * seconds
_POSITIONS: Final = 3
_SQUARES: Final = 4
_SECONDS: Final = 5
_PRODUCTS: Final = 6
_PASSES: Final = 7  # the same for what `Worth` keeps: 1, output tokens, seconds
_TOKENS: Final = 8
_TIME: Final = 9
COST_FLOATS: Final = 10

_FORGETTING: Final = 0.98
_OUTLIER: Final = 5.0
_MIN_STEPS: Final = 8.0
_MIN_VARIANCE: Final = 0.05


@kernel
def observe_step(cost: Floats, num_positions: int, num_tokens: int, seconds: float) -> None:
    """One step, which put out ``num_tokens``. One many times slower than expected was interrupted and says nothing."""
    expected = cost[FIXED] + cost[PER_POSITION] * num_positions
    if 0.0 < _OUTLIER * expected < seconds:
        return
    x = float(num_positions)
    for word in range(_STEPS, _PRODUCTS + 1):
        cost[word] *= _FORGETTING
    cost[_STEPS] += 1.0
    cost[_POSITIONS] += x
    cost[_SQUARES] += x * x
    cost[_SECONDS] += seconds
    cost[_PRODUCTS] += x * seconds
    for word in range(_PASSES, _TIME + 1):
        cost[word] *= WORTH_FORGETTING
    cost[_PASSES] += 1.0
    cost[_TOKENS] += num_tokens
    cost[_TIME] += seconds
    weight, positions, total = cost[_STEPS], cost[_POSITIONS], cost[_SECONDS]
    spread = weight * cost[_SQUARES] - positions * positions
    if weight < _MIN_STEPS or spread < _MIN_VARIANCE * weight * weight:
        return  # steps of one size do not tell what a position costs
    slope = (weight * cost[_PRODUCTS] - positions * total) / spread
    cost[PER_POSITION] = min(max(0.0, slope), total / positions)
    cost[FIXED] = (total - cost[PER_POSITION] * positions) / weight


@inlined
def _recent(cost: Floats) -> tuple[float, float]:
    """Output tokens and seconds of a step of late."""
    passes = cost[_PASSES]
    return (cost[_TOKENS] / passes, cost[_TIME] / passes) if passes > 0.0 else (0.0, 0.0)


@kernel
def token_price(cost: Floats, num_rows: int) -> float:
    """What a drafted token costs in output tokens; 0 while that is not known."""
    tokens, time = _recent(cost)
    seconds = cost[FIXED] + cost[PER_POSITION] * num_rows
    return float(cost[PER_POSITION] * (num_rows + tokens) / max(seconds + time, 1e-9))


@kernel
def cut_to_paying(cost: Floats, probabilities: Floats, sizes: Int64s, best_first: Floats) -> None:
    """Lower ``sizes`` to the beginnings of the drafts that together give most.

    ``probabilities`` : float64[rows, n], of row i the first ``sizes[i]``. ``best_first`` : scratch, as many float64 as
    there are drafted tokens. O(n log n) in these.
    """
    num_rows, count = len(sizes), 0
    if cost[PER_POSITION] == 0.0:
        return
    for row in range(num_rows):
        gain = 1.0
        for i in range(sizes[row]):
            gain *= probabilities[row, i]
            best_first[count] = -gain
            count += 1
    best_first[:count].sort()
    tokens, time = _recent(cost)
    best, best_rate, gains = 0, -1.0, 0.0
    for taken in range(count + 1):
        if taken > 0:
            gains -= best_first[taken - 1]
        seconds = cost[FIXED] + cost[PER_POSITION] * (num_rows + taken)
        rate = (num_rows + gains + tokens) / max(seconds + time, 1e-9)
        if rate > best_rate:
            best, best_rate = taken, rate
    least = -best_first[best - 1] if best > 0 else 2.0
    for row in range(num_rows):
        gain, size = 1.0, 0
        while size < sizes[row]:
            gain *= probabilities[row, size]
            if gain < least:
                break
            size += 1
        sizes[row] = size
