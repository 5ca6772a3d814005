"""Memory of the drafting kernels: made once, found by address, so that a call passes a handful of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, address, data_of, inlined, kernel
from ssd.compiled.records import Address, Int64, Record, Records, view_of, views_of
from ssd.compiled.registry import CHECKED, name_memory
from ssd.drafting.offers import MAX_OFFERED, Offers
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest, ScoredPass
from ssd.drafting.sequence_noise import SequenceNoise
from ssd.drafting.suffix.ask import SOURCES, Ask, asks_at
from ssd.drafting.suffix.carry_on import CONTINUED_CONTEXT
from ssd.drafting.suffix.chain import ChainScratch
from ssd.drafting.suffix.draft_record import MAX_DRAFT, DraftRecord
from ssd.drafting.suffix.follow import NO_TABLE, Followed
from ssd.drafting.suffix.gather import Evidence, Hits, LookupScratch
from ssd.drafting.suffix.guesses import Guesses, keep_guesses
from ssd.drafting.suffix.judge import Candidates
from ssd.drafting.suffix.learn import JudgedDraft, forget_draft
from ssd.drafting.suffix.prediction import PredictionPlace, begin_prediction
from ssd.drafting.suffix.tree import MOST_CARRIED, TreeScratch
from ssd.errors import ConfigError
from ssd.retrieval.lanes import MAX_MATCH_LENGTH, PATTERNS_BYTES, Lane, Walker, as_context
from ssd.retrieval.snapshot import Snapshot, make_snapshot, segment_table

_MAX_STATES: Final = 4096  # requests remembered; when there are more, all begin anew

_COOL: Final = 0.5
"""Temperature up to which the target mostly chooses what it holds most probable."""

_INT32: Final = np.dtype(np.int32)

NO_SNAPSHOT = make_snapshot(0, (), segment_table(()), np.zeros(1, np.int32), 0, 0)


class RequestState(Record):
    """What is kept of a request from one step to the next."""

    followed: Followed
    judged: JudgedDraft
    prediction: PredictionPlace
    guesses: Guesses


class Frame(Record):
    """What kernels find in a workspace.

    ``asks`` : Ask[num_rows]; ``drafts`` : DraftRecord[num_rows]. ``states`` : RequestState[num_states].
    ``evidences`` : Evidence[1 + MOST_CARRIED], of the row that is drafted for, and of a tree's further lookups. All
    else is scratch.
    """

    num_rows: Int64
    asks: Address
    drafts: Address
    num_states: Int64
    states: Address
    evidences: Address
    lookups: LookupScratch
    prediction_hits: Hits
    candidates: Candidates
    chain: ChainScratch
    tree: TreeScratch
    continued: Annotated[TokenIds, np.int32, CONTINUED_CONTEXT + MAX_DRAFT]


frame_at = view_of(Frame)


states_at = views_of(RequestState)


@inlined
def begin_state(state: RequestState, prompt_length: int) -> None:
    """Forget what was kept of another request."""
    state.followed.table = NO_TABLE
    forget_draft(state.judged)
    begin_prediction(state.prediction, prompt_length)
    state.guesses.count = 0


@kernel
def begin_request(workspace: int, state: int, prompt_length: int) -> None:
    """Begin a state of the workspace at an address, for a request of which nothing is kept yet."""
    frame = frame_at(workspace)
    begin_state(states_at(frame.states, frame.num_states)[state], prompt_length)


@kernel
def place(
    workspace: int, row: int, context: TokenIds, limit: int, state: int, is_new: bool, prompt_length: int
) -> None:
    """Write the context and numbers of what is asked for in row ``row`` of the workspace at an address.

    ``is_new`` : nothing is kept of the request yet.
    """
    frame = frame_at(workspace)
    ask = asks_at(frame.asks, frame.num_rows)[row]
    ask.context, ask.context_length, ask.prompt_length = data_of(context), len(context), prompt_length
    ask.limit, ask.state = max(0, min(limit, MAX_DRAFT)), state
    if is_new:
        begin_state(states_at(frame.states, frame.num_states)[state], prompt_length)


@kernel
def keep_all_guesses(
    workspace: int,
    states: Int64s,
    ends: Int64s,
    fed: Int64s,
    counts: Int64s,
    parents: Int64s,
    is_tree: bool,
    chosen: Int64s,
) -> None:
    """Keep what the target chose behind wrong tokens, of every row of a `ScoredPass`.

    ``states`` : int64[B], of each row's request in the workspace at an address, less than 0 for none. ``ends`` :
    int64[B], the last of the positions that were right, less than 0 for none. ``parents`` : looked at where
    ``is_tree``.
    """
    frame = frame_at(workspace)
    kept = states_at(frame.states, frame.num_states)
    for b in range(len(states)):
        if states[b] >= 0:
            keep_guesses(kept[states[b]].guesses, fed[b], parents[b], is_tree, counts[b], chosen[b], ends[b])


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
        ends = [path[-1] if len(path) else -1 for path in scored.paths]
        keep_all_guesses(
            self.address,
            np.array(states, np.int64),
            np.array(ends, np.int64),
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
