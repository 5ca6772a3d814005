"""The default drafter: own text, index and prediction together, each token with an estimated chance of acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Records, address
from ssd.compiled.machine_code import CHECKED, name_memory
from ssd.drafting.acceptance_model import AcceptanceModel, NamespaceModels
from ssd.drafting.ask import SOURCES, Ask, DraftRecord
from ssd.drafting.choices import NamespaceChoices
from ssd.drafting.choices import warm_up as warm_up_choices
from ssd.drafting.grow import MOST_CARRIED
from ssd.drafting.lookup import Evidence
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.propose import (
    Frame,
    RequestState,
    begin_request,
    end_request,
    keep_all_guesses,
    place,
    propose_suffix,
    propose_suffix_one,
)
from ssd.drafting.protocol import EMPTY_DRAFT, MAX_OFFERED, Draft, DraftRequest, Offers, ScoredPass, TokenIds
from ssd.drafting.successors import NamespaceSuccessors
from ssd.errors import ConfigError
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.lanes import MAX_MATCH_LENGTH, PATTERNS_BYTES, Lane, Walker, as_context
from ssd.retrieval.snapshot import Snapshot, make_snapshot, segment_table

_MAX_STATES: Final = 4096  # requests remembered; when there are more, all begin anew

_COOL: Final = 0.5
"""Temperature up to which the target mostly chooses what it holds most probable."""

_INT32: Final = np.dtype(np.int32)
NO_SNAPSHOT = make_snapshot(0, (), segment_table(()), np.zeros(1, np.int32), 0, 0)


class Workspace:
    """Rows, drafts and scratch memory of one drafter; grows, never shrinks. ``address`` : of its ``Frame``."""

    def __init__(self) -> None:
        self._memory = Records(Frame)
        self._frame, self.address = self._memory[0], self._memory.address
        self._patterns, self._evidences = np.zeros(PATTERNS_BYTES, np.uint8), Records(Evidence, 1 + MOST_CARRIED)
        self._frame.lookups.patterns = address(self._patterns)
        self._frame.evidences = self._evidences.address
        self._make_lanes(32)
        self._make_rows(16)
        self.states: Records[RequestState] = Records(RequestState, 0)
        self._state_of: dict[str, int] = {}
        self._free_states: list[int] = []
        self._make_states(32)

    def _make_lanes(self, count: int) -> None:
        self._lanes, self._walkers = Records(Lane, count), Records(Walker, 2 * count)
        lookups = self._frame.lookups
        lookups.num_lanes, lookups.lanes, lookups.walkers = count, self._lanes.address, self._walkers.address

    def _make_states(self, count: int) -> None:
        """Memory for so many states, the first those that there are."""
        grown, known = Records(RequestState, count), len(self.states)
        grown.array[:known] = self.states.array
        self.states = grown
        self._frame.num_states, self._frame.states = count, grown.address
        self._free_states += range(known, count)

    def _forget_all(self) -> None:
        """Nothing is kept of any request; all search again at their next step."""
        self._state_of.clear()
        self._free_states = list(range(len(self.states)))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        state = self._state_of.pop(request_id, None)
        if state is not None:
            self._free_states.append(state)

    def _make_rows(self, count: int) -> None:
        self._asks, self._drafts = Records(Ask, count), Records(DraftRecord, count)
        frame = self._frame
        frame.num_rows, frame.asks, frame.drafts = count, self._asks.address, self._drafts.address
        # Views of each row, made once: they are read at every step.
        self._tokens, self._parents, self._probabilities = (
            list(self._drafts.array[name]) for name in ("tokens", "parents", "probabilities")
        )

    def room_for(self, num_requests: int, snapshot: Snapshot) -> None:
        """Grow, if a call for so many requests of ``snapshot`` asks for it."""
        if num_requests > len(self._asks):
            self._make_rows(2 * num_requests)
        if len(snapshot.segments) > len(self._lanes):
            self._make_lanes(2 * len(snapshot.segments))
        if len(self._free_states) < num_requests:
            most = max(_MAX_STATES, num_requests)
            if len(self.states) < most:
                self._make_states(min(most, 2 * len(self.states) + num_requests))
            if len(self._free_states) < num_requests:
                self._forget_all()

    def state_of(self, request_id: str) -> tuple[int, bool]:
        """Where what is kept of a request lies, and whether nothing is yet."""
        state = self._state_of.get(request_id)
        if state is not None:
            return state, False
        state = self._state_of[request_id] = self._free_states.pop()
        return state, True

    def begun_state(self, request_id: str, prompt_length: int) -> int:
        """Where what is kept of a request lies; begun here when nothing is yet."""
        state, is_new = self.state_of(request_id)
        if is_new:
            begin_request(self.address, state, prompt_length)
        return state

    def known_state(self, request_id: str) -> int | None:
        """Where what is kept of a request lies; None when nothing is."""
        return self._state_of.get(request_id)

    def keep_guesses(self, scored: ScoredPass) -> None:
        """Keep of each request what the target chose behind wrong tokens. O(positions)."""
        states = [self._state_of.get(request_id, -1) for request_id in scored.request_ids]
        keep_all_guesses(
            self.address,
            np.array(states, np.int64),
            scored.ends,
            scored.fed,
            scored.counts,
            scored.fed if scored.parents is None else scored.parents,
            scored.parents is not None,
            scored.chosen,
        )

    def ask(
        self,
        row: int,
        request: DraftRequest,
        price: float,
        successors: int,
        looks_up: bool,
        choices: int,
    ) -> tuple[npt.NDArray[Any] | SequenceNoise, ...]:
        """Write what is asked for in a row, but for what ``place`` writes. ``price`` : where the request has none.

        ``successors`` : address of the target's own candidates, 0 for none. ``looks_up`` : in index, own text and
        prediction. ``choices`` : address of what the same noise chose before, 0 for none.

        The result keeps alive what was written: hold it until the kernel returns.
        """
        ask, prices, prediction = self._asks[row], request.prices, request.prediction
        ask.is_tree = request.tree
        ask.num_prices = ask.prediction_length = ask.num_offered = 0
        ask.warmth = 0 if request.sampling is None else _warmth(request.sampling.params.temperature)
        noise = _noise_of(request)
        ask.temperature, ask.noise, ask.choices, ask.may_teach = 0.0, 0, 0, request.may_teach
        ask.price = price if prices is None or not len(prices) else prices[0]
        held: tuple[npt.NDArray[Any] | SequenceNoise, ...] = ()
        if noise is not None and request.sampling is not None:
            ask.temperature, ask.noise, ask.choices = request.sampling.params.temperature, noise.address, choices
            held += (noise,)
        if prices is not None and len(prices) > 1:
            prices = np.ascontiguousarray(prices, np.float64)
            ask.prices, ask.num_prices = address(prices), len(prices)
            held += (prices,)
        ask.successors, ask.no_lookup = successors, not looks_up
        if prediction is not None and looks_up:
            prediction = contiguous(prediction)
            ask.prediction, ask.prediction_length = address(prediction), len(prediction)
            held += (prediction,)
        if request.offers is not None:
            held += self._offer(ask, request.offers)
        return held

    def _offer(self, ask: Ask, offers: Offers) -> tuple[npt.NDArray[Any], ...]:
        """Write what other sources propose; the result keeps it alive."""
        tokens, parents, kinds = (
            contiguous(each[:MAX_OFFERED]) for each in (offers.token_ids, offers.parents, offers.kinds)
        )
        chances = np.ascontiguousarray(offers.chances[:MAX_OFFERED], np.float64)
        assert len(tokens) == len(parents) == len(kinds) == len(chances)
        ask.num_offered = len(tokens)
        ask.offered_tokens, ask.offered_parents = address(tokens), address(parents)
        ask.offered_chances, ask.offered_kinds = address(chances), address(kinds)
        return tokens, parents, chances, kinds

    def fill(
        self,
        requests: Sequence[DraftRequest],
        price: float,
        successors: Sequence[int],
        looks_up: bool,
        choices: Sequence[int],
    ) -> list[tuple[npt.NDArray[Any] | SequenceNoise, ...]]:
        """Write a row for every request, see ``ask``.

        The result keeps what they bring alive: hold it until the kernel returns.
        """
        held = []
        for row, request in enumerate(requests):
            context, (state, is_new) = contiguous(request.context), self.state_of(request.request_id)
            held.append((context, *self.ask(row, request, price, successors[row], looks_up, choices[row])))
            place(self.address, row, context, request.limit, state, is_new, request.prompt_length)
        return held

    def draft(self, row: int) -> Draft:
        """The draft that a kernel wrote in ``row``."""
        written = self._drafts[row]
        size = written.size
        if size == 0:
            return EMPTY_DRAFT
        estimates = self._probabilities[row][:size].copy()
        parents = self._parents[row][:size].copy() if written.is_tree else None
        return Draft(self._tokens[row][:size].copy(), written.match_length, SOURCES[written.source], estimates, parents)

    def drafts(self, count: int) -> list[Draft]:
        """Those that a kernel wrote in the first ``count`` rows, copied once for all of them."""
        written = self._drafts.array[:count]
        sizes, lengths, sources, trees = (
            written[name].tolist() for name in ("size", "match_length", "source", "is_tree")
        )
        width = max(sizes, default=0)
        tokens, estimates, parents = (
            list(written[name][:, :width].copy()) for name in ("tokens", "probabilities", "parents")
        )
        return [
            Draft(
                tokens[row][:size],
                lengths[row],
                SOURCES[sources[row]],
                estimates[row][:size],
                parents[row][:size] if trees[row] else None,
            )
            if size
            else EMPTY_DRAFT
            for row, size in enumerate(sizes)
        ]


def _noise_of(request: DraftRequest) -> SequenceNoise | None:
    """What the target draws with after the context, None where that is not known."""
    sampling = request.sampling
    if sampling is None or sampling.params.greedy:
        return None
    noise = sampling.noise
    return noise if not noise.is_coupled or noise.num_counted == len(request.context) else None


def _warmth(temperature: float) -> int:
    """Of a request's sampling, see `Ask`."""
    return 0 if temperature <= 0.0 else (1 if temperature <= _COOL else 2)


def contiguous(context: TokenIds) -> TokenIds:
    """``context`` as the kernels take it: itself, or a copy. Ids that int32 cannot hold become -1, which is no token.

    A copy also of what is read-only: the kernels are compiled for one kind of array.
    """
    if context.dtype is not _INT32 or not context.flags.carray:
        context = as_context(context)
        context = context if context.flags.writeable else context.copy()
    if CHECKED:
        name_memory(context)
    return context


def checked_lengths(max_match_length: int, min_match_length: int) -> tuple[int, int]:
    """Lengths of matches that the kernels take; the second is at least 1.

    Raises ConfigError where they have no room for the first.
    """
    if not 1 <= max_match_length <= MAX_MATCH_LENGTH:
        raise ConfigError(f"max_match_length must be within 1..{MAX_MATCH_LENGTH}, got {max_match_length}")
    return max_match_length, max(1, min_match_length)


class SuffixDrafter:
    """Drafts what probably comes next, as far as it pays, from all that is known.

    The context's end is looked up in the request's own text, in the index's tail and its segments, at up to
    ``max_match_length`` tokens and at a few shorter lengths; a client's prediction is followed. All of them vote for
    the next token, an acceptance model says how probable each candidate is, and the draft takes the most probable and
    goes on with those who agree. It ends where the chance that all of it is accepted falls below the price of one more
    token: of all lengths the one with the greatest expected accepted tokens minus price. A tree is grown the same way,
    best first, from all candidates.

    What a request's ``offers`` say, what the target held likely when the same tokens came before and what it guessed in
    the last pass are candidates of the same chain or tree, and so is what the same noise chose before, where it is
    shared. What no place has said for a while is looked up again.

    The model is the namespace's and learns from every token that was tested, of drafts that were and were not made.
    Deterministic given its calls. Owned by one thread. Bounded work: at most 112 places are looked at per request, see
    `lookup.look_up`.
    """

    def __init__(
        self,
        *,
        max_match_length: int = 32,
        min_match_length: int = 1,
        price: float = 0.1,
        recycling: bool = True,
        retrieval: bool = True,
        keyed: bool = True,
    ) -> None:
        """``price`` : of a drafted token in expected accepted tokens, for requests that bring none.

        ``recycling`` : whether what the target held likely before is drafted. ``retrieval`` : whether index, own text
        and predictions are looked up; without, what other sources offer is judged all the same.
        ``keyed`` : whether it is kept what coupled noise chose.
        Raises ConfigError when ``max_match_length`` is not within 1..256.
        """
        self._longest, self._shortest = checked_lengths(max_match_length, min_match_length)
        self._price = price
        self._workspace = Workspace()
        self._models = NamespaceModels()
        self._looks_up = retrieval
        self._successors = NamespaceSuccessors() if recycling else None
        self._choices = NamespaceChoices() if keyed else None
        self._verified: dict[str, tuple[int, int | TokenIds]] = {}  # tokens, and which were right: so many or these
        self._learned: dict[str, LearnedState | None] = {}

    def model_of(self, learned: LearnedState | None) -> AcceptanceModel:
        """What was learned about acceptance in a namespace; with None, of all requests that have none."""
        return self._models.of(learned)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order; one kernel call for all with the same snapshot and ``learned``."""
        if self._choices is not None:
            self._choices.begin_pass()
        if len(requests) == 1:
            return [self._propose_one(requests[0])]
        members: dict[tuple[int, int], list[int]] = {}
        for i, request in enumerate(requests):  # what is learned is a namespace's own also where there is no snapshot
            members.setdefault((id(request.snapshot), id(request.learned)), []).append(i)
        drafts = [EMPTY_DRAFT] * len(requests)
        for indices in members.values():
            for i, draft in zip(indices, self._propose([requests[i] for i in indices]), strict=True):
                drafts[i] = draft
        return drafts

    def _propose_one(self, request: DraftRequest) -> Draft:
        workspace, snapshot = self._workspace, request.snapshot or NO_SNAPSHOT
        workspace.room_for(1, snapshot)
        model, context = self._models.of(request.learned), contiguous(request.context)
        successors, choices = self._successors_of(request), self._choices_of(request)
        held = workspace.ask(0, request, self._price, successors, self._looks_up, choices)
        state, is_new = workspace.state_of(request.request_id)
        if is_new:
            self._learned[request.request_id] = request.learned
        propose_suffix_one(
            workspace.address,
            snapshot.address,
            model.address,
            context,
            request.limit,
            state,
            is_new,
            request.prompt_length,
            self._longest,
            self._shortest,
        )
        del held
        return workspace.draft(0)

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        workspace, count, snapshot = self._workspace, len(requests), requests[0].snapshot or NO_SNAPSHOT
        workspace.room_for(count, snapshot)
        learned = requests[0].learned
        if learned is None:  # each from what it said itself
            successors = [self._successors_of(request) for request in requests]
        else:
            successors = [self._successors_of(requests[0])] * count
        choices = [self._choices_of(request) for request in requests]
        held = workspace.fill(requests, self._price, successors, self._looks_up, choices)
        model = self._models.of(learned)
        self._learned.update((request.request_id, learned) for request in requests)
        longest, shortest = self._longest, self._shortest
        propose_suffix(workspace.address, snapshot.address, model.address, count, longest, shortest)
        del held
        return workspace.drafts(count)

    def _successors_of(self, request: DraftRequest) -> int:
        """Address of the target's own candidates for a request, 0 for none."""
        return 0 if self._successors is None else self._successors.of(request.learned, request.request_id)

    def _choices_of(self, request: DraftRequest) -> int:
        """Address of what the same noise chose before, 0 for none."""
        return 0 if self._choices is None else self._choices.of(request)

    def observe_scores(self, scored: ScoredPass) -> None:
        """Keep what the target chose behind wrong tokens: the next draft may go on there."""
        if self._successors is not None:
            self._workspace.keep_guesses(scored)

    def learn_scores(self, scored: ScoredPass) -> None:
        """Learn what the target held likely at every position of a pass."""
        if self._successors is not None:
            self._successors.learn(scored)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Keep how much was accepted: it is learned from when the request ends, and before that from its context."""
        if draft is EMPTY_DRAFT:  # nothing was asked at this step: the last draft is still the one before
            return
        if draft.parents is None or num_accepted == 0:
            self._verified[request_id] = len(draft.token_ids), num_accepted
        elif draft.path is None:  # of a tree, and nobody says which tokens of it
            self._verified.pop(request_id, None)
        else:
            self._verified[request_id] = len(draft.token_ids), contiguous(draft.path)

    def finish(self, request_id: str) -> None:
        """Learn from the last step and forget the request: it has ended."""
        state, verified = self._workspace.known_state(request_id), self._verified.pop(request_id, None)
        learned = self._learned.pop(request_id, None)
        if state is not None and verified is not None:
            size, right = verified
            path = np.arange(right, dtype=np.int32) if isinstance(right, int) else right
            end_request(self._workspace.address, state, size, path, self._models.of(learned).address)
        self._workspace.forget(request_id)
        self._models.ended(learned)
        if self._successors is not None:
            self._successors.ended(request_id)
        if self._choices is not None:
            self._choices.ended(request_id)

    def publish(self) -> None:
        """Leave what was learned for other threads and the next process, in every request's ``learned``."""
        self._models.publish()

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        request = DraftRequest("", np.zeros(2, np.int32), 2, None, 1)
        draft = self.propose([request])[0]
        self.propose([request, request])
        if self._choices is not None:
            warm_up_choices()
        self.observe("", draft, 0)
        self.finish("")
