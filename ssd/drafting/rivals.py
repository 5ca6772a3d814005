"""Drafts that cannot become one: of several sources' the one of most gain is verified, the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ssd.drafting.protocol import Draft, DraftRequest, Prices
from ssd.drafting.source import Source
from ssd.drafting.trials import tried
from ssd.pricing.gain import best_gain, promised_gain
from ssd.pricing.rate import StepRate

_TRIAL_TOKENS: Final = 2


class Rivals:
    """Chooses one draft per request, by what it is expected to gain: accepted tokens less the prices of verifying them.

    Of a source that is yet to be asked, the request's recent rate of acceptance says what to expect. Those not
    chosen are told nothing.
    """

    def __init__(self, sources: Sequence[Source], step_rate: StepRate) -> None:
        self._sources = sources
        self._step_rate = step_rate
        self._chosen: dict[str, Source] = {}

    def choose(self, requests: Sequence[DraftRequest], drafts: list[Draft]) -> list[Draft]:
        """The best draft of each request. ``drafts`` : what the first source drafted; changed."""
        first, *others = self._sources
        chosen = [first] * len(requests)
        gains = [gain_of(first, request, draft) for request, draft in zip(requests, drafts, strict=True)]
        for source in others:
            asked = self._promising(source, requests, gains)
            for i, draft in zip(asked, source.ask(list(asked.values())), strict=True):
                gain = gain_of(source, requests[i], draft)
                if gain > gains[i]:
                    drafts[i], gains[i], chosen[i] = draft, gain, source
        for request, source in zip(requests, chosen, strict=True):
            self._chosen[request.request_id] = source
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Tell the source whose draft it was."""
        source = self._chosen.get(request_id)
        if source is not None:
            if len(draft.token_ids):
                source.rates.learn(request_id, len(draft.token_ids), num_accepted)
            source.drafter.observe(request_id, draft, num_accepted)

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._chosen.pop(request_id, None)

    def _promising(
        self, source: Source, requests: Sequence[DraftRequest], gains: Sequence[float]
    ) -> dict[int, DraftRequest]:
        """The requests, by place, for which ``source`` is expected to gain more; its own cost is in their prices."""
        asked: dict[int, DraftRequest] = {i: request for i, request in enumerate(requests) if request.limit > 0}
        for _ in range(2):  # a pass for fewer rows costs each of them more
            cost = self._tokens_per_drafted_token(source, len(asked))
            asked = {i: replace(requests[i], prices=_priced(requests[i], cost)) for i in asked}
            more = {i: _promise(source, request) - gains[i] for i, request in asked.items()}
            asked = {i: request for i, request in asked.items() if more[i] > 0}
        asked = {
            i: request
            for i, request in asked.items()
            if source.may_begin(request, self._tokens_to_begin(source, request), more[i])
        }
        for i, request in enumerate(requests):
            if i not in asked:
                source.rates.relax(request.request_id)

        def trial_costs() -> dict[int, float]:
            per_token = _TRIAL_TOKENS * self._tokens_per_drafted_token(source, 1)
            able = [i for i, request in enumerate(requests) if request.limit > 0]
            return {i: self._tokens_to_begin(source, requests[i]) + per_token for i in able}

        trial = tried(source, len(requests), len(asked), trial_costs)
        if trial is None:
            return asked
        request = requests[trial]
        return {trial: replace(request, prices=np.zeros(1), limit=min(request.limit, _TRIAL_TOKENS))}

    def _tokens_to_begin(self, source: Source, request: DraftRequest) -> float:
        """What beginning with a request costs, in output tokens."""
        return self._step_rate.tokens_per_s * source.seconds_to_begin(request)

    def _tokens_per_drafted_token(self, source: Source, num_rows: int) -> float:
        """What one more drafted token costs each of ``num_rows`` requests, in output tokens."""
        return self._step_rate.tokens_per_s * source.seconds_per_token(num_rows) / num_rows if num_rows else 0.0


def gain_of(source: Source, request: DraftRequest, draft: Draft) -> float:
    """Expected accepted tokens less prices of a draft of ``source``."""
    estimates = draft.probabilities
    if estimates is None:
        estimates = np.full(len(draft.token_ids), source.rates.rate(request.request_id))
    if not len(estimates):
        return 0.0
    return best_gain(replace(draft, probabilities=estimates).chances(), _priced(request, 0.0))


def _promise(source: Source, request: DraftRequest) -> float:
    assert request.prices is not None
    return promised_gain(source.rates.rate(request.request_id), request.prices, request.limit)


def _priced(request: DraftRequest, cost: float) -> Prices:
    """The request's prices and ``cost`` for each token."""
    return np.array([cost]) if request.prices is None else request.prices + cost
