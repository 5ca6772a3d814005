"""Several drafters as one: costlier sources are asked where their excess pays, the first one judges proposals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ssd.drafting.proposer import Source, tried
from ssd.drafting.protocol import (
    EMPTY_DRAFT,
    MAX_PROPOSED_TOKENS,
    Draft,
    Drafter,
    DraftRequest,
    ExternalProposals,
    ScoredPass,
    ScoreObserver,
    TokenCosts,
)
from ssd.errors import require_fault
from ssd.pricing.rate import StepRate, cost_at


def walked(draft: Draft, token_ids: Sequence[int]) -> list[int]:
    """The tokens of ``draft``, by index and in order, that say the beginning of ``token_ids``. O(tokens drafted)."""
    path: list[int] = []
    last = -1
    for node, (token, parent) in enumerate(zip(draft.token_ids.tolist(), draft.parents_of_all(), strict=True)):
        if parent == last and len(path) < len(token_ids) and token == token_ids[len(path)]:
            path.append(node)
            last = node
    return path


def num_verified(own: Draft, verified: Draft) -> int:
    """Tokens of ``own`` before the first that ``verified`` has not at its place. O(tokens drafted)."""
    children = {
        (parent, token): node
        for node, (token, parent) in enumerate(zip(verified.token_ids.tolist(), verified.parents_of_all(), strict=True))
    }
    nodes: list[int] = []
    for token, parent in zip(own.token_ids.tolist(), own.parents_of_all(), strict=True):
        node = children.get((nodes[parent] if parent >= 0 else -1, token))
        if node is None:
            break
        nodes.append(node)
    return len(nodes)


def depth_of(draft: Draft) -> int:
    """Tokens of its longest branch. O(tokens drafted)."""
    depths: list[int] = []
    for parent in draft.parents_of_all():
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return max(depths, default=0)


_PRICE_UNKNOWN: Final = np.array([0.1])

_FORGETTING: Final = 0.8
"""Of the tokens that the first source got accepted in a request, from step to step."""

_PROMISE_SHARE: Final = 0.6
"""How far its promise, and not what came of late, says what the next steps bring."""

_MOST_RECENT: Final = 20

_IDLE_STEPS: Final = 32
_LONGEST_PAUSE: Final = 8
"""After each so many steps in a row at which nobody was worth asking, that is considered half as often, at last every
8th step: it makes objects of every row."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A source that was asked. ``promised``, ``first`` : of what was there before."""

    source: Source
    draft: Draft
    promised: float
    first: float


@dataclass(slots=True, eq=False)
class _Step:
    """One request at one step.

    ``own`` : what the first source drafted alone. ``promised`` : expected accepted tokens of all that is there,
    ``first`` : the chance of its first token. ``local`` : tokens that the request's next steps are expected to bring
    without further help.
    """

    request: DraftRequest
    own: Draft
    promised: float
    first: float
    local: float
    asked: list[_Asked] = field(default_factory=list)

    @property
    def token_costs(self) -> TokenCosts:
        return _PRICE_UNKNOWN if self.request.token_costs is None else self.request.token_costs


def _promise(draft: Draft) -> tuple[float, float]:
    """Expected accepted tokens of a draft, and the chance of its likeliest first token; 0 where it has no estimates."""
    estimates = draft.probabilities
    if estimates is None or not len(estimates):
        return 0.0, 0.0
    if draft.parents is None:
        return float(np.cumprod(estimates).sum()), float(estimates[0])
    return float(draft.path_probabilities().sum()), float(estimates[draft.parents < 0].max())


def _add(step: _Step, source: Source, draft: Draft) -> int:
    """Count it in; how deep it is."""
    step.asked.append(_Asked(source, draft, step.promised, step.first))
    depth = depth_of(draft)
    source.drafted(depth)
    promised, first = _promise(draft)
    step.promised, step.first = max(step.promised, promised), max(step.first, first)
    return depth


def _offers_of(step: _Step) -> ExternalProposals:
    """All that was drafted for a request as one tree, cut where it is full; a draft without estimates of its own is
    offered at its source's recent rate of acceptance."""
    tokens, parents, chances, kinds = list[int](), list[int](), list[float](), list[int]()
    for each in step.asked:
        begin, draft = len(tokens), each.draft
        size, rate = len(draft.token_ids), each.source.rates.rate(step.request.request_id)
        tokens += draft.token_ids.tolist()
        chances += [rate] * size if draft.probabilities is None else draft.probabilities.tolist()
        parents += [begin + parent if parent >= 0 else -1 for parent in draft.parents_of_all()]
        kinds += [each.source.kind] * size
    kept = slice(0, MAX_PROPOSED_TOKENS)
    return ExternalProposals(
        np.array(tokens[kept], np.int32),
        np.array(parents[kept], np.int32),
        np.array(chances[kept], np.float64),
        np.array(kinds[kept], np.int32),
    )


class Arbiter:
    """Asks drafters from the cheapest to the most costly, and a costly one only where it promises more than it costs.

    The first drafter is always asked. What the others draft is offered to it, and it judges that together with all that
    it knows, in one tree or chain.

    Time is turned into tokens. A token saves the time that it would take later, and what a source brings stands where
    the first one's draft has failed: there a token takes a step of its own more often than elsewhere. So seconds are
    turned into tokens by the time of a step, asking left out, over the tokens that this request's steps bring of late,
    not by the rate of all. What is spent once, reading a context, is spent at the rate of recent steps (Dinkelbach
    1967), when the gains forgone without it have come to as much: nobody knows how long the output will be, and so it
    costs at most twice what was best (the ski rental of Karlin et al. 1988).

    A drafter that fails drafts nothing, is counted in ``num_failures`` and left alone for 1, 2, 4 ... steps. All are
    told when a request ends. Only speed depends on the choice, never a token. Owned by one thread.
    """

    def __init__(self, drafters: Sequence[Drafter], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """``drafters`` : the cheapest first, which judges ``DraftRequest.proposals``. ``clock`` : seconds."""
        assert drafters
        self._sources = [Source(drafter) for drafter in drafters]
        self._clock, self._step_rate = clock, StepRate(clock)
        self._steps: dict[str, _Step] = {}
        self._recent: dict[str, float] = {}
        self._num_idle = self._num_spared = 0
        self._has_asked = False  # at this step, or would have, were what it costs to begin not too much

    @property
    def num_failures(self) -> int:
        """Times that a drafter failed, for all requests or for one."""
        return sum(source.num_failures for source in self._sources)

    @property
    def first(self) -> Drafter:
        """The cheapest."""
        return self._sources[0].drafter

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        self.begin()
        return self.extend(requests, self._sources[0].ask(requests))

    def begin(self) -> None:
        """A step begins: `first` is about to be asked."""
        self._step_rate.begin()

    def is_due(self, num_rows: int) -> bool:
        """Whether ``extend`` is to be called at this step, for so many rows."""
        if self._num_spared + 1 < min(_LONGEST_PAUSE, 1 << (self._num_idle // _IDLE_STEPS)):
            self._num_spared += 1
            for source in self._sources[1:]:
                source.num_not_asked += num_rows
            return False
        self._num_spared = 0
        return True

    def extend(self, requests: Sequence[DraftRequest], drafts: list[Draft]) -> list[Draft]:
        """What `first` drafted, others in place of those that another source was asked to add to."""
        steps = [self._step(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        took: list[tuple[Source, float, int, int]] = []
        waited, self._has_asked = self._clock(), False
        for source in self._sources[1:]:
            asked = self._worth_asking(source, steps)
            if not asked:
                continue
            began, depth = self._clock(), 0
            is_new = any(map(source.seconds_to_begin, asked.values()))
            for i, draft in zip(asked, source.ask(list(asked.values())), strict=True):
                if len(draft.token_ids):
                    depth = max(depth, _add(steps[i], source, draft))
            if not is_new:
                took.append((source, self._clock() - began, len(asked), depth))
        self._steps.update((step.request.request_id, step) for step in steps)
        offered = [i for i, step in enumerate(steps) if step.asked]
        began = self._clock()
        judged = self._sources[0].ask([replace(requests[i], proposals=_offers_of(steps[i])) for i in offered])
        ended = self._clock()
        for source, seconds, num_rows, depth in took:
            source.took(seconds + ended - began, num_rows, depth)
        self._num_idle = 0 if self._has_asked else self._num_idle + 1
        if took or offered:
            self._step_rate.leave_out(ended - waited)  # a step that asks nobody is what asking must beat
        for i, draft in zip(offered, judged, strict=True):
            drafts[i] = draft
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Tell each source what came of its own; nothing where nothing was proposed."""
        self._step_rate.count(num_accepted + 1)
        step = self._steps.pop(request_id, None)
        if step is None:
            return
        path = np.arange(num_accepted) if draft.path is None else draft.path[:num_accepted]
        said = draft.token_ids[path].tolist()
        reached = len(walked(step.own, said))
        self._remember(request_id, step, reached)
        self._sources[0].drafter.observe(request_id, draft, num_accepted)
        for asked in step.asked if draft is not EMPTY_DRAFT else ():
            asked.source.excess.learn(asked.promised, asked.first, max(0, num_accepted - reached))
            told = asked.draft.cut(num_verified(asked.draft, draft))
            own_path = walked(told, said)
            if len(told.token_ids):
                asked.source.rates.learn(request_id, len(told.token_ids), len(own_path))
            if told.parents is not None:
                told = replace(told, path=np.array(own_path, np.int32))
            asked.source.drafter.observe(request_id, told, len(own_path))
            reached = max(reached, len(own_path))

    def count(self, request_id: str, num_accepted: int) -> bool:
        """Count a step of a request; whether others than `first` were asked, who are to be told by ``observe``."""
        step = self._steps.get(request_id)
        if step is not None and step.asked:
            return True
        self._step_rate.count(num_accepted + 1)
        if step is not None:
            self._remember(request_id, self._steps.pop(request_id), num_accepted)
        return False

    def _remember(self, request_id: str, step: _Step, reached: int) -> None:
        """How many tokens the first source's draft got accepted."""
        recent = self._recent.get(request_id, step.local)
        self._recent[request_id] = _FORGETTING * recent + (1 - _FORGETTING) * min(reached, _MOST_RECENT)

    def observe_scores(self, scored: ScoredPass) -> None:
        """Tell every drafter that learns from it, also where one of them fails."""
        self._tell(lambda observer: observer.observe_scores(scored))

    def learn_scores(self, scored: ScoredPass) -> None:
        """Have every drafter learn that does, also where one of them fails."""
        self._tell(lambda observer: observer.learn_scores(scored))

    def _tell(self, tell: Callable[[ScoreObserver], None]) -> None:
        for source in self._sources:
            if source.observer is not None:
                try:
                    tell(source.observer)
                except BaseException as error:
                    require_fault(error)
                    source.count_failure()

    def finish(self, request_id: str) -> None:
        """Tell every drafter that a request has ended, also where one of them fails."""
        self._steps.pop(request_id, None)
        self._recent.pop(request_id, None)
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

    def _step(self, request: DraftRequest, draft: Draft) -> _Step:
        promised, first = _promise(draft)
        recent = self._recent.get(request.request_id, promised)
        local = _PROMISE_SHARE * promised + (1 - _PROMISE_SHARE) * recent
        return _Step(request, draft, promised, first, local)

    def _worth_asking(self, source: Source, steps: Sequence[_Step]) -> dict[int, DraftRequest]:
        """The requests, by place, for which asking pays; what a token of the source costs is in their token_costs."""
        able = [i for i, step in enumerate(steps) if step.request.limit > 0]
        excess = {i: source.excess.expected(steps[i].promised, steps[i].first) for i in able}
        asked, costs, gains = able, dict[int, float](), dict[int, float]()
        for _ in range(2):  # a pass for fewer rows costs each of them more
            each = {i: self._tokens_of(steps[i], len(asked), len(steps)) for i in asked}
            costs = {i: each[i] * source.seconds_per_token(len(asked)) for i in asked}
            spent = {
                i: source.depth * (costs[i] + cost_at(steps[i].token_costs, 0)) + each[i] * source.seconds_beside
                for i in asked
            }
            gains = {i: excess[i] - spent[i] for i in asked}
            asked = [i for i in asked if gains[i] > 0.0]
        self._has_asked = self._has_asked or bool(asked)
        asked = [
            i for i in asked if source.may_begin(steps[i].request, self._tokens_to_begin(source, steps[i]), gains[i])
        ]
        for i in set(range(len(steps))).difference(asked):
            source.rates.relax(steps[i].request.request_id)

        def trial_costs() -> dict[int, float]:
            alone = source.depth * source.seconds_per_token(1) + source.seconds_beside
            return {
                i: self._tokens_to_begin(source, steps[i]) + self._tokens_of(steps[i], 1, len(steps)) * alone
                for i in able
            }

        trial = tried(source, len(steps), len(asked), trial_costs)
        if trial is not None:
            self._has_asked = True
            return {trial: steps[trial].request}
        return {i: replace(steps[i].request, token_costs=steps[i].token_costs + costs[i]) for i in asked}

    def _tokens_of(self, step: _Step, num_asked: int, num_rows: int) -> float:
        """What a second costs a request, one of ``num_asked`` that have a source asked, for which all rows wait."""
        step_s = self._step_rate.seconds_per_step
        if num_asked == 0 or step_s == 0.0:
            return 0.0
        return (1.0 + step.local) * num_rows / (num_asked * step_s)

    def _tokens_to_begin(self, source: Source, step: _Step) -> float:
        return self._step_rate.tokens_per_s * source.seconds_to_begin(step.request)
