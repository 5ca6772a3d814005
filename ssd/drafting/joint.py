"""Drafts that become one: costlier sources are asked where their excess pays, and one tree or chain holds all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ssd.drafting.carried import carry
from ssd.drafting.grafting import Graft, depth_of, walked
from ssd.drafting.offers import MAX_OFFERED, Offers
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest, Prices
from ssd.drafting.source import Source
from ssd.drafting.trials import tried
from ssd.pricing.rate import StepRate, best_gain, price_of

_PRICE_UNKNOWN: Final = np.array([0.1])
_FORGETTING: Final = 0.8
"""Of the tokens that the first source got accepted in a request, from step to step."""
_PROMISE_SHARE: Final = 0.6
"""How far its promise, and not what came of late, says what the next steps bring."""
_MOST_RECENT: Final = 20


@dataclass(slots=True, eq=False)
class _Asked:
    """A source that was asked. ``promised``, ``first`` : of what was there before. ``nodes`` : its draft's in the tree,
    -1 where the tree has none."""

    source: Source
    draft: Draft
    promised: float
    first: float
    nodes: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Step:
    """One request at one step.

    ``own`` : what the first source drafted alone; ``trunk`` : what it drafted with all offers. ``promised`` : expected
    accepted tokens of all that is there, ``first`` : the chance of its first token. ``local`` : tokens that the
    request's next steps are expected to bring without further help. ``trunk_nodes`` : of the trunk's tokens, where
    they are in the draft, -1 for nowhere.
    """

    request: DraftRequest
    own: Draft
    promised: float
    first: float
    local: float
    asked: list[_Asked] = field(default_factory=list)
    trunk: Draft = field(default_factory=lambda: EMPTY_DRAFT)
    trunk_nodes: list[int] = field(default_factory=list)
    is_joint: bool = False

    @property
    def prices(self) -> Prices:
        return _PRICE_UNKNOWN if self.request.prices is None else self.request.prices


class Joint:
    """Asks a costlier source for the requests where what it should bring beyond what is there exceeds its time.

    A token saves the time that it would take later, and what a source brings stands where the first one's draft has
    failed: there a token takes a step of its own more often than elsewhere. So seconds are turned into tokens by the
    time of a step over the tokens that this request's steps bring of late, not by the rate of all.

    The first source judges what the others offer together with all that it knows. Behind the first tokens of what they
    offer it is asked again, as if they had been said: a prefix of theirs is carried on by what stands there elsewhere.
    What a source offers without an estimate of its own is no offer to judge: it goes beside the first one's draft, by
    the source's recent rate of acceptance.
    """

    def __init__(self, sources: Sequence[Source], step_rate: StepRate) -> None:
        self._sources = sources
        self._step_rate = step_rate
        self._steps: dict[str, _Step] = {}
        self._recent: dict[str, float] = {}

    def merge(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> list[Draft]:
        """One draft per request. ``drafts`` : what the first source drafted, with estimates."""
        steps = [self._step(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        for source in self._sources[1:]:
            asked = self._worth_asking(source, steps)
            for i, draft in zip(asked, source.ask(list(asked.values())), strict=True):
                if len(draft.token_ids):
                    _add(steps[i], source, draft)
        self._steps.update((step.request.request_id, step) for step in steps)
        self._judge([step for step in steps if step.asked])
        return [self._joined(step) if step.asked else step.own for step in steps]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Tell each source what came of its own; nothing where nothing was proposed."""
        step = self._steps.pop(request_id, None)
        if step is None:
            return
        path = np.arange(num_accepted) if draft.path is None else draft.path[:num_accepted]
        said = draft.token_ids[path].tolist()
        own = len(walked(step.own, said))
        recent = self._recent.get(request_id, step.local)
        self._recent[request_id] = _FORGETTING * recent + (1 - _FORGETTING) * min(own, _MOST_RECENT)
        if not step.is_joint or draft is EMPTY_DRAFT:
            self._sources[0].drafter.observe(request_id, draft, num_accepted)
            return
        verified = len(draft.token_ids)
        self._tell(self._sources[0], request_id, step.trunk, step.trunk_nodes, verified, said)
        reached = own
        for asked in step.asked:
            asked.source.excess.learn(asked.promised, asked.first, max(0, num_accepted - reached))
            accepted = self._tell(asked.source, request_id, asked.draft, asked.nodes, verified, said)
            reached = max(reached, accepted)

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._steps.pop(request_id, None)
        self._recent.pop(request_id, None)

    def _step(self, request: DraftRequest, draft: Draft) -> _Step:
        promised, first = _promise(draft)
        recent = self._recent.get(request.request_id, promised)
        local = _PROMISE_SHARE * promised + (1 - _PROMISE_SHARE) * recent
        return _Step(request, draft, promised, first, local)

    def _worth_asking(self, source: Source, steps: Sequence[_Step]) -> dict[int, DraftRequest]:
        """The requests, by place, for which asking pays; what a token of the source costs is in their prices."""
        able = [i for i, step in enumerate(steps) if step.request.limit > 0]
        excess = {i: source.excess.expected(steps[i].promised, steps[i].first) for i in able}
        asked, costs = able, dict[int, float]()
        for _ in range(2):  # a pass for fewer rows costs each of them more
            costs = {i: self._tokens_per_drafted_token(source, steps[i], len(asked), len(steps)) for i in asked}
            asked = [i for i in asked if excess[i] > source.depth * (costs[i] + price_of(steps[i].prices, 0))]
        asked = [
            i
            for i in asked
            if source.may_begin(
                steps[i].request, self._tokens_to_begin(source, steps[i]), excess[i] - source.depth * costs[i]
            )
        ]
        for i in set(range(len(steps))).difference(asked):
            source.rates.relax(steps[i].request.request_id)

        def trial_costs() -> dict[int, float]:
            alone = {i: self._tokens_per_drafted_token(source, steps[i], 1, len(steps)) for i in able}
            return {i: self._tokens_to_begin(source, steps[i]) + source.depth * alone[i] for i in able}

        trial = tried(source, len(steps), len(asked), trial_costs)
        if trial is not None:
            return {trial: steps[trial].request}
        return {i: replace(steps[i].request, prices=steps[i].prices + costs[i]) for i in asked}

    def _tokens_per_drafted_token(self, source: Source, step: _Step, num_asked: int, num_rows: int) -> float:
        """What one more drafted token of the source costs a request, one of ``num_asked`` for which all rows wait."""
        step_s = self._step_rate.seconds_per_step
        if num_asked == 0 or step_s == 0.0:
            return 0.0
        return (1.0 + step.local) * source.seconds_per_token(num_asked) * num_rows / (num_asked * step_s)

    def _tokens_to_begin(self, source: Source, step: _Step) -> float:
        return self._step_rate.tokens_per_s * source.seconds_to_begin(step.request)

    def _judge(self, steps: Sequence[_Step]) -> None:
        """Have the first source draft again, with what the others offer."""
        offered = []
        for step in steps:
            step.trunk = step.own
            if offers := _offers_of(step.asked):
                offered.append((step, replace(step.request, offers=offers)))
        judged = self._sources[0].ask([request for _, request in offered])
        for (step, _), trunk in zip(offered, judged, strict=True):
            step.trunk = trunk

    def _joined(self, step: _Step) -> Draft:
        """One draft of all that was drafted for a request."""
        request, apart = step.request, [asked for asked in step.asked if asked.draft.probabilities is None]
        graft = Graft()
        step.trunk_nodes, step.is_joint = graft.add(step.trunk), True
        if not request.tree:  # beside a chain nothing can stand
            for asked in step.asked:
                asked.nodes = graft.find(asked.draft)
            gain = _gain(step, self._sources[0], step.trunk)
            for asked in apart:
                if _gain(step, asked.source, asked.draft) > gain:
                    step.trunk_nodes, asked.nodes = (
                        [-1] * len(step.trunk_nodes),
                        list(range(len(asked.draft.token_ids))),
                    )
                    return asked.draft
            return step.trunk
        for asked in step.asked:
            if asked.draft.probabilities is None:
                rate = asked.source.rates.rate(request.request_id)
                asked.nodes = graft.add(asked.draft, rate=rate, apart=True)
            else:
                asked.nodes = graft.find(asked.draft)
            carry(self._sources[0], request, step.prices, graft, asked.draft, asked.nodes)
        draft, order = graft.best(request.limit, step.prices)
        place = {node: i for i, node in enumerate(order)}
        step.trunk_nodes = [place.get(node, -1) for node in step.trunk_nodes]
        for asked in step.asked:
            asked.nodes = [place.get(node, -1) for node in asked.nodes]
        draft.match_length = step.trunk.match_length
        draft.source = next((each.draft.source for each in step.asked if 0 in each.nodes), step.trunk.source)
        if 0 in step.trunk_nodes:
            draft.source = step.trunk.source
        return draft

    def _tell(
        self, source: Source, request_id: str, draft: Draft, nodes: Sequence[int], verified: int, said: Sequence[int]
    ) -> int:
        """Tell a source what came of as much of its draft as was verified; how many tokens of it were accepted."""
        missing = next((i for i, node in enumerate(nodes) if not 0 <= node < verified), len(nodes))
        told = draft.cut(missing)
        path = walked(told, said)
        if source is not self._sources[0] and len(told.token_ids):
            source.rates.learn(request_id, len(told.token_ids), len(path))
        if told.parents is not None:
            told = replace(told, path=np.array(path, np.int32))
        source.drafter.observe(request_id, told, len(path))
        return len(path)


def _promise(draft: Draft) -> tuple[float, float]:
    """Expected accepted tokens of a draft, and the chance of its likeliest first token; 0 where it has no estimates."""
    estimates = draft.probabilities
    if estimates is None or not len(estimates):
        return 0.0, 0.0
    if draft.parents is None:
        return float(np.cumprod(estimates).sum()), float(estimates[0])
    return float(draft.chances().sum()), float(estimates[draft.parents < 0].max())


def _gain(step: _Step, source: Source, draft: Draft) -> float:
    """Expected accepted tokens less prices; without estimates by the source's recent rate."""
    if draft.probabilities is None:
        rate = source.rates.rate(step.request.request_id)
        draft = replace(draft, probabilities=np.full(len(draft.token_ids), rate))
    return best_gain(draft.chances(), step.prices)


def _add(step: _Step, source: Source, draft: Draft) -> None:
    step.asked.append(_Asked(source, draft, step.promised, step.first))
    source.drafted(depth_of(draft))
    promised, first = _promise(draft)
    step.promised, step.first = max(step.promised, promised), max(step.first, first)


def _offers_of(asked: Sequence[_Asked]) -> Offers | None:
    """All drafts that have estimates as one forest, cut where it is full; None without any."""
    tokens, parents, chances, kinds = list[int](), list[int](), list[float](), list[int]()
    for each in asked:
        if each.draft.probabilities is not None:
            begin, size = len(tokens), len(each.draft.token_ids)
            tokens += each.draft.token_ids.tolist()
            chances += each.draft.probabilities.tolist()
            parents += [begin + parent if parent >= 0 else -1 for parent in each.draft.parents_of_all()]
            kinds += [each.source.kind] * size
    if not tokens:
        return None
    kept = slice(0, MAX_OFFERED)
    return Offers(
        np.array(tokens[kept], np.int32),
        np.array(parents[kept], np.int32),
        np.array(chances[kept], np.float64),
        np.array(kinds[kept], np.int32),
    )
