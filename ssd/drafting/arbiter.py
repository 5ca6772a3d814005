"""Several drafters, one draft: whichever promises most accepted tokens for what it costs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from ssd.drafting.one_by_one import OneByOne
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest, Prices, ScoredPass, ScoreObserver
from ssd.errors import require_fault
from ssd.pricing.acceptance_rates import AcceptanceRates
from ssd.pricing.gain import best_gain, promised_gain
from ssd.pricing.rate import StepRate

log = logging.getLogger(__name__)

TRIAL_EVERY = 256
"""A drafter that has not been worth its cost is tried all the same, at most once in this many steps of requests."""
_TRIAL_SHARE = 0.01
"""Most that trials may cost, in output tokens for each step of a request."""
_TRIAL_TOKENS = 2
_MOST_SKIPPED = 1024


@runtime_checkable
class CostlyDrafter(Protocol):
    """A drafter whose time counts; of one without these methods it does not."""

    def seconds_per_token(self, num_rows: int) -> float:
        """Seconds to draft one more token for each of ``num_rows`` requests together; 0 while it is not known."""
        ...

    def seconds_to_begin(self, request: DraftRequest) -> float:
        """Seconds before it can draft for ``request`` at all, spent once: to read a context it has not followed."""
        ...


@dataclass(slots=True, eq=False)
class _Source:
    drafter: Drafter
    asked: OneByOne
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    forgone: dict[str, float] = field(default_factory=dict)
    """Of each request, the gains it would have had if the drafter had read its context; in tokens."""
    num_not_asked: int = 0
    num_failures: int = 0
    num_to_skip: int = 0


class Arbiter:
    """Asks drafters from the cheapest to the most costly, and a costly one only where it promises more than it costs.

    A draft is worth its expected accepted tokens less the prices of verifying them, cut where that is greatest. Of a
    drafter that is yet to be asked, the request's recent rate of acceptance says what to expect; its time is turned
    into tokens at the rate of the recent steps: where a step emits R tokens a second, s seconds must bring R s tokens
    (the rule of Dinkelbach 1967 for maximising the ratio of tokens to time). The first drafter is always asked. What is
    spent once, reading a context, is spent when the gains forgone without it have come to as much: nobody knows how
    long the output will be, and so it costs at most twice what was best (the ski rental of Karlin et al. 1988).

    A drafter that fails drafts nothing, is counted in ``num_failures`` and left alone for 1, 2, 4 ... steps. Those not
    chosen are told nothing; all are told when a request ends. Only speed depends on the choice, never a token. Where
    drawn drafts are verified by rejection, the choice goes by estimates alone, which such a drafter makes without
    looking at what it drew. Owned by one thread.
    """

    def __init__(self, drafters: Sequence[Drafter], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """``drafters`` : at least one, the cheapest first. ``clock`` : seconds."""
        assert drafters
        self._sources = [_Source(drafter, OneByOne(drafter)) for drafter in drafters]
        self._step_rate = StepRate(clock)
        self._chosen: dict[str, _Source] = {}
        self._num_failures = 0

    @property
    def num_failures(self) -> int:
        """Times that a drafter failed, for all requests or for one."""
        return self._num_failures + sum(source.asked.num_failures for source in self._sources)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        self._step_rate.begin()
        first, *others = self._sources
        drafts = self._ask(first, requests)
        chosen = [first] * len(requests)
        gains = [_gain_of(first, request, draft) for request, draft in zip(requests, drafts, strict=True)]
        for source in others:
            asked = self._promising(source, requests, gains)
            for i, draft in zip(asked, self._ask(source, list(asked.values())), strict=True):
                gain = _gain_of(source, requests[i], draft)
                if gain > gains[i]:
                    drafts[i], gains[i], chosen[i] = draft, gain, source
        for request, source in zip(requests, chosen, strict=True):
            self._chosen[request.request_id] = source
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Tell the drafter whose draft it was."""
        self._step_rate.count(num_accepted + 1)
        source = self._chosen.get(request_id)
        if source is not None:
            if len(draft.token_ids):
                source.rates.learn(request_id, len(draft.token_ids), num_accepted)
            source.drafter.observe(request_id, draft, num_accepted)

    def observe_scores(self, scored: ScoredPass) -> None:
        """Tell every drafter that learns from it, also where one of them fails."""
        for source in self._sources:
            if isinstance(source.drafter, ScoreObserver):
                try:
                    source.drafter.observe_scores(scored)
                except BaseException as error:
                    require_fault(error)
                    self._count_failure(source)

    def finish(self, request_id: str) -> None:
        """Tell every drafter that a request has ended, also where one of them fails."""
        self._chosen.pop(request_id, None)
        for source in self._sources:
            source.rates.forget(request_id)
            source.forgone.pop(request_id, None)
            source.asked.forget(request_id)
            try:
                source.drafter.finish(request_id)
            except BaseException as error:
                require_fault(error)
                self._count_failure(source)

    def warm_up(self) -> None:
        """Warm up every drafter that wants it."""
        for source in self._sources:
            getattr(source.drafter, "warm_up", lambda: None)()

    def publish(self) -> None:
        """Have every drafter that learns about namespaces publish what it learned."""
        for source in self._sources:
            getattr(source.drafter, "publish", lambda: None)()

    def _promising(
        self, source: _Source, requests: Sequence[DraftRequest], gains: Sequence[float]
    ) -> dict[int, DraftRequest]:
        """The requests, by place, for which ``source`` is expected to gain more; its own cost is in their prices."""
        asked: dict[int, DraftRequest] = {i: request for i, request in enumerate(requests) if request.limit > 0}
        for _ in range(2):  # a pass for fewer rows costs each of them more
            cost = self._tokens_per_drafted_token(source, len(asked))
            asked = {i: replace(requests[i], prices=_priced(requests[i], cost)) for i in asked}
            more = {i: _promise(source, request) - gains[i] for i, request in asked.items()}
            asked = {i: request for i, request in asked.items() if more[i] > 0}
        asked = {i: request for i, request in asked.items() if self._may_begin(source, request, more[i])}
        for i, request in enumerate(requests):
            if i not in asked:
                source.rates.relax(request.request_id)
        source.num_not_asked = 0 if asked else source.num_not_asked + len(requests)
        return asked if source.num_not_asked < TRIAL_EVERY else self._trial(source, requests)

    def _trial(self, source: _Source, requests: Sequence[DraftRequest]) -> dict[int, DraftRequest]:
        """A few tokens for the request that is cheapest to begin with, where that costs little enough."""
        costs = {
            i: self._tokens_to_begin(source, request) + _TRIAL_TOKENS * self._tokens_per_drafted_token(source, 1)
            for i, request in enumerate(requests)
            if request.limit > 0
        }
        cheapest = min(costs, key=lambda i: costs[i], default=None)
        if cheapest is None or costs[cheapest] > _TRIAL_SHARE * source.num_not_asked:
            return {}
        source.num_not_asked = 0
        tried = requests[cheapest]
        return {cheapest: replace(tried, prices=np.zeros(1), limit=min(tried.limit, _TRIAL_TOKENS))}

    def _may_begin(self, source: _Source, request: DraftRequest, gain: float) -> bool:
        """Whether beginning costs no more than was forgone so far; ``gain`` is forgone where it costs more."""
        forgone = source.forgone.get(request.request_id, 0.0)
        if self._tokens_to_begin(source, request) <= forgone:
            return True
        source.forgone[request.request_id] = forgone + gain
        return False

    def _tokens_to_begin(self, source: _Source, request: DraftRequest) -> float:
        """What beginning with a request costs, in output tokens."""
        if not isinstance(source.drafter, CostlyDrafter):
            return 0.0
        return self._step_rate.tokens_per_s * source.drafter.seconds_to_begin(request)

    def _tokens_per_drafted_token(self, source: _Source, num_rows: int) -> float:
        """What one more drafted token costs each of ``num_rows`` requests, in output tokens."""
        if num_rows == 0 or not isinstance(source.drafter, CostlyDrafter):
            return 0.0
        return self._step_rate.tokens_per_s * source.drafter.seconds_per_token(num_rows) / num_rows

    def _ask(self, source: _Source, requests: Sequence[DraftRequest]) -> list[Draft]:
        nothing = [EMPTY_DRAFT] * len(requests)
        if not requests:
            return nothing
        if source.num_to_skip:
            source.num_to_skip -= 1
            return nothing
        try:
            drafts = source.asked.propose(requests)
        except BaseException as error:
            require_fault(error)
            self._count_failure(source)
            source.num_to_skip = min(2 ** (source.num_failures - 1), _MOST_SKIPPED)
            return nothing
        source.num_failures = 0
        return drafts

    def _count_failure(self, source: _Source) -> None:
        self._num_failures += 1
        source.num_failures += 1
        if self._num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... only
            log.exception("%s failed (%d failures so far)", type(source.drafter).__name__, self._num_failures)


def _gain_of(source: _Source, request: DraftRequest, draft: Draft) -> float:
    estimates = draft.probabilities
    if estimates is None:
        estimates = np.full(len(draft.token_ids), source.rates.rate(request.request_id))
    if not len(estimates):
        return 0.0
    return best_gain(replace(draft, probabilities=estimates).chances(), _priced(request, 0.0))


def _promise(source: _Source, request: DraftRequest) -> float:
    assert request.prices is not None
    return promised_gain(source.rates.rate(request.request_id), request.prices, request.limit)


def _priced(request: DraftRequest, cost: float) -> Prices:
    """The request's prices and ``cost`` for each token."""
    return np.array([cost]) if request.prices is None else request.prices + cost
