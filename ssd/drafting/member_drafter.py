"""One of the drafters that `HybridDrafter` combines: its failures, latency, gains and next probe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from ssd.cost_model.pass_costs import OUTLIER
from ssd.cost_model.throughput import AcceptanceRates, MarginalGain
from ssd.drafting.protocol import (
    EMPTY_DRAFT,
    MODEL,
    Draft,
    Drafter,
    DraftOutcome,
    DraftRequest,
    ScoredPass,
    ScoreLearner,
)
from ssd.errors import reraise_exits


class FaultIsolatingDrafter:
    """Wraps a drafter to find the request that makes a call fail: after a failure, each request is drafted for alone.

    A request that causes a failure gets no draft until ``finish`` is called for it. If all requests fail, the drafter
    is at fault, and its exception is raised. If a call has only one request and fails, the request is at fault if the
    previous call succeeded.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.num_failures = 0
        """The number of requests for which the drafter failed while it succeeded for other requests."""
        self._drafter = drafter
        self._failing: set[str] = set()
        self._works = False  # whether its last call succeeded

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order; raise the drafter's exception if it fails for all requests."""
        if not self._failing:
            return self._propose(requests)
        is_included = [request.request_id not in self._failing for request in requests]
        drafts = iter(self._propose([request for request, yes in zip(requests, is_included, strict=True) if yes]))
        return [next(drafts) if yes else EMPTY_DRAFT for yes in is_included]

    def finish(self, request_id: str) -> None:
        """Drop the drafter's state of a request that ends or restarts, and allow drafts for it again."""
        self._failing.discard(request_id)
        self._drafter.finish(request_id)

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if not requests:
            return []
        try:
            drafts = self._drafter.propose(requests)
        except BaseException as error:
            reraise_exits(error)
            return self._retry_each_alone(requests, error)
        self._works = True
        return drafts

    def _retry_each_alone(self, requests: Sequence[DraftRequest], failure: BaseException) -> list[Draft]:
        drafts, failed = [EMPTY_DRAFT] * len(requests), {request.request_id for request in requests}
        worked, self._works = self._works, False
        for index, request in enumerate(requests if len(requests) > 1 else ()):
            try:
                drafts[index : index + 1] = self._drafter.propose([request])
            except BaseException as error:
                reraise_exits(error)
            else:
                failed.discard(request.request_id)
                self._works = True
        if not (self._works or (worked and len(requests) == 1)):
            raise failure
        self.num_failures += len(failed)
        self._failing |= failed
        return drafts


log = logging.getLogger(__name__)
_MAX_SKIPPED: Final = 1024
_FIRST_DEPTH: Final = 4.0
_RECENT: Final = 0.1
"""The weight of the latest observation in the running means of a drafter's draft depth and call time."""


@runtime_checkable
class CostlyDrafter(Protocol):
    """A drafter, such as a draft model, that estimates its drafting time. Other drafters are assumed to be free."""

    def seconds_per_token(self, num_rows: int) -> float:
        """Return the seconds to draft one more token for each of ``num_rows`` requests in one batch; 0 if unknown."""
        ...

    def seconds_to_start(self, request: DraftRequest) -> float:
        """Return the one-time cost, in seconds, of reading a request's context before its first draft."""
        ...


class MemberDrafter:
    """One of the drafters that a hybrid drafter combines, with its failures, latency and gains.

    Attributes:
        marginal_gain: The accepted tokens that the drafter added to the primary drafter's drafts.
        forgone_gains: For each request whose context the drafter has not read, the gain missed so far, in tokens.
        depth: The running mean of the depth of the drafter's drafts, in tokens.
        fixed_seconds: The running mean of a call's fixed time, i.e. without the time per draft token.
        rows_since_use: The number of rows of all steps since the drafter was last used.
        learner: The drafter, if it learns from the logits of a forward pass; else None.
        learns_from_context: Whether the drafter sees from a request's next context which draft tokens were accepted, so
            that only the outcome of the request's last draft must be reported.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.rates = AcceptanceRates()
        self.marginal_gain = MarginalGain()
        self.forgone_gains: dict[str, float] = {}
        self.depth, self.fixed_seconds = _FIRST_DEPTH, 0.0
        self.kind: int = getattr(drafter, "kind", MODEL)
        self.rows_since_use = 0
        self._isolated = FaultIsolatingDrafter(drafter)
        # Checked once, because checking whether an object implements a protocol takes ten microseconds.
        self._costly = drafter if isinstance(drafter, CostlyDrafter) else None
        self.learner = drafter if isinstance(drafter, ScoreLearner) else None
        self.learns_from_context: bool = getattr(drafter, "learns_from_context", False)
        self._num_failures = self._failures_in_a_row = self._num_to_skip = 0

    @property
    def num_failures(self) -> int:
        """Return the number of calls that failed as a whole, plus the number of requests that made a call fail."""
        return self._num_failures + self._isolated.num_failures

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order; return empty drafts if the drafter fails.

        After the n-th consecutive failure, the next 2^(n - 1) calls return empty drafts without calling the drafter.
        """
        nothing = [EMPTY_DRAFT] * len(requests)
        if not requests:
            return nothing
        if self._num_to_skip:
            self._num_to_skip -= 1
            return nothing
        try:
            drafts = self._isolated.propose(requests)
        except BaseException as error:
            reraise_exits(error)
            self._count_failure()
            self._num_to_skip = min(2 ** (self._failures_in_a_row - 1), _MAX_SKIPPED)
            return nothing
        self._failures_in_a_row = 0
        return drafts

    def seconds_per_token(self, num_rows: int) -> float:
        return 0.0 if self._costly is None else self._costly.seconds_per_token(num_rows)

    def seconds_to_start(self, request: DraftRequest) -> float:
        return 0.0 if self._costly is None else self._costly.seconds_to_start(request)

    def should_start(self, request: DraftRequest, cost: float, gain: float) -> bool:
        """Return whether a costly drafter should read a request's context now, because the missed gains reach ``cost``.

        The missed gains are what the request would have gained if the drafter had drafted for it in earlier steps. If
        they are too small, add ``gain``, the missed gain of this step. Both arguments are in output tokens.
        """
        forgone_gains = self.forgone_gains.get(request.request_id, 0.0)
        if cost <= forgone_gains:
            return True
        self.forgone_gains[request.request_id] = forgone_gains + gain
        return False

    def record_depth(self, depth: int) -> None:
        self.depth += _RECENT * (depth - self.depth)

    def record_latency(self, seconds: float, num_rows: int, depth: int) -> None:
        """Record that drafting for ``num_rows`` requests took ``seconds``; the deepest draft has ``depth`` tokens."""
        known = depth * self.seconds_per_token(num_rows)
        if known:
            fixed = min(seconds, OUTLIER * (known + self.fixed_seconds)) - known
            self.fixed_seconds = max(0.0, self.fixed_seconds + _RECENT * (fixed - self.fixed_seconds))

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None) -> None:
        if outcomes or (scored is not None and self.learner is not None):
            self._call(lambda: self.drafter.observe(outcomes, scored))

    def learn_scores(self, scored: ScoredPass) -> None:
        if (learner := self.learner) is not None:
            self._call(lambda: learner.learn_scores(scored))

    def finish(self, request_id: str) -> None:
        self.rates.forget(request_id)
        self.forgone_gains.pop(request_id, None)
        self._call(lambda: self._isolated.finish(request_id))

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            reraise_exits(error)
            self._count_failure()

    def _count_failure(self) -> None:
        """Count the exception that is being handled, and log it if it is the 1st, 2nd, 4th, 8th, ... one."""
        self._num_failures += 1
        self._failures_in_a_row += 1
        if self._num_failures.bit_count() == 1:
            log.exception(
                "%s failed (%d times so far): in this step, some requests get no drafts from this drafter",
                type(self.drafter).__name__,
                self._num_failures,
            )


PROBE_INTERVAL = 512
"""The minimum number of rows between two trials of a drafter that is unused because its cost exceeds its expected gain.
"""

_PROBE_SHARE = 0.005
"""The maximum average cost, in output tokens per row and step, of trials of a drafter that is otherwise unused."""


def pick_probe(
    member: MemberDrafter, num_rows: int, num_used: int, costs: Callable[[], Mapping[int, float]]
) -> int | None:
    """Return the index of the request for which to try a drafter that was long unused; None if no trial is due.

    A trial shows whether the drafter has become worth its cost. The step has ``num_rows`` rows and used the drafter for
    ``num_used`` of them. ``costs`` returns the cost of a trial in output tokens for each possible row; it is called
    only after PROBE_INTERVAL rows without use.
    """
    member.rows_since_use = 0 if num_used else member.rows_since_use + num_rows
    if member.rows_since_use < PROBE_INTERVAL:
        return None
    known = costs()
    cheapest = min(known, key=lambda i: known[i], default=None)
    if cheapest is None or known[cheapest] > _PROBE_SHARE * member.rows_since_use:
        return None
    member.rows_since_use = 0
    return cheapest
