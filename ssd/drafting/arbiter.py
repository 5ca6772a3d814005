"""Several drafters, one draft: the cheapest is asked first, a costlier one where it should bring more than it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ssd.drafting.joint import Joint
from ssd.drafting.protocol import Draft, Drafter, DraftRequest, ScoredPass
from ssd.drafting.source import Source
from ssd.errors import require_fault
from ssd.pricing.rate import StepRate


class Arbiter:
    """Asks drafters from the cheapest to the most costly, and a costly one only where it promises more than it costs.

    The first drafter is always asked. What the others draft is offered to it, and one tree or chain comes of all, see
    `Joint`. Time is turned into tokens at the rate of the recent steps: where a step emits R tokens a second, s seconds
    must bring R s tokens (the rule of Dinkelbach 1967 for maximising the ratio of tokens to time). What is spent once,
    reading a context, is spent when the gains forgone without it have come to as much: nobody knows how long the output
    will be, and so it costs at most twice what was best (the ski rental of Karlin et al. 1988).

    A drafter that fails drafts nothing, is counted in ``num_failures`` and left alone for 1, 2, 4 ... steps. All are
    told when a request ends. Only speed depends on the choice, never a token. Owned by one thread.
    """

    def __init__(self, drafters: Sequence[Drafter], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """``drafters`` : the cheapest first, which judges ``DraftRequest.offers``. ``clock`` : seconds."""
        assert drafters
        self._sources = [Source(drafter) for drafter in drafters]
        self._step_rate = StepRate(clock)
        self._joint = Joint(self._sources, self._step_rate)

    @property
    def num_failures(self) -> int:
        """Times that a drafter failed, for all requests or for one."""
        return sum(source.num_failures for source in self._sources)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        self._step_rate.begin()
        return self._joint.merge(requests, self._sources[0].ask(requests))

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Tell the drafters whose draft it was."""
        self._step_rate.count(num_accepted + 1)
        self._joint.observe(request_id, draft, num_accepted)

    def observe_scores(self, scored: ScoredPass) -> None:
        """Tell every drafter that learns from it, also where one of them fails."""
        for source in self._sources:
            if source.observer is not None:
                try:
                    source.observer.observe_scores(scored)
                except BaseException as error:
                    require_fault(error)
                    source.count_failure()

    def finish(self, request_id: str) -> None:
        """Tell every drafter that a request has ended, also where one of them fails."""
        self._joint.finish(request_id)
        for source in self._sources:
            source.finish(request_id)

    def warm_up(self) -> None:
        """Warm up every drafter that wants it."""
        for source in self._sources:
            getattr(source.drafter, "warm_up", lambda: None)()

    def publish(self) -> None:
        """Have every drafter that learns about namespaces publish what it learned."""
        for source in self._sources:
            getattr(source.drafter, "publish", lambda: None)()
