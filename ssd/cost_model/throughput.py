"""Measure the output throughput, which is used to convert seconds to output tokens when a draft's cost is estimated."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import Float64, Record, inlined

Floats = npt.NDArray[np.float64]

FORGETTING = 0.99
"""The factor by which each forward pass lowers the weight of earlier passes in the measured throughput."""
_STEP_FORGETTING = 0.95
_NO_TIME = 1e-9


class ThroughputRecord(Record):
    """The output tokens and seconds of recent forward passes, summed with exponentially decreasing weights.

    ``forgetting`` is the factor by which each pass lowers the weight of earlier passes.
    """

    forgetting: Float64
    passes: Float64
    tokens: Float64
    seconds: Float64


@inlined
def add_pass(rate: ThroughputRecord, num_tokens: float, seconds: float) -> None:
    rate.passes = rate.forgetting * rate.passes + 1.0
    rate.tokens = rate.forgetting * rate.tokens + num_tokens
    rate.seconds = rate.forgetting * rate.seconds + seconds


@inlined
def recent_pass(rate: ThroughputRecord) -> tuple[float, float]:
    """Return the output tokens and the seconds of an average recent forward pass."""
    passes = rate.passes
    return (rate.tokens / passes, rate.seconds / passes) if passes > 0.0 else (0.0, 0.0)


@inlined
def cost_in_tokens(rate: ThroughputRecord, num_tokens: float, seconds: float, more_seconds: float) -> float:
    """Return how many output tokens could be produced in ``more_seconds``, the time that draft tokens add to a pass.

    Without the draft tokens, the pass produces ``num_tokens`` in ``seconds``. A draft token is worth verifying only if
    its acceptance probability exceeds the result. `combined_rate` is the conversion rate.
    """
    tokens, time = recent_pass(rate)
    return float(more_seconds * (num_tokens + tokens) / max(seconds + time, _NO_TIME))


@inlined
def combined_rate(recent: tuple[float, float], num_tokens: float, seconds: float) -> float:
    """Return the tokens per second of a forward pass and an average recent pass together.

    Draft lengths are chosen to maximize this rate. If the pass is expected to produce G tokens in C seconds, and recent
    passes produced T tokens in K seconds on average, the rate is (G + T) / (C + K). The reason is that an accepted
    token saves the time of producing it in a later pass. Later passes resemble recent passes, but also this one: text
    that is easy to draft now is probably easy in the next passes too, so an accepted token then saves little time. In
    replays of recorded outputs this objective was better than G / C, and better than a fixed exchange rate T / K
    (Dinkelbach 1967).
    """
    return float((num_tokens + recent[0]) / max(seconds + recent[1], _NO_TIME))


class Throughput:
    """The tokens per second of recent forward passes, averaged with exponentially decreasing weights.

    ``forgetting`` is the factor by which each pass lowers the weight of earlier passes.
    """

    def __init__(self, forgetting: float) -> None:
        self._forgetting = forgetting
        self._passes = self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    @property
    def seconds_per_pass(self) -> float:
        return self._seconds / self._passes if self._passes > 0.0 else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._passes = self._forgetting * self._passes + 1.0
        self._tokens = self._forgetting * self._tokens + num_tokens
        self._seconds = self._forgetting * self._seconds + seconds


class StepThroughput:
    """The tokens per second of recent engine steps; a step is timed from its first draft to its last accepted token."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rate, self._plain = Throughput(_STEP_FORGETTING), Throughput(_STEP_FORGETTING)
        self._began, self._last, self._num_tokens, self._is_plain = 0.0, 0.0, 0, True

    @property
    def tokens_per_s(self) -> float:
        """Return the output tokens per second of recent engine steps; 0 before the first one."""
        return self._rate.tokens_per_s

    @property
    def seconds_per_step(self) -> float:
        """Return the mean seconds of recent engine steps in which no costly drafter ran; 0 before the first step.

        If the mean of all recent steps is smaller, this mean is returned. A costly drafter may have run in every step
        for a while; then the steps without one are old, and steps may have become faster since.
        """
        return min(self._plain.seconds_per_pass or math.inf, self._rate.seconds_per_pass)

    def start_step(self) -> None:
        """Start to time an engine step, and stop timing the previous one."""
        if self._num_tokens:
            for rate in (self._rate, self._plain) if self._is_plain else (self._rate,):
                rate.observe(self._num_tokens, self._last - self._began)
        self._began, self._num_tokens, self._is_plain = self._clock(), 0, True

    def leave_out(self, seconds: float) -> None:
        """Do not count ``seconds`` of the current engine step, because a costly drafter took this time."""
        self._began += seconds
        self._is_plain = False

    def count(self, num_tokens: int) -> None:
        self._last = self._clock()
        self._num_tokens += num_tokens


def cost_at(prices: Floats, i: int) -> float:
    """Return the cost of the i-th draft token, in tokens; the last element of ``prices`` applies to later tokens."""
    return float(prices[min(i, len(prices) - 1)])


_INITIAL_RATE = 0.7
_INITIAL_WEIGHT = 20.0
_MEMORY = 2000.0
_PRIOR_WEIGHT = 8.0
_IDLE_FADING = 0.99


class AcceptanceRates:
    """The acceptance rate of draft tokens by request: how often a token is accepted if all tokens before it are.

    The rate combines a request's own verified tokens with ``_PRIOR_WEIGHT`` tokens at the average rate of all requests.
    Counts beyond ``_MEMORY`` tokens fade because traffic changes, and the counts of a request fade with each step
    without a draft.
    """

    def __init__(self) -> None:
        self._accepted = _INITIAL_RATE * _INITIAL_WEIGHT
        self._tested = _INITIAL_WEIGHT
        self._own: dict[str, tuple[float, float]] = {}

    def rate(self, request_id: str) -> float:
        """Return the estimated acceptance rate of a request's draft tokens, between 0 and 1."""
        accepted, tested = self._own.get(request_id, (0.0, 0.0))
        overall = (self._accepted + 0.5) / (self._tested + 1.0)
        return (accepted + _PRIOR_WEIGHT * overall) / (tested + _PRIOR_WEIGHT)

    def record(self, request_id: str, num_draft_tokens: int, num_accepted: int) -> None:
        """Count the accepted and rejected tokens of a verified draft, up to the first rejected one."""
        tested = min(num_draft_tokens, num_accepted + 1)
        fading = min(1.0, _MEMORY / (self._tested + tested))
        self._accepted = fading * (self._accepted + num_accepted)
        self._tested = fading * (self._tested + tested)
        own_accepted, own_tested = self._own.get(request_id, (0.0, 0.0))
        self._own[request_id] = own_accepted + num_accepted, own_tested + tested

    def fade(self, request_id: str) -> None:
        """Lower the weight of a request's acceptance counts after a step without a draft."""
        if request_id in self._own:
            accepted, tested = self._own[request_id]
            self._own[request_id] = _IDLE_FADING * accepted, _IDLE_FADING * tested

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)


_EXPECTED_BOUNDS: Final = (0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 1.8, 2.6, 4.0, 6.0, 10.0, 20.0)
_FIRST_TOKEN_BOUNDS: Final = (0.05, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_INITIAL_GAIN: Final = 1.0
_GAIN_WEIGHT: Final = 8.0
_GAIN_MEMORY: Final = 500.0
_GAIN_PRIOR_WEIGHT: Final = 12.0
_CELL_MEMORY: Final = 150.0


class MarginalGain:
    """The mean number of accepted tokens that another drafter adds to the primary drafter's draft.

    The mean depends on two properties of the primary draft: its expected accepted tokens, and the acceptance
    probability of its first token. These two numbers are bucketed, and the mean of a bucket is combined with
    ``_GAIN_PRIOR_WEIGHT`` observations at the overall mean. Old counts fade because traffic changes. Two further
    inputs, the context's last tokens and the drafter's earlier gains in the request, did not improve the prediction in
    replays.
    """

    def __init__(self) -> None:
        self._sum, self._count = _INITIAL_GAIN * _GAIN_WEIGHT, _GAIN_WEIGHT
        self._cells: dict[tuple[int, int], tuple[float, float]] = {}

    def expected(self, expected_accepted: float, first: float) -> float:
        """Return the expected number of accepted tokens that another drafter adds to the primary drafter's draft.

        ``expected_accepted`` is the expected number of accepted tokens of the primary draft, and ``first`` the
        acceptance probability of its first token.
        """
        total, count = self._cells.get(_bucket(expected_accepted, first), (0.0, 0.0))
        return (total + _GAIN_PRIOR_WEIGHT * self._sum / self._count) / (count + _GAIN_PRIOR_WEIGHT)

    def learn(self, expected_accepted: float, first: float, gain: int) -> None:
        """Record that another drafter added ``gain`` accepted tokens to the primary drafter's draft.

        ``expected_accepted`` is the expected number of accepted tokens of the primary draft. ``first`` is the
        acceptance probability of the primary draft's first token.
        """
        self._sum, self._count = _decay(self._sum, self._count, gain, _GAIN_MEMORY)
        cell = _bucket(expected_accepted, first)
        self._cells[cell] = _decay(*self._cells.get(cell, (0.0, 0.0)), gain, _CELL_MEMORY)


def _bucket(expected_accepted: float, first: float) -> tuple[int, int]:
    return bisect_right(_EXPECTED_BOUNDS, expected_accepted), bisect_right(_FIRST_TOKEN_BOUNDS, first)


def _decay(total: float, count: float, more: float, memory: float) -> tuple[float, float]:
    fading = min(1.0, memory / (count + 1.0))
    return fading * (total + more), fading * (count + 1.0)
