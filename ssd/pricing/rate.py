"""The rate at which tokens come: what an accepted token is worth is the time that it would take later."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Float64, Record, inlined

Floats = npt.NDArray[np.float64]

FORGETTING = 0.99
"""What a pass counts after each later one, where passes are chosen by the rate."""
_STEP_FORGETTING = 0.95
_NO_TIME = 1e-9


class RateRecord(Record):
    """What passes gave and took of late: sums over them, each ``forgetting`` times as much after every later one."""

    forgetting: Float64
    passes: Float64
    tokens: Float64
    seconds: Float64


@inlined
def add_pass(rate: RateRecord, num_tokens: float, seconds: float) -> None:
    """A pass put out ``num_tokens``."""
    rate.passes = rate.forgetting * rate.passes + 1.0
    rate.tokens = rate.forgetting * rate.tokens + num_tokens
    rate.seconds = rate.forgetting * rate.seconds + seconds


@inlined
def recent_pass(rate: RateRecord) -> tuple[float, float]:
    """Output tokens and seconds of an average pass of late."""
    passes = rate.passes
    return (rate.tokens / passes, rate.seconds / passes) if passes > 0.0 else (0.0, 0.0)


@inlined
def price_at(rate: RateRecord, num_tokens: float, seconds: float, more_seconds: float) -> float:
    """Output tokens that ``more_seconds`` are worth in a pass that gives ``num_tokens`` in ``seconds`` without.

    A drafted token that adds them cannot pay below that chance of being accepted: what `joint_rate` leaves of a draft
    is never shorter for having ended it here.
    """
    tokens, time = recent_pass(rate)
    return float(more_seconds * (num_tokens + tokens) / max(seconds + time, _NO_TIME))


@inlined
def joint_rate(recent: tuple[float, float], num_tokens: float, seconds: float) -> float:
    """Tokens per second of a pass and a ``recent_pass`` together: what gives most of it is chosen.

    A token that is accepted saves the time it would have taken later. How much that is, recent passes tell, and this
    one too: text that is easy to draft now is easy a little later, and what it saves is then cheap. So for an expected
    output G and a time C of the pass, and T and K the average ones of late, (G + T) / (C + K) is maximised. In replays
    of recorded outputs that gave more than G / C, and more than charging time at the rate T / K (Dinkelbach 1967).
    """
    return float((num_tokens + recent[0]) / max(seconds + recent[1], _NO_TIME))


class Rate:
    """Tokens per second of recent passes, of which those before count less and less."""

    def __init__(self, forgetting: float) -> None:
        """``forgetting`` : what a pass counts after each later one."""
        self._forgetting = forgetting
        self._passes = self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of recent passes; 0 before the first."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    @property
    def seconds_per_pass(self) -> float:
        """Seconds of an average pass of late; 0 before the first."""
        return self._seconds / self._passes if self._passes > 0.0 else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Count a pass that put out ``num_tokens``."""
        self._passes = self._forgetting * self._passes + 1.0
        self._tokens = self._forgetting * self._tokens + num_tokens
        self._seconds = self._forgetting * self._seconds + seconds


class StepRate:
    """The rate of steps from their first proposal to their last observation; the pauses between do not count."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` : seconds."""
        self._clock = clock
        self._rate, self._plain = Rate(_STEP_FORGETTING), Rate(_STEP_FORGETTING)
        self._began, self._last, self._num_tokens, self._is_plain = 0.0, 0.0, 0, True

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of recent steps; 0 before the first."""
        return self._rate.tokens_per_s

    @property
    def seconds_per_step(self) -> float:
        """Seconds of a recent step that nothing was left out of, where there was one; 0 before the first.

        Not more than of all: where there were none of late, they may be faster now.
        """
        return min(self._plain.seconds_per_pass or math.inf, self._rate.seconds_per_pass)

    def begin(self) -> None:
        """Begin a step; the one before is over."""
        if self._num_tokens:
            for rate in (self._rate, self._plain) if self._is_plain else (self._rate,):
                rate.observe(self._num_tokens, self._last - self._began)
        self._began, self._num_tokens, self._is_plain = self._clock(), 0, True

    def leave_out(self, seconds: float) -> None:
        """So much of this step is not counted, which made more of it than it would have been without."""
        self._began += seconds
        self._is_plain = False

    def count(self, num_tokens: int) -> None:
        """Count tokens that the step put out."""
        self._last = self._clock()
        self._num_tokens += num_tokens


def cost_at(prices: Floats, i: int) -> float:
    """Price of the i-th token of a draft; the last one named holds for all beyond."""
    return float(prices[min(i, len(prices) - 1)])


_FIRST_GUESS = 0.7
_FIRST_WEIGHT = 20.0
_MEMORY = 2000.0
_LEANING = 8.0
_RELAXATION = 0.99


class AcceptanceRates:
    """Chance that a drafted token is accepted once those before it were.

    A request's rate is that of its own tested tokens and of ``_LEANING`` more that went as all requests' do. Traffic
    changes, so counts beyond ``_MEMORY`` tokens fade, and those of a request that is not drafted for fade with
    every step. Within one step the rates stand still.
    """

    def __init__(self) -> None:
        self._accepted = _FIRST_GUESS * _FIRST_WEIGHT
        self._tested = _FIRST_WEIGHT
        self._own: dict[str, tuple[float, float]] = {}

    def rate(self, request_id: str) -> float:
        """The rate of a request, within (0, 1)."""
        accepted, tested = self._own.get(request_id, (0.0, 0.0))
        overall = (self._accepted + 0.5) / (self._tested + 1.0)
        return (accepted + _LEANING * overall) / (tested + _LEANING)

    def learn(self, request_id: str, num_draft_tokens: int, num_accepted: int) -> None:
        """Learn from a verified draft. Tokens after the first rejected one were not tested."""
        tested = min(num_draft_tokens, num_accepted + 1)
        fading = min(1.0, _MEMORY / (self._tested + tested))
        self._accepted = fading * (self._accepted + num_accepted)
        self._tested = fading * (self._tested + tested)
        own_accepted, own_tested = self._own.get(request_id, (0.0, 0.0))
        self._own[request_id] = own_accepted + num_accepted, own_tested + tested

    def relax(self, request_id: str) -> None:
        """Fade what is known of a request by one step without a draft of this drafter's."""
        if request_id in self._own:
            accepted, tested = self._own[request_id]
            self._own[request_id] = _RELAXATION * accepted, _RELAXATION * tested

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._own.pop(request_id, None)


_PROMISED: Final = (0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 1.8, 2.6, 4.0, 6.0, 10.0, 20.0)
_FIRST: Final = (0.05, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_FIRST_EXCESS: Final = 1.0
_EXCESS_WEIGHT: Final = 8.0
_EXCESS_MEMORY: Final = 500.0
_EXCESS_LEANING: Final = 12.0
_CELL_MEMORY: Final = 150.0


class MarginalGain:
    """Mean of the tokens that a source brought beyond the draft that was there, by what that draft promised.

    A cell is the draft's expected accepted tokens and the chance of its first token, both bucketed; its mean leans on
    that of all askings, by as much as ``_EXCESS_LEANING`` of them. Counts beyond a memory fade, as traffic changes. In
    replays of recorded requests nothing else known before asking told more: not the last tokens, not how the source
    fared in the request so far. O(1), two microseconds.
    """

    def __init__(self) -> None:
        self._sum, self._count = _FIRST_EXCESS * _EXCESS_WEIGHT, _EXCESS_WEIGHT
        self._cells: dict[tuple[int, int], tuple[float, float]] = {}

    def expected(self, promised: float, first: float) -> float:
        """Tokens, >= 0, where the draft that is there promises so many and its first token has such a chance."""
        total, count = self._cells.get(_cell(promised, first), (0.0, 0.0))
        return (total + _EXCESS_LEANING * self._sum / self._count) / (count + _EXCESS_LEANING)

    def learn(self, promised: float, first: float, excess: int) -> None:
        """Learn from an asking that brought ``excess`` tokens more, >= 0."""
        self._sum, self._count = _faded(self._sum, self._count, excess, _EXCESS_MEMORY)
        cell = _cell(promised, first)
        self._cells[cell] = _faded(*self._cells.get(cell, (0.0, 0.0)), excess, _CELL_MEMORY)


def _cell(promised: float, first: float) -> tuple[int, int]:
    return bisect_right(_PROMISED, promised), bisect_right(_FIRST, first)


def _faded(total: float, count: float, more: float, memory: float) -> tuple[float, float]:
    fading = min(1.0, memory / (count + 1.0))
    return fading * (total + more), fading * (count + 1.0)
