"""Several drafters as one: costlier sources are asked where their excess pays, and one tree or chain holds all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ssd.drafting.protocol import (
    EMPTY_DRAFT,
    MAX_OFFERED,
    Draft,
    Drafter,
    DraftRequest,
    Offers,
    Prices,
    ScoredPass,
    ScoreObserver,
)
from ssd.drafting.source import Source, tried
from ssd.errors import require_fault
from ssd.pricing.rate import StepRate, best_gain, price_of


@dataclass(slots=True, eq=False)
class MergedTree:
    """A tree under construction.

    Of each node: ``token_ids``, ``parents`` (-1 after the context), ``estimates``, the chance once those before it
    came, and ``chances``, that it and all before it come. A parent comes before its children.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, draft: Draft, at: int = -1, *, rate: float = 1.0, apart: bool = False) -> list[int]:
        """Add a tree that goes on from node ``at``; returns the node that each of its tokens became. O(its tokens).

        A token that the tree has at that place is that one. ``rate`` : estimate of every token, where the draft has
        none. ``apart`` : its tokens become nodes of their own, whatever stands there.
        """
        estimates = [rate] * len(draft.token_ids) if draft.probabilities is None else draft.probabilities.tolist()
        nodes: list[int] = []
        for token, parent, estimate in zip(draft.token_ids.tolist(), draft.parents_of_all(), estimates, strict=True):
            nodes.append(self._add(token, nodes[parent] if parent >= 0 else at, estimate, apart))
        return nodes

    def find(self, draft: Draft) -> list[int]:
        """Of each token of a draft the node that it is here, -1 where there is none. O(its tokens)."""
        nodes: list[int] = []
        for token, parent in zip(draft.token_ids.tolist(), draft.parents_of_all(), strict=True):
            at = nodes[parent] if parent >= 0 else -1
            nodes.append(self._children.get((at, token), -1) if parent < 0 or at >= 0 else -1)
        return nodes

    def _add(self, token: int, parent: int, estimate: float, apart: bool) -> int:
        known = None if apart else self._children.get((parent, token))
        if known is not None:
            return known
        node = len(self.token_ids)
        self.token_ids.append(token)
        self.parents.append(parent)
        self.estimates.append(estimate)
        self.chances.append(estimate * (self.chances[parent] if parent >= 0 else 1.0))
        if not apart:
            self._children[parent, token] = node
        return node

    def best(self, limit: int, prices: Prices) -> tuple[Draft, list[int]]:
        """The likeliest nodes as a tree, likeliest first, while each is worth its price; and their numbers here.

        No other tree of as many of these nodes has a greater expected number of accepted tokens. O(n log n).
        """
        order = sorted(range(len(self.chances)), key=lambda node: -self.chances[node])[: max(0, limit)]
        kept = 0
        while kept < len(order) and self.chances[order[kept]] >= price_of(prices, kept):
            kept += 1
        order = order[:kept]
        place = {node: i for i, node in enumerate(order)}
        draft = Draft(
            np.array([self.token_ids[node] for node in order], np.int32),
            probabilities=np.array([self.estimates[node] for node in order], np.float64),
            parents=np.array([place.get(self.parents[node], -1) for node in order], np.int32),
        )
        return draft, order


def walked(draft: Draft, token_ids: Sequence[int]) -> list[int]:
    """The tokens of ``draft``, by index and in order, that say the beginning of ``token_ids``. O(tokens drafted)."""
    path: list[int] = []
    last = -1
    for node, (token, parent) in enumerate(zip(draft.token_ids.tolist(), draft.parents_of_all(), strict=True)):
        if parent == last and len(path) < len(token_ids) and token == token_ids[len(path)]:
            path.append(node)
            last = node
    return path


def depth_of(draft: Draft) -> int:
    """Tokens of its longest branch. O(tokens drafted)."""
    depths: list[int] = []
    for parent in draft.parents_of_all():
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return max(depths, default=0)


_MOST_PREFIXES: Final = 5

_MOST_CARRIED: Final = 4
"""Tokens carried on behind each prefix: more of them crowd out better ones."""


def carry(
    first: Source, request: DraftRequest, prices: Prices, merged: MergedTree, draft: Draft, nodes: Sequence[int]
) -> None:
    """Add to ``merged`` what ``first`` drafts behind the beginnings of ``draft``, whose tokens are its ``nodes``.

    One call for all beginnings, each as if it were a request of its own that ends at once: what comes of it teaches
    nothing, as most go on from a wrong token. O(context) for one copy of it.
    """
    chain = [i for i in _likeliest(draft)[:_MOST_PREFIXES] if nodes[i] >= 0]
    length = len(request.context)
    chain = [i for depth, i in enumerate(chain, 1) if merged.chances[nodes[i]] > prices[0] and depth < request.limit]
    if not chain:
        return
    text = np.concatenate([request.context, draft.token_ids[chain]])
    behind = [
        DraftRequest(
            f"{request.request_id}\0{depth}",
            text[: length + depth],
            request.prompt_length,
            request.snapshot,
            min(_MOST_CARRIED, request.limit - depth),
            prices=prices / merged.chances[nodes[i]],
            tree=True,
            sampling=request.sampling,
            learned=request.learned,
            may_teach=request.may_teach,
        )
        for depth, i in enumerate(chain, 1)
    ]
    for each, i, found in zip(behind, chain, first.ask(behind), strict=True):
        merged.add(found, nodes[i])
        first.finish(each.request_id)


def _likeliest(draft: Draft) -> list[int]:
    """The first of the context's successors, the first of its own, and so on."""
    path, last = list[int](), -1
    for node, parent in enumerate(draft.parents_of_all()):
        if parent == last:
            path.append(node)
            last = node
    return path


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


class DraftMerger:
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
        merged = MergedTree()
        step.trunk_nodes, step.is_joint = merged.add(step.trunk), True
        if not request.tree:  # beside a chain nothing can stand
            for asked in step.asked:
                asked.nodes = merged.find(asked.draft)
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
                asked.nodes = merged.add(asked.draft, rate=rate, apart=True)
            else:
                asked.nodes = merged.find(asked.draft)
            carry(self._sources[0], request, step.prices, merged, asked.draft, asked.nodes)
        draft, order = merged.best(request.limit, step.prices)
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


class Arbiter:
    """Asks drafters from the cheapest to the most costly, and a costly one only where it promises more than it costs.

    The first drafter is always asked. What the others draft is offered to it, and one tree or chain comes of all, see
    `DraftMerger`. Time is turned into tokens at the rate of the recent steps: where a step emits R tokens a second, s
    seconds must bring R s tokens (the rule of Dinkelbach 1967 for maximising the ratio of tokens to time). What is
    spent once, reading a context, is spent when the gains forgone without it have come to as much: nobody knows how
    long the output will be, and so it costs at most twice what was best (the ski rental of Karlin et al. 1988).

    A drafter that fails drafts nothing, is counted in ``num_failures`` and left alone for 1, 2, 4 ... steps. All are
    told when a request ends. Only speed depends on the choice, never a token. Owned by one thread.
    """

    def __init__(self, drafters: Sequence[Drafter], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """``drafters`` : the cheapest first, which judges ``DraftRequest.offers``. ``clock`` : seconds."""
        assert drafters
        self._sources = [Source(drafter) for drafter in drafters]
        self._step_rate = StepRate(clock)
        self._joint = DraftMerger(self._sources, self._step_rate)

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
