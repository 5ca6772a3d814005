"""A drafter among several: asked without ever failing the others, tried now and then, its time and tokens counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from ssd.drafting.protocol import EMPTY_DRAFT, MODEL, Draft, Drafter, DraftRequest, ScoreObserver
from ssd.errors import require_fault
from ssd.pricing.pass_costs import OUTLIER
from ssd.pricing.rate import AcceptanceRates, Excess


class OneByOne:
    """Asks a drafter for all requests at once; after a failure for each alone, to find those that it fails for.

    They get no draft and are not asked for again until ``forget``. Where all fail it is the drafter that does; where
    there is one only, and the drafter just worked for others, it is the request.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.num_failures = 0
        """Requests that the drafter failed for while it drafted for others."""
        self._drafter = drafter
        self._failing: set[str] = set()
        self._works = False  # when it was last asked

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; raises what the drafter raises where it fails for all of them."""
        if not self._failing:
            return self._ask(requests)
        is_asked = [request.request_id not in self._failing for request in requests]
        drafts = iter(self._ask([request for request, yes in zip(requests, is_asked, strict=True) if yes]))
        return [next(drafts) if yes else EMPTY_DRAFT for yes in is_asked]

    def forget(self, request_id: str) -> None:
        """The request has ended, or begins anew."""
        self._failing.discard(request_id)

    def _ask(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if not requests:
            return []
        try:
            drafts = self._drafter.propose(requests)
        except BaseException as error:
            require_fault(error)
            return self._each_alone(requests, error)
        self._works = True
        return drafts

    def _each_alone(self, requests: Sequence[DraftRequest], failure: BaseException) -> list[Draft]:
        drafts, failed = [EMPTY_DRAFT] * len(requests), {request.request_id for request in requests}
        worked, self._works = self._works, False
        for index, request in enumerate(requests if len(requests) > 1 else ()):
            try:
                drafts[index : index + 1] = self._drafter.propose([request])
            except BaseException as error:
                require_fault(error)
            else:
                failed.discard(request.request_id)
                self._works = True
        if not (self._works or (worked and len(requests) == 1)):
            raise failure
        self.num_failures += len(failed)
        self._failing |= failed
        return drafts


log = logging.getLogger(__name__)
_MOST_SKIPPED: Final = 1024
_FIRST_DEPTH: Final = 4.0
_RECENT: Final = 0.1
"""How far what was seen of depths and times goes by the last asking."""


@runtime_checkable
class CostlyDrafter(Protocol):
    """A drafter whose time counts; of one without these methods it does not."""

    def seconds_per_token(self, num_rows: int) -> float:
        """Seconds to draft one more token for each of ``num_rows`` requests together; 0 while it is not known."""
        ...

    def seconds_to_begin(self, request: DraftRequest) -> float:
        """Seconds before it can draft for ``request`` at all, spent once: to read a context it has not followed."""
        ...


class Source:
    """One drafter of several.

    ``rates`` : how often its tokens are accepted. ``excess`` : what asking it brought beyond what was there.
    ``forgone`` : of each request, the gains it would have had if the drafter had read its context; in tokens.
    ``depth`` : of its recent drafts, in tokens one after another. ``seconds_beside`` : of an asking, beyond those of
    its tokens. ``kind`` : as `ExternalProposals` has it. ``observer`` : the drafter, where it learns from what the
    target says.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.rates = AcceptanceRates()
        self.excess = Excess()
        self.forgone: dict[str, float] = {}
        self.depth, self.seconds_beside = _FIRST_DEPTH, 0.0
        self.kind: int = getattr(drafter, "kind", MODEL)
        self.num_not_asked = 0
        self._asked = OneByOne(drafter)
        # Asked once: to see whether an object keeps a protocol takes ten microseconds.
        self._costly = drafter if isinstance(drafter, CostlyDrafter) else None
        self.observer = drafter if isinstance(drafter, ScoreObserver) else None
        self._num_failures = self._failures_in_a_row = self._num_to_skip = 0

    @property
    def num_failures(self) -> int:
        """Times that it failed, for all requests or for one."""
        return self._num_failures + self._asked.num_failures

    def ask(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; none of one that fails, which is left alone for 1, 2, 4 ... calls."""
        nothing = [EMPTY_DRAFT] * len(requests)
        if not requests:
            return nothing
        if self._num_to_skip:
            self._num_to_skip -= 1
            return nothing
        try:
            drafts = self._asked.propose(requests)
        except BaseException as error:
            require_fault(error)
            self.count_failure()
            self._num_to_skip = min(2 ** (self._failures_in_a_row - 1), _MOST_SKIPPED)
            return nothing
        self._failures_in_a_row = 0
        return drafts

    def seconds_per_token(self, num_rows: int) -> float:
        """Of one more token for each of so many requests together."""
        return 0.0 if self._costly is None else self._costly.seconds_per_token(num_rows)

    def seconds_to_begin(self, request: DraftRequest) -> float:
        """Before it can draft for a request at all."""
        return 0.0 if self._costly is None else self._costly.seconds_to_begin(request)

    def may_begin(self, request: DraftRequest, cost: float, gain: float) -> bool:
        """Whether beginning, which costs so many tokens, costs no more than was forgone so far; else ``gain`` is."""
        forgone = self.forgone.get(request.request_id, 0.0)
        if cost <= forgone:
            return True
        self.forgone[request.request_id] = forgone + gain
        return False

    def drafted(self, depth: int) -> None:
        """Count a draft of so many tokens one after another."""
        self.depth += _RECENT * (depth - self.depth)

    def took(self, seconds: float, num_rows: int, depth: int) -> None:
        """Count an asking for so many requests, whose longest draft has so many tokens one after another."""
        known = depth * self.seconds_per_token(num_rows)
        if known:
            beside = min(seconds, OUTLIER * (known + self.seconds_beside)) - known
            self.seconds_beside = max(0.0, self.seconds_beside + _RECENT * (beside - self.seconds_beside))

    def forget(self, request_id: str) -> None:
        """Forget that a request failed: it has ended, or begins anew."""
        self._asked.forget(request_id)

    def finish(self, request_id: str) -> None:
        """Tell the drafter that a request has ended, also where that fails."""
        self.rates.forget(request_id)
        self.forgone.pop(request_id, None)
        self.forget(request_id)
        try:
            self.drafter.finish(request_id)
        except BaseException as error:
            require_fault(error)
            self.count_failure()

    def count_failure(self) -> None:
        """Count a failure that is being handled; the 1st, 2nd, 4th, 8th ... is logged."""
        self._num_failures += 1
        self._failures_in_a_row += 1
        if self._num_failures.bit_count() == 1:
            log.exception("%s failed (%d failures so far)", type(self.drafter).__name__, self._num_failures)


TRIAL_EVERY = 512
"""A source that has not been worth its cost is tried at most once in this many steps of requests."""

_TRIAL_SHARE = 0.005
"""Most that trials may cost, in output tokens for each step of a request."""


def tried(source: Source, num_rows: int, num_asked: int, costs: Callable[[], Mapping[int, float]]) -> int | None:
    """Which row of a step to try ``source`` for, None for none, after a step that asked it for ``num_asked``.

    ``costs`` : says of each row that can be asked for what a trial costs, in output tokens; called where one is due.
    """
    source.num_not_asked = 0 if num_asked else source.num_not_asked + num_rows
    if source.num_not_asked < TRIAL_EVERY:
        return None
    known = costs()
    cheapest = min(known, key=lambda i: known[i], default=None)
    if cheapest is None or known[cheapest] > _TRIAL_SHARE * source.num_not_asked:
        return None
    source.num_not_asked = 0
    return cheapest
