"""Measure the throughput: an accepted token is worth the time that it would take later."""

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
"""The weight of a pass relative to the next one, in the throughput that the length of drafts is chosen by."""
_STEP_FORGETTING = 0.95
_NO_TIME = 1e-9


class ThroughputRecord(Record):
    """The tokens and seconds of recent passes, as exponentially weighted sums.

    Attributes:
        forgetting: The factor that each pass applies to the sums before it.
        passes: The number of passes.
        tokens: Their output tokens.
        seconds: Their time.
    """

    forgetting: Float64
    passes: Float64
    tokens: Float64
    seconds: Float64


@inlined
def add_pass(rate: ThroughputRecord, num_tokens: float, seconds: float) -> None:
    """Add a pass."""
    rate.passes = rate.forgetting * rate.passes + 1.0
    rate.tokens = rate.forgetting * rate.tokens + num_tokens
    rate.seconds = rate.forgetting * rate.seconds + seconds


@inlined
def recent_pass(rate: ThroughputRecord) -> tuple[float, float]:
    """Return the output tokens and the seconds of an average recent pass."""
    passes = rate.passes
    return (rate.tokens / passes, rate.seconds / passes) if passes > 0.0 else (0.0, 0.0)


@inlined
def cost_in_tokens(rate: ThroughputRecord, num_tokens: float, seconds: float, more_seconds: float) -> float:
    """Return the output tokens that ``more_seconds`` are worth in a pass that produces ``num_tokens`` in ``seconds``.

    A draft token that takes this time does not pay if its acceptance probability is lower. A draft that ends there is
    therefore never shorter than what `combined_rate` would choose.
    """
    tokens, time = recent_pass(rate)
    return float(more_seconds * (num_tokens + tokens) / max(seconds + time, _NO_TIME))


@inlined
def combined_rate(recent: tuple[float, float], num_tokens: float, seconds: float) -> float:
    """Return the tokens per second of a pass combined with an average recent pass. Drafts are chosen to maximise it.

    An accepted token saves the time that it would have taken later. How much that is follows from recent passes, and
    from this pass too: text that is easy to draft now is easy to draft a little later, and then a token saves little.
    So for an expected output G and a time C of the pass, and the recent averages T and K, (G + T) / (C + K) is
    maximised. In replays of recorded outputs this was better than G / C, and better than charging time at the rate T /
    K (Dinkelbach 1967).
    """
    return float((num_tokens + recent[0]) / max(seconds + recent[1], _NO_TIME))


class Throughput:
    """The tokens per second of recent passes, exponentially weighted."""

    def __init__(self, forgetting: float) -> None:
        """Create an empty measurement.

        Args:
            forgetting: The factor that each pass applies to the sums before it.
        """
        self._forgetting = forgetting
        self._passes = self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of recent passes; 0 before the first."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    @property
    def seconds_per_pass(self) -> float:
        """Return the seconds of an average recent pass; 0 before the first."""
        return self._seconds / self._passes if self._passes > 0.0 else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a pass that produced ``num_tokens``."""
        self._passes = self._forgetting * self._passes + 1.0
        self._tokens = self._forgetting * self._tokens + num_tokens
        self._seconds = self._forgetting * self._seconds + seconds


class StepThroughput:
    """The throughput of steps, from their first proposal to their last observation.

    Pauses between steps do not count.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Create an empty measurement.

        Args:
            clock: Returns the time in seconds.
        """
        self._clock = clock
        self._rate, self._plain = Throughput(_STEP_FORGETTING), Throughput(_STEP_FORGETTING)
        self._began, self._last, self._num_tokens, self._is_plain = 0.0, 0.0, 0, True

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of recent steps; 0 before the first."""
        return self._rate.tokens_per_s

    @property
    def seconds_per_step(self) -> float:
        """Return the seconds of a recent step from which no time was left out; 0 before the first.

        At most those of an average step, because steps may have become faster since the last one of that kind.
        """
        return min(self._plain.seconds_per_pass or math.inf, self._rate.seconds_per_pass)

    def begin(self) -> None:
        """Start a step and end the one before."""
        if self._num_tokens:
            for rate in (self._rate, self._plain) if self._is_plain else (self._rate,):
                rate.observe(self._num_tokens, self._last - self._began)
        self._began, self._num_tokens, self._is_plain = self._clock(), 0, True

    def leave_out(self, seconds: float) -> None:
        """Leave some seconds out of this step, because they were spent on additional drafts."""
        self._began += seconds
        self._is_plain = False

    def count(self, num_tokens: int) -> None:
        """Add output tokens of the step."""
        self._last = self._clock()
        self._num_tokens += num_tokens


def cost_at(prices: Floats, i: int) -> float:
    """Return the cost of the i-th draft token; the last value holds for all further tokens."""
    return float(prices[min(i, len(prices) - 1)])


_INITIAL_RATE = 0.7
_INITIAL_WEIGHT = 20.0
_MEMORY = 2000.0
_PRIOR_WEIGHT = 8.0
_IDLE_FADING = 0.99


class AcceptanceRates:
    """The probability that a draft token is accepted, given that the tokens before it are, by request.

    The rate of a request combines its own tested tokens with ``_PRIOR_WEIGHT`` tokens at the average rate of all
    requests. Counts beyond ``_MEMORY`` tokens fade because traffic changes, and those of a request that is not drafted
    for fade with every step. Within one step the rates are constant.
    """

    def __init__(self) -> None:
        self._accepted = _INITIAL_RATE * _INITIAL_WEIGHT
        self._tested = _INITIAL_WEIGHT
        self._own: dict[str, tuple[float, float]] = {}

    def rate(self, request_id: str) -> float:
        """Return the rate of a request, within (0, 1)."""
        accepted, tested = self._own.get(request_id, (0.0, 0.0))
        overall = (self._accepted + 0.5) / (self._tested + 1.0)
        return (accepted + _PRIOR_WEIGHT * overall) / (tested + _PRIOR_WEIGHT)

    def record(self, request_id: str, num_draft_tokens: int, num_accepted: int) -> None:
        """Record a verified draft. Tokens after the first rejected one were not tested."""
        tested = min(num_draft_tokens, num_accepted + 1)
        fading = min(1.0, _MEMORY / (self._tested + tested))
        self._accepted = fading * (self._accepted + num_accepted)
        self._tested = fading * (self._tested + tested)
        own_accepted, own_tested = self._own.get(request_id, (0.0, 0.0))
        self._own[request_id] = own_accepted + num_accepted, own_tested + tested

    def fade(self, request_id: str) -> None:
        """Fade the counts of a request by one step without a draft."""
        if request_id in self._own:
            accepted, tested = self._own[request_id]
            self._own[request_id] = _IDLE_FADING * accepted, _IDLE_FADING * tested

    def forget(self, request_id: str) -> None:
        """Drop the counts of a request that has ended."""
        self._own.pop(request_id, None)


_EXPECTED_BOUNDS: Final = (0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 1.8, 2.6, 4.0, 6.0, 10.0, 20.0)
_FIRST_TOKEN_BOUNDS: Final = (0.05, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_INITIAL_GAIN: Final = 1.0
_GAIN_WEIGHT: Final = 8.0
_GAIN_MEMORY: Final = 500.0
_GAIN_PRIOR_WEIGHT: Final = 12.0
_CELL_MEMORY: Final = 150.0


class MarginalGain:
    """The mean number of accepted tokens that a proposer adds to the draft that is there.

    It is kept by the draft's expected accepted tokens and by the acceptance probability of its first token, both
    bucketed. The mean of a bucket is combined with ``_GAIN_PRIOR_WEIGHT`` observations at the overall mean. Counts
    beyond a limit fade, because traffic changes. In replays of recorded requests nothing else that is known beforehand
    predicted the gain better, neither the last tokens nor the proposer's earlier gains in the request. O(1), two
    microseconds.
    """

    def __init__(self) -> None:
        self._sum, self._count = _INITIAL_GAIN * _GAIN_WEIGHT, _GAIN_WEIGHT
        self._cells: dict[tuple[int, int], tuple[float, float]] = {}

    def expected(self, expected_accepted: float, first: float) -> float:
        """Return the expected gain in tokens, >= 0.

        Args:
            expected_accepted: The expected accepted tokens of the draft that is there.
            first: The acceptance probability of its first token.
        """
        total, count = self._cells.get(_cell(expected_accepted, first), (0.0, 0.0))
        return (total + _GAIN_PRIOR_WEIGHT * self._sum / self._count) / (count + _GAIN_PRIOR_WEIGHT)

    def learn(self, expected_accepted: float, first: float, gain: int) -> None:
        """Record that a proposer added ``gain`` accepted tokens, >= 0."""
        self._sum, self._count = _faded(self._sum, self._count, gain, _GAIN_MEMORY)
        cell = _cell(expected_accepted, first)
        self._cells[cell] = _faded(*self._cells.get(cell, (0.0, 0.0)), gain, _CELL_MEMORY)


def _cell(expected_accepted: float, first: float) -> tuple[int, int]:
    return bisect_right(_EXPECTED_BOUNDS, expected_accepted), bisect_right(_FIRST_TOKEN_BOUNDS, first)


def _faded(total: float, count: float, more: float, memory: float) -> tuple[float, float]:
    fading = min(1.0, memory / (count + 1.0))
    return fading * (total + more), fading * (count + 1.0)
