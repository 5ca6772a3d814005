"""Platt scaling: from a draft model's own probability of a token to the chance that the target accepts it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
