"""Calibration of what drafts promise, by how requests are sampled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FORGETTING = 0.97
_FORGETTING_UNTRIED = 0.999
_PRIOR_TOKENS = 1.0


class KeptShares:
    """The share of the promised tokens that was accepted of late, for each temperature; 1 where that is not known.

    Estimates are learned over all requests of a namespace; in a new one they are a rule of thumb. A token drawn at a
    high temperature is accepted less often than a greedy one after the same text, and until the model has found out,
    its drafts would cost more than they give. What is distrusted is drafted rarely, so old observations fade, though
    slowly, with the passes without a draft too, and drafts are tried again. O(1) each.
    """

    def __init__(self) -> None:
        self._sums: dict[float, tuple[float, float]] = {}  # promised and accepted tokens, the older the less

    def share(self, temperature: float) -> float:
        """The share for a temperature, 0 to 1."""
        promised, accepted = self._sums.get(_kind(temperature), (0.0, 0.0))
        return min(1.0, (accepted + _PRIOR_TOKENS) / (promised + _PRIOR_TOKENS))

    def observe(self, temperature: float, promised: float, accepted: int) -> None:
        """Learn from one row of a pass: the tokens that its draft was expected to bring, and those that it brought."""
        kind = _kind(temperature)
        before = self._sums.get(kind, (0.0, 0.0))
        kept = _FORGETTING if promised else _FORGETTING_UNTRIED
        self._sums[kind] = before[0] * kept + promised, before[1] * kept + accepted


def _kind(temperature: float) -> float:
    """Quarters, so that there are few: temperatures are at most 2."""
    return round(4 * temperature) / 4


_LEARNING_RATE = 0.02
_CLIP = 6.0
_SHIFT_RANGE = (-4.0, 4.0)
_SCALE_RANGE = (0.0, 3.0)


class PlattScaling:
    """Log odds of acceptance = shift + scale * log odds of the draft model's probability (Platt 1999, section 2).

    Fitted while serving by gradient steps on the log loss. Greedy and sampled requests need a model each: with shared
    noise an unlikely token is often the target's too.
    """

    def __init__(self, shift: float, scale: float) -> None:
        self.shift = shift
        self.scale = scale

    def estimate(self, chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Chance of acceptance of tokens of which the draft model says ``chances``: float64[n] each."""
        estimates: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-self.shift - self.scale * _log_odds(chances)))
        return estimates

    def learn(self, chances: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_]) -> None:
        """Learn by one step. ``chances`` : float64[n], the draft model's; ``accepted`` : of each tested token."""
        log_odds = _log_odds(chances)
        error = accepted - self.estimate(chances)
        self.shift = float(np.clip(self.shift + _LEARNING_RATE * error.sum(), *_SHIFT_RANGE))
        self.scale = float(np.clip(self.scale + _LEARNING_RATE * (error * log_odds).sum(), *_SCALE_RANGE))


def _log_odds(chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip(chances, 1e-9, 1 - 1e-9)
    return np.clip(np.log(inside / (1 - inside)), -_CLIP, _CLIP)
