"""Learn while serving how reliable acceptance estimates are, and for which requests drafts save time."""

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
"""The number of temperature buckets; each is 0.25 wide, and the last one contains all temperatures from 2 on."""


class CalibrationRecord(Record):
    """For each temperature bucket, the sums of expected and of accepted draft tokens; old counts fade exponentially."""

    sums: Annotated[npt.NDArray[np.float64], np.float64, (_TEMPERATURE_BUCKETS, 2)]


calibration_at = view_of(CalibrationRecord)


@inlined
def accepted_share(shares: CalibrationRecord, bucket: int) -> float:
    """Return the recent ratio of accepted to expected draft tokens in a temperature bucket, between 0 and 1."""
    return float(min(1.0, (shares.sums[bucket, 1] + _PRIOR_TOKENS) / (shares.sums[bucket, 0] + _PRIOR_TOKENS)))


@inlined
def record_outcome(shares: CalibrationRecord, bucket: int, expected_accepted: float, accepted: int) -> None:
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
    return min(_TEMPERATURE_BUCKETS - 1, round(4 * temperature))


class AcceptanceCalibration:
    """The recent ratio of accepted to expected draft tokens, by sampling temperature; 1 until it has been measured.

    The acceptance estimates of drafters are learned from all requests of a namespace, and in a new namespace they
    follow a rule of thumb. A token sampled at a high temperature is accepted less often than a greedy one after the
    same text. Until the acceptance model has learned that, this ratio keeps drafts from costing more than they gain.
    The sums fade slowly, also with forward passes without a draft, so that drafts are tried again after a low ratio.
    """

    def __init__(self) -> None:
        self._memory = Records(CalibrationRecord)
        self.address = self._memory.address

    def share(self, temperature: float) -> float:
        """Return the ratio of accepted to expected draft tokens at a sampling temperature, 0 to 1."""
        share: float = _share_at(self.address, temperature_bucket_of(temperature))
        return share

    def observe(self, temperature: float, expected_accepted: float, accepted: int) -> None:
        """Record how many draft tokens of one request were accepted in a forward pass, and how many were expected.

        ``expected_accepted`` is the sum of the acceptance probabilities up to the first rejected token. So a long draft
        whose first token is wrong counts as one wrong token.
        """
        _observe_at(self.address, temperature_bucket_of(temperature), expected_accepted, accepted)


_LEARNING_RATE = 0.02
_CLIP = 6.0
_SHIFT_RANGE = (-4.0, 4.0)
_SCALE_RANGE = (0.0, 3.0)


class PlattScaling:
    """Converts a draft model's own probability of a token to the probability that the target accepts the token.

    The log odds of acceptance are ``shift + scale * log_odds(probability)`` (Platt 1999, section 2); both numbers are
    updated while serving, by gradient steps on the log loss. Use one instance for greedy requests and another one for
    sampled requests, because a sampled token is accepted with a different probability.
    """

    def __init__(self, shift: float, scale: float) -> None:
        self.shift = shift
        self.scale = scale

    def estimate(self, probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Convert a draft model's token probabilities, float64[n], to acceptance probabilities by Platt scaling."""
        estimates: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-self.shift - self.scale * _log_odds(probabilities)))
        return estimates

    def learn(self, probabilities: npt.NDArray[np.float64], accepted: npt.NDArray[np.bool_]) -> None:
        """Update the Platt scaling from verified draft tokens, in one gradient step.

        ``probabilities`` (float64[n]) are the draft model's, and ``accepted`` (bool[n]) is whether the target accepted
        each token. Tokens after the first rejected one must be left out.
        """
        log_odds = _log_odds(probabilities)
        error = accepted - self.estimate(probabilities)
        self.shift = float(np.clip(self.shift + _LEARNING_RATE * error.sum(), *_SHIFT_RANGE))
        self.scale = float(np.clip(self.scale + _LEARNING_RATE * (error * log_odds).sum(), *_SCALE_RANGE))


def _log_odds(probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    inside = np.clip(probabilities, 1e-9, 1 - 1e-9)
    return np.clip(np.log(inside / (1 - inside)), -_CLIP, _CLIP)


_SHARE = 0.0025
"""The maximum mean time for drafting for requests without accepted drafts, as a fraction of a forward pass's time.

If drafting would take longer, `DraftBackoff` drafts for these requests less often, but at least in every
_LONGEST_PAUSE-th step.
"""
_TELLING_SHARE = 0.0025
"""The maximum average time for learning from the logits of passes without drafts, as a fraction of a pass's time."""
FIRST_TOKEN_THRESHOLD: Final = 0.9
"""The minimum acceptance probability of the first token of a draft that is verified before the request has any output.

A less probable draft is not verified in the pass that produces the request's first output token, because it would delay
this token. Text that is repeated verbatim exceeds the threshold.
"""

BACKOFF_AFTER: Final = 4
"""The number of consecutive steps without a useful draft after which a request is drafted for less often."""
_LONGEST_PAUSE = 16
_TIME_FORGETTING = 0.9
_COMPILED_S = 1.0
"""Calls of at least this many seconds are left out of mean times, because they have probably compiled kernels."""


class DraftBackoff:
    """Decides how often to draft for requests whose drafts are not accepted, so that the attempts stay cheap.

    A request with useful drafts gets a draft in every step. After BACKOFF_AFTER steps in a row without a useful draft,
    it gets a draft only in every second, third, ... step. All such requests get their drafts in the same step, because
    a call of the drafter has a fixed cost. The interval grows with the time of all lookups, relative to a forward pass,
    so it is long only for large batches.

    In the same way, drafters learn from every pass that verified a draft, but only now and then from other passes.
    """

    def __init__(self) -> None:
        self._row_s = self._pass_s = self._observe_s = 0.0
        self._num_skipped = 0  # steps since all rows were drafted for
        self._num_unobserved = 0  # passes since drafters observed one

    def should_draft_all(self, num_rows: int) -> bool:
        """Return whether to draft for all rows in this step, including those whose recent drafts were not accepted."""
        return self._num_skipped + 1 >= self.period(num_rows)

    def period(self, num_rows: int) -> int:
        """Return the number of steps between two drafts for a request whose recent drafts were not accepted."""
        if self._pass_s == 0.0:
            return 1
        return max(1, min(_LONGEST_PAUSE, math.ceil(num_rows * self._row_s / self._pass_s / _SHARE)))

    def record_drafting(self, num_asked: int, seconds: float, *, skips_some: bool) -> None:
        """Record that one call of the drafter drafted for ``num_asked`` rows and took ``seconds``.

        ``skips_some`` is whether the call skipped rows because their recent drafts were not accepted.
        """
        self._num_skipped = self._num_skipped + 1 if skips_some else 0
        if num_asked and seconds < _COMPILED_S:
            self._row_s = _recent(self._row_s, seconds / num_asked)

    def should_observe(self, *, has_drafts: bool) -> bool:
        """Return whether drafters should learn from the logits of a forward pass, so that learning stays cheap.

        They learn from every pass that verified drafts (``has_drafts``), but only now and then from other passes.
        """
        share = self._observe_s / self._pass_s / _TELLING_SHARE if self._pass_s else 1.0
        tells = has_drafts or self._num_unobserved + 1 >= min(_LONGEST_PAUSE, math.ceil(share))
        self._num_unobserved = 0 if tells else self._num_unobserved + 1
        return tells

    def record_observing(self, seconds: float) -> None:
        """Record how long the drafters took to learn from the logits of a forward pass."""
        if seconds < _COMPILED_S:
            self._observe_s = _recent(self._observe_s, seconds)

    def observe_pass(self, seconds: float) -> None:
        self._pass_s = _recent(self._pass_s, seconds)


def _recent(before: float, now: float) -> float:
    return now if before == 0.0 else _TIME_FORGETTING * before + (1 - _TIME_FORGETTING) * now
