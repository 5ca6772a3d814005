"""Learn while serving how reliable estimates are, and for which requests drafting pays."""

from __future__ import annotations

import math
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Record, Records, inlined, kernel, view_of

_FORGETTING: Final = 0.97
_FORGETTING_UNTRIED: Final = 0.99
_PRIOR_TOKENS: Final = 1.0
_TEMPERATURE_BUCKETS: Final = 9
"""The number of temperature buckets: quarters, of temperatures up to 2."""


class CalibrationRecord(Record):
    """The expected and the accepted tokens of each temperature bucket, exponentially weighted.

    Attributes:
        sums: For each bucket the expected and the accepted tokens.
    """

    sums: Annotated[npt.NDArray[np.float64], np.float64, (_TEMPERATURE_BUCKETS, 2)]


calibration_at = view_of(CalibrationRecord)


@inlined
def accepted_share(shares: CalibrationRecord, bucket: int) -> float:
    """Return the ratio of accepted to expected tokens of a bucket, 0 to 1."""
    return float(min(1.0, (shares.sums[bucket, 1] + _PRIOR_TOKENS) / (shares.sums[bucket, 0] + _PRIOR_TOKENS)))


@inlined
def record_outcome(shares: CalibrationRecord, bucket: int, expected_accepted: float, accepted: int) -> None:
    """Record the outcome of a draft. See `AcceptanceCalibration.observe`."""
    kept = _FORGETTING if expected_accepted > 0.0 else _FORGETTING_UNTRIED
    shares.sums[bucket, 0] = shares.sums[bucket, 0] * kept + expected_accepted
    shares.sums[bucket, 1] = shares.sums[bucket, 1] * kept + accepted


@kernel
def _share_at(shares: int, bucket: int) -> float:
    return accepted_share(calibration_at(shares), bucket)


@kernel
def _observe_at(shares: int, bucket: int, expected_accepted: float, accepted: int) -> None:
    record_outcome(calibration_at(shares), bucket, expected_accepted, accepted)


def temperature_bucket_of(temperature: float) -> int:
    """Return the bucket of a temperature."""
    return min(_TEMPERATURE_BUCKETS - 1, round(4 * temperature))


class AcceptanceCalibration:
    """The recent ratio of accepted to expected tokens, by temperature; 1 until it is known.

    The estimates of drafters are learned from all requests of a namespace, and in a new namespace they follow a rule of
    thumb. A token sampled at a high temperature is accepted less often than a greedy one after the same text. Until the
    acceptance model has learned that, its drafts would cost more than they gain. Drafts with a low ratio are made
    rarely, so old observations fade slowly, also with passes without a draft, and drafts are tried again. ``address``
    is that of the `CalibrationRecord`. O(1) each.
    """

    def __init__(self) -> None:
        self._memory = Records(CalibrationRecord)
        self.address = self._memory.address

    def share(self, temperature: float) -> float:
        """Return the ratio for a temperature, 0 to 1."""
        share: float = _share_at(self.address, temperature_bucket_of(temperature))
        return share

    def observe(self, temperature: float, expected_accepted: float, accepted: int) -> None:
        """Learn from one row of a pass.

        Args:
            temperature: The temperature of the request.
            expected_accepted: The expected accepted tokens of its draft, as far as the draft was tested. So one long
                draft that is wrong at its first token counts as one wrong token.
            accepted: The number of accepted tokens.
        """
        _observe_at(self.address, temperature_bucket_of(temperature), expected_accepted, accepted)


_LEARNING_RATE = 0.02
_CLIP = 6.0
_SHIFT_RANGE = (-4.0, 4.0)
_SCALE_RANGE = (0.0, 3.0)


class PlattScaling:
    """Calibrates a draft model's probabilities (Platt 1999, section 2).

    The log odds of acceptance are shift + scale * log odds of the model's probability. The fit is updated while
    serving, by gradient steps on the log loss. Greedy and sampled requests need one each: with shared noise the target
    often samples an improbable token too.
    """

    def __init__(self, shift: float, scale: float) -> None:
        self.shift = shift
        self.scale = scale

    def estimate(self, probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the acceptance probabilities of tokens with these model probabilities; float64[n] each."""
        estimates: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-self.shift - self.scale * _log_odds(probabilities)))
        return estimates

    def learn(self, probabilities: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_]) -> None:
        """Learn in one step.

        Args:
            probabilities: The draft model's probabilities, float64[n].
            accepted: Whether each token was accepted, bool[n]; tested tokens only.
        """
        log_odds = _log_odds(probabilities)
        error = accepted - self.estimate(probabilities)
        self.shift = float(np.clip(self.shift + _LEARNING_RATE * error.sum(), *_SHIFT_RANGE))
        self.scale = float(np.clip(self.scale + _LEARNING_RATE * (error * log_odds).sum(), *_SCALE_RANGE))


def _log_odds(probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip(probabilities, 1e-9, 1 - 1e-9)
    return np.clip(np.log(inside / (1 - inside)), -_CLIP, _CLIP)


_SHARE = 0.005
"""The maximum share of a step that drafting may take for rows whose drafts bring nothing."""
_TELLING_SHARE = 0.005
"""The maximum share of a pass that ``observe_scores`` may take if nothing was drafted."""
FIRST_TOKEN_THRESHOLD: Final = 0.9
"""The acceptance probability that the first draft token must have in the pass that produces a request's first token.

That pass takes longer with a draft, and the client waits for it, although the first token is the target's own in any
case. For text that is repeated verbatim the draft is worth it.
"""

BACKOFF_AFTER: Final = 4
"""The number of steps in a row without a draft worth verifying after which a request backs off."""
_LONGEST_PAUSE = 8
_TIME_FORGETTING = 0.9
_COMPILED_S = 1.0
"""The seconds from which a call has probably compiled its kernels, and so says nothing about the next one."""


class DraftBackoff:
    """Skips steps of requests whose drafts bring nothing, so that the attempts stay cheap.

    Such a request is drafted for only every second, third, ... step.

    A lookup takes the same time for each row, while a pass takes little more for another row. For a single row the
    lookup does not matter; in a large batch of new text it would take several percent of a step. A request with useful
    drafts is drafted for in every step. The others, which got none BACKOFF_AFTER times in a row, are all drafted for in
    the same step, because a call has a fixed cost.

    In the same way drafters observe every pass that verified a draft, and other passes rarely. Only speed depends on
    it, never a token.
    """

    def __init__(self) -> None:
        self._row_s = self._pass_s = self._observe_s = 0.0
        self._num_skipped = 0  # steps since all rows were drafted for
        self._num_unobserved = 0  # passes since drafters observed one

    def should_draft_all(self, num_rows: int) -> bool:
        """Return whether this step should draft for all rows, not only for those with recent useful drafts."""
        return self._num_skipped + 1 >= self.period(num_rows)

    def period(self, num_rows: int) -> int:
        """Return the number of steps from one draft to the next for a row in backoff."""
        if self._pass_s == 0.0:
            return 1
        return max(1, min(_LONGEST_PAUSE, math.ceil(num_rows * self._row_s / self._pass_s / _SHARE)))

    def record_drafting(self, num_asked: int, seconds: float, *, skips_some: bool) -> None:
        """Record a call of the drafter.

        Args:
            num_asked: The number of rows that it drafted for.
            seconds: The time that it took.
            skips_some: Whether rows in backoff were skipped.
        """
        self._num_skipped = self._num_skipped + 1 if skips_some else 0
        if num_asked and seconds < _COMPILED_S:
            self._row_s = _recent(self._row_s, seconds / num_asked)

    def should_observe(self, *, has_drafts: bool) -> bool:
        """Return whether drafters should observe a pass. ``has_drafts`` is whether it verified a draft."""
        share = self._observe_s / self._pass_s / _TELLING_SHARE if self._pass_s else 1.0
        tells = has_drafts or self._num_unobserved + 1 >= min(_LONGEST_PAUSE, math.ceil(share))
        self._num_unobserved = 0 if tells else self._num_unobserved + 1
        return tells

    def record_observing(self, seconds: float) -> None:
        """Record how long the drafters' observation of a pass took."""
        if seconds < _COMPILED_S:
            self._observe_s = _recent(self._observe_s, seconds)

    def observe_pass(self, seconds: float) -> None:
        """Record the time of a pass."""
        self._pass_s = _recent(self._pass_s, seconds)


def _recent(before: float, now: float) -> float:
    return now if before == 0.0 else _TIME_FORGETTING * before + (1 - _TIME_FORGETTING) * now
