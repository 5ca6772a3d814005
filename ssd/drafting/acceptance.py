"""How probable is it that the target accepts a candidate token? A logistic model of the evidence.

Its weights are fixed; ``Calibration`` shifts and scales what they give while serving. The kernels take the weights as
an argument, so a model that fits them too replaces ``DEFAULT_WEIGHTS`` and nothing else.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.retrieval.memory import inlined, kernel

Weights = npt.NDArray[np.float64]

_LEARNING_RATE = 0.02
_SHIFT_RANGE = (-2.5, 1.5)
_SCALE_RANGE = (0.6, 2.5)

DEFAULT_WEIGHTS: Weights = np.array([-1.30, 0.85, 0.10, 0.45, 0.35, -0.10])
"""Weights of: 1, log(1 + agreeing tokens), log(1 + support), log odds of the share, own text's part, log(1 + depth)."""


_LOGS: Final = np.log(1.0 + np.arange(256))

MOST_AGREEING: Final = 64
"""More agreeing tokens than this count as this many."""


@inlined
def evidence_logit(weights: Weights, support: float, votes: float, own_votes: float) -> float:
    """The part of ``acceptance_logit`` that stays the same while the same samples go on to agree."""
    return float(
        weights[0]
        + weights[2] * math.log(1.0 + support)
        + weights[3] * math.log((votes + 0.5) / (support - votes + 0.5))
        + weights[4] * own_votes / votes
    )


@inlined
def length_logit(weights: Weights, agreeing: int, depth: int) -> float:
    """The rest of it."""
    return float(weights[1] * _LOGS[min(agreeing, MOST_AGREEING)] + weights[5] * _LOGS[depth])


@kernel
def acceptance_logit(
    weights: Weights, agreeing: int, support: float, votes: float, own_votes: float, depth: int
) -> float:
    """Log odds that the target accepts a token.

    ``agreeing`` : tokens before it that the evidence agrees on, matched or drafted. ``support`` : places that agree so.
    ``votes`` : how many of these go on with the token; ``own_votes`` : those in the request's own text. ``depth`` :
    draft tokens before it, at most 255.
    """
    return evidence_logit(weights, support, votes, own_votes) + length_logit(weights, agreeing, depth)


class Calibration:
    """Moves the estimates to what traffic really accepts: log odds' = shift + scale * log odds (Platt 1999, section 2).

    Fitted while serving by stochastic gradient steps on the log loss; sampled text accepts less than greedy text, and
    no fixed weights know which is asked for.
    """

    def __init__(self) -> None:
        self.shift = 0.0
        self.scale = 1.0

    def applied_to(self, weights: Weights) -> Weights:
        """Weights whose log odds are the calibrated ones."""
        calibrated = self.scale * weights
        calibrated[0] += self.shift
        return calibrated

    def learn(self, estimates: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_], bias: float) -> None:
        """One step. ``estimates`` : float64[n] as proposed, ``bias`` included; ``accepted`` : what came of each."""
        inside = np.clip(estimates, 1e-6, 1 - 1e-6)
        log_odds = (np.log(inside / (1 - inside)) - bias - self.shift) / self.scale
        error = accepted - inside
        self.shift = float(np.clip(self.shift + _LEARNING_RATE * error.sum(), *_SHIFT_RANGE))
        self.scale = float(np.clip(self.scale + _LEARNING_RATE * (error * log_odds).sum(), *_SCALE_RANGE))
