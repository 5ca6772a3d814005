"""Combine several drafters: the first ("primary") drafter scores the tokens that the other drafters propose.

A costly drafter is used only if its expected gain exceeds its cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ssd.cost_model.throughput import StepThroughput, cost_at
from ssd.drafting.member_drafter import MemberDrafter, pick_probe
from ssd.drafting.protocol import (
    EMPTY_DRAFT,
    MAX_PROPOSED_TOKENS,
    Draft,
    Drafter,
    DraftOutcome,
    DraftRequest,
    ExternalProposals,
    ScoredPass,
    TokenCosts,
)


def num_shared_tokens(own: Draft, verified: Draft) -> int:
    """Return how many leading tokens of the draft ``own`` are also in the draft ``verified``, at the same place."""
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
    """Return the number of tokens on the longest branch of a draft."""
    depths: list[int] = []
    for parent in draft.parents_of_all():
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return max(depths, default=0)


_DEFAULT_TOKEN_COST: Final = np.array([0.1])

_FORGETTING: Final = 0.8
"""The factor by which each step lowers the weight of earlier steps in a request's running mean of accepted draft
tokens.
"""

_EXPECTATION_WEIGHT: Final = 0.6
"""The weight of a draft's own estimate in the predicted number of tokens that the next steps of its request accept.

The rest of the weight belongs to the number of tokens accepted in recent steps.
"""

_MAX_RECENT: Final = 20

_IDLE_STEPS: Final = 32
_LONGEST_PAUSE: Final = 32
"""The maximum number of steps between two decisions whether to use other drafters in addition to the primary drafter.

Each decision creates Python objects for every row, so the pause doubles after _IDLE_STEPS consecutive steps in which no
other drafter was worth its cost.
"""


@dataclass(slots=True, eq=False)
class _MemberDraft:
    """A secondary drafter's draft for a request.

    ``expected_accepted`` and ``first_probability`` are those of `_RequestStep` before this draft was made.
    """

    member: MemberDrafter
    draft: Draft
    expected_accepted: float
    first_probability: float


@dataclass(slots=True, eq=False)
class _RequestStep:
    """All drafts that were made for one request in one step, and their estimates.

    Attributes:
        primary_draft: The primary drafter's draft, made without proposals of other drafters.
        expected_accepted: The expected accepted tokens of the best draft so far.
        first_probability: The greatest acceptance probability of a first draft token so far.
        expected_tokens: The expected accepted tokens per step without other drafters.
    """

    request: DraftRequest
    primary_draft: Draft
    expected_accepted: float
    first_probability: float
    expected_tokens: float
    member_drafts: list[_MemberDraft] = field(default_factory=list)

    @property
    def token_costs(self) -> TokenCosts:
        return _DEFAULT_TOKEN_COST if self.request.token_costs is None else self.request.token_costs


def _expectations(draft: Draft) -> tuple[float, float]:
    """Return a draft's expected number of accepted tokens, and its greatest probability of a first token.

    Both are 0 if the draft has no estimates.
    """
    estimates = draft.probabilities
    if estimates is None or not len(estimates):
        return 0.0, 0.0
    if draft.parents is None:
        return float(np.cumprod(estimates).sum()), float(estimates[0])
    return float(draft.path_probabilities().sum()), float(estimates[draft.parents < 0].max())


def _add(step: _RequestStep, member: MemberDrafter, draft: Draft) -> int:
    step.member_drafts.append(_MemberDraft(member, draft, step.expected_accepted, step.first_probability))
    depth = depth_of(draft)
    member.record_depth(depth)
    expected_accepted, first_probability = _expectations(draft)
    step.expected_accepted = max(step.expected_accepted, expected_accepted)
    step.first_probability = max(step.first_probability, first_probability)
    return depth


def _proposals_of(step: _RequestStep) -> ExternalProposals:
    """Combine the drafts of secondary drafters for a request into one forest of at most MAX_PROPOSED_TOKENS tokens."""
    tokens, parents, probabilities, kinds = list[int](), list[int](), list[float](), list[int]()
    for each in step.member_drafts:
        begin, draft = len(tokens), each.draft
        size, rate = len(draft.token_ids), each.member.rates.rate(step.request.request_id)
        tokens += draft.token_ids.tolist()
        probabilities += [rate] * size if draft.probabilities is None else draft.probabilities.tolist()
        parents += [begin + parent if parent >= 0 else -1 for parent in draft.parents_of_all()]
        kinds += [each.member.kind] * size
    kept = slice(0, MAX_PROPOSED_TOKENS)
    return ExternalProposals(
        np.array(tokens[kept], np.int32),
        np.array(parents[kept], np.int32),
        np.array(probabilities[kept], np.float64),
        np.array(kinds[kept], np.int32),
    )


class HybridDrafter:
    """Combines drafters: always uses the cheapest one, and a costly one only if its expected gain exceeds its cost.

    The first drafter is the primary drafter, which is used in every step. The other, secondary drafters propose tokens,
    which the primary drafter scores together with its own candidates in one draft tree or chain.

    To compare gain and cost, drafting time is converted to output tokens, at the throughput that the request has
    without costly drafters. The average throughput would be too high, because costly drafters mostly help requests for
    which the primary drafter finds little. A drafter must also read a request's context once, before its first draft
    for the request. It does so only when the gains that the request has missed without the drafter reach the cost of
    reading. This cost is converted to tokens at the throughput of recent steps (Dinkelbach 1967). As the output's
    length is unknown, this rule costs at most twice the optimum (the ski rental problem, Karlin et al. 1988).

    A drafter that fails proposes nothing, is counted in ``num_failures`` and is skipped for 1, 2, 4, ... steps. One
    thread owns the hybrid drafter.
    """

    def __init__(self, drafters: Sequence[Drafter], *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Combine ``drafters``, from cheapest to most costly; the first one must score ``DraftRequest.proposals``.

        ``clock`` returns the time in seconds.
        """
        assert drafters
        self._members = [MemberDrafter(drafter) for drafter in drafters]
        self._clock, self._step_rate = clock, StepThroughput(clock)
        self._steps: dict[str, _RequestStep] = {}
        self._recent: dict[str, float] = {}
        self._num_idle = self._num_spared = 0
        self._has_used_others = False  # in this step; also if only the cost of starting prevented it

    @property
    def num_failures(self) -> int:
        """Return the total number of failed calls of all combined drafters."""
        return sum(member.num_failures for member in self._members)

    @property
    def primary(self) -> Drafter:
        """Return the first drafter, which is used in every step."""
        return self._members[0].drafter

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.start_step()
        return self.extend_drafts(requests, self._members[0].propose(requests))

    def start_step(self) -> None:
        """Start the timer of a step; call this method in every step, before the primary drafter drafts."""
        self._step_rate.start_step()

    def is_due(self, num_rows: int) -> bool:
        """Return whether this step should compare the costs of secondary drafters with their expected gains."""
        if self._num_spared + 1 < min(_LONGEST_PAUSE, 1 << (self._num_idle // _IDLE_STEPS)):
            self._num_spared += 1
            for member in self._members[1:]:
                member.rows_since_use += num_rows
            return False
        self._num_spared = 0
        return True

    def extend_drafts(self, requests: Sequence[DraftRequest], drafts: list[Draft]) -> list[Draft]:
        """Add tokens of secondary drafters to drafts if the expected gain exceeds the cost; return all drafts."""
        steps = [self._step(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        latencies: list[tuple[MemberDrafter, float, int, int]] = []
        started, self._has_used_others = self._clock(), False
        for member in self._members[1:]:
            selected = self._select_requests(member, steps)
            if not selected:
                continue
            began, depth = self._clock(), 0
            is_new = any(map(member.seconds_to_start, selected.values()))
            for i, draft in zip(selected, member.propose(list(selected.values())), strict=True):
                if len(draft.token_ids):
                    depth = max(depth, _add(steps[i], member, draft))
            if not is_new:
                latencies.append((member, self._clock() - began, len(selected), depth))
        self._steps.update((step.request.request_id, step) for step in steps)
        extended = [i for i, step in enumerate(steps) if step.member_drafts]
        began = self._clock()
        rescored = self._members[0].propose([replace(requests[i], proposals=_proposals_of(steps[i])) for i in extended])
        ended = self._clock()
        for member, seconds, num_rows, depth in latencies:
            member.record_latency(seconds + ended - began, num_rows, depth)
        self._num_idle = 0 if self._has_used_others else self._num_idle + 1
        if latencies or extended:
            self._step_rate.leave_out(ended - started)  # other drafters must beat a step without them
        for i, draft in zip(extended, rescored, strict=True):
            drafts[i] = draft
        return drafts

    @property
    def awaits_outcomes(self) -> bool:
        """Whether `observe` must be called with the outcome of every request, not only of requests that ended."""
        return bool(self._steps)

    def count_tokens(self, num_tokens: int) -> None:
        """Count output tokens of the current step whose outcomes are not passed to ``observe``."""
        self._step_rate.count(num_tokens)

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        """Report the outcome of a forward pass to each drafter: how many tokens of its own drafts were accepted."""
        outcomes_by_member: list[list[DraftOutcome]] = [[] for _ in self._members]
        for outcome in outcomes:
            self._step_rate.count(outcome.num_accepted + 1)
            step = self._steps.pop(outcome.request_id, None)
            if step is not None and step.member_drafts:
                self._observe_members(outcome, step, outcomes_by_member)
            elif step is not None:
                self._record_accepted(step, outcome.num_accepted)
            if outcome.has_ended or (step is not None and not self._members[0].learns_from_context):
                outcomes_by_member[0].append(outcome)
        for member, outcomes_of_member in zip(self._members, outcomes_by_member, strict=True):
            member.observe(outcomes_of_member, scored)

    def _observe_members(
        self, outcome: DraftOutcome, step: _RequestStep, outcomes_by_member: list[list[DraftOutcome]]
    ) -> None:
        """Learn from the outcome of a draft with tokens of secondary drafters.

        The outcome of each drafter's own draft is appended to its list in ``outcomes_by_member``.
        """
        draft, num_accepted = outcome.draft, outcome.num_accepted
        path = np.arange(num_accepted) if draft.path is None else draft.path[:num_accepted]
        output = draft.token_ids[path]
        reached = len(step.primary_draft.path_of(output))
        self._record_accepted(step, reached)
        for each in step.member_drafts if draft is not EMPTY_DRAFT else ():
            member = each.member
            member.marginal_gain.learn(each.expected_accepted, each.first_probability, max(0, num_accepted - reached))
            verified_part = each.draft.cut(num_shared_tokens(each.draft, draft))
            own_path = verified_part.path_of(output)
            if len(verified_part.token_ids):
                member.rates.record(outcome.request_id, len(verified_part.token_ids), len(own_path))
            if verified_part.parents is not None:
                verified_part = replace(verified_part, path=own_path)
            outcomes_by_member[self._members.index(member)].append(
                DraftOutcome(outcome.request_id, verified_part, len(own_path), has_ended=outcome.has_ended)
            )
            reached = max(reached, len(own_path))

    def _record_accepted(self, step: _RequestStep, reached: int) -> None:
        request_id = step.request.request_id
        recent = self._recent.get(request_id, step.expected_tokens)
        self._recent[request_id] = _FORGETTING * recent + (1 - _FORGETTING) * min(reached, _MAX_RECENT)

    def learn_scores(self, scored: ScoredPass) -> None:
        for member in self._members:
            member.learn_scores(scored)

    def finish(self, request_id: str) -> None:
        self._steps.pop(request_id, None)
        self._recent.pop(request_id, None)
        for member in self._members:
            member.finish(request_id)

    def warm_up(self) -> None:
        EMPTY_DRAFT.path_of(())  # compiles a kernel
        for member in self._members:
            getattr(member.drafter, "warm_up", lambda: None)()

    def publish(self) -> None:
        """Publish a copy of the acceptance model of every drafter that has one."""
        for member in self._members:
            getattr(member.drafter, "publish", lambda: None)()

    def _step(self, request: DraftRequest, draft: Draft) -> _RequestStep:
        expected_accepted, first_probability = _expectations(draft)
        recent = self._recent.get(request.request_id, expected_accepted)
        expected_tokens = _EXPECTATION_WEIGHT * expected_accepted + (1 - _EXPECTATION_WEIGHT) * recent
        return _RequestStep(request, draft, expected_accepted, first_probability, expected_tokens)

    def _select_requests(self, member: MemberDrafter, steps: Sequence[_RequestStep]) -> dict[int, DraftRequest]:
        """Return the requests for which a costly drafter should draft in this step, by their index in ``steps``.

        These are the requests for which the expected gain exceeds the drafter's cost. In the returned copies, the
        drafter's time per token is added to the token costs. If a trial of the drafter is due, only one request is
        selected.
        """
        able = [i for i, step in enumerate(steps) if step.request.limit > 0]
        gain_of = {
            i: member.marginal_gain.expected(steps[i].expected_accepted, steps[i].first_probability) for i in able
        }
        selected, costs, gains = able, dict[int, float](), dict[int, float]()
        for _ in range(2):  # twice, because fewer rows share the cost of a call
            each = {i: self._tokens_per_second(steps[i], len(selected), len(steps)) for i in selected}
            costs = {i: each[i] * member.seconds_per_token(len(selected)) for i in selected}
            spent = {
                i: member.depth * (costs[i] + cost_at(steps[i].token_costs, 0)) + each[i] * member.fixed_seconds
                for i in selected
            }
            gains = {i: gain_of[i] - spent[i] for i in selected}
            selected = [i for i in selected if gains[i] > 0.0]
        self._has_used_others = self._has_used_others or bool(selected)
        selected = [
            i
            for i in selected
            if member.should_start(steps[i].request, self._tokens_to_start(member, steps[i]), gains[i])
        ]
        for i in set(range(len(steps))).difference(selected):
            member.rates.fade(steps[i].request.request_id)

        def probe_costs() -> dict[int, float]:
            alone = member.depth * member.seconds_per_token(1) + member.fixed_seconds
            return {
                i: self._tokens_to_start(member, steps[i]) + self._tokens_per_second(steps[i], 1, len(steps)) * alone
                for i in able
            }

        probe = pick_probe(member, len(steps), len(selected), probe_costs)
        if probe is not None:
            self._has_used_others = True
            return {probe: steps[probe].request}
        return {i: replace(steps[i].request, token_costs=steps[i].token_costs + costs[i]) for i in selected}

    def _tokens_per_second(self, step: _RequestStep, num_used: int, num_rows: int) -> float:
        """Return the cost of one second of drafting, in output tokens per request that is drafted for (``num_used``).

        All ``num_rows`` rows wait while the drafter runs. Each is assumed to lose as many tokens per second as the
        request of ``step`` gets without the drafter.
        """
        step_s = self._step_rate.seconds_per_step
        if num_used == 0 or step_s == 0.0:
            return 0.0
        return (1.0 + step.expected_tokens) * num_rows / (num_used * step_s)

    def _tokens_to_start(self, member: MemberDrafter, step: _RequestStep) -> float:
        return self._step_rate.tokens_per_s * member.seconds_to_start(step.request)
