"""Memory of the drafting kernels: made once, found by address, so that a call passes a handful of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import TokenIds, address, data_of, inlined, kernel
from ssd.compiled.records import Address, Int64, Record, Records, view_of, views_of
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.drafting.suffix.ask import MAX_DRAFT, SOURCES, Ask, DraftRecord, asks_at
from ssd.drafting.suffix.chain import ChainScratch
from ssd.drafting.suffix.follow import NO_TABLE, Followed
from ssd.drafting.suffix.gather import Evidence, Hits
from ssd.drafting.suffix.judge import Candidates
from ssd.drafting.suffix.learn import JudgedDraft, forget_draft
from ssd.drafting.suffix.prediction import PredictionPlace, begin_prediction
from ssd.drafting.suffix.tree import TreeScratch
from ssd.errors import ConfigError
from ssd.retrieval.lanes import Lane, Walker
from ssd.retrieval.pattern import MAX_MATCH_LENGTH, PATTERNS_BYTES, as_context
from ssd.retrieval.snapshot import Snapshot, make_snapshot, segment_table

CONTINUED_CONTEXT: Final = 4096
"""Tokens of a context that are looked at where a draft is carried on past the end of its sources."""

_MAX_STATES: Final = 4096  # requests remembered; when there are more, all begin anew

_INT32: Final = np.dtype(np.int32)

NO_SNAPSHOT = make_snapshot(0, (), segment_table(()), np.zeros(1, np.int32), 0, 0)


class RequestState(Record):
    """What is kept of a request from one step to the next."""

    followed: Followed
    judged: JudgedDraft
    prediction: PredictionPlace


class Frame(Record):
    """What kernels find in a workspace.

    ``lanes`` : Lane[num_lanes]; ``walkers`` : Walker[2 * num_lanes]; ``patterns`` : uint8[PATTERNS_BYTES]. ``asks`` :
    Ask[num_rows]; ``drafts`` : DraftRecord[num_rows]. ``states`` : RequestState[num_states]. All else is scratch.
    """

    num_lanes: Int64
    lanes: Address
    walkers: Address
    patterns: Address
    num_rows: Int64
    asks: Address
    drafts: Address
    num_states: Int64
    states: Address
    own: Hits
    tail: Hits
    evidence: Evidence
    candidates: Candidates
    chain: ChainScratch
    tree: TreeScratch
    continued: Annotated[TokenIds, np.int32, CONTINUED_CONTEXT + MAX_DRAFT]


frame_at = view_of(Frame)
states_at = views_of(RequestState)


@inlined
def begin_state(state: RequestState, prompt_length: int) -> None:
    """Nothing is kept of a request yet."""
    state.followed.table = NO_TABLE
    forget_draft(state.judged)
    begin_prediction(state.prediction, prompt_length)


@kernel
def begin_request(workspace: int, state: int, prompt_length: int) -> None:
    """Keep nothing of a request yet, in a state of the workspace at an address."""
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


class Workspace:
    """Rows, drafts and scratch memory of one drafter; grows, never shrinks. ``address`` : of its ``Frame``."""

    def __init__(self) -> None:
        self._memory = Records(Frame)
        self._frame, self.address = self._memory[0], self._memory.address
        self._patterns = np.zeros(PATTERNS_BYTES, np.uint8)
        self._frame.patterns = address(self._patterns)
        self._make_lanes(32)
        self._make_rows(16)
        self._make_states(32)

    def _make_lanes(self, count: int) -> None:
        self._lanes, self._walkers = Records(Lane, count), Records(Walker, 2 * count)
        frame, self._num_lanes = self._frame, count
        frame.num_lanes, frame.lanes, frame.walkers = count, self._lanes.address, self._walkers.address

    def _make_states(self, count: int) -> None:
        """Forgets what is kept of all requests; they search again at their next step."""
        self.states = Records(RequestState, count)
        self._frame.num_states, self._frame.states = count, self.states.address
        self._state_of: dict[str, int] = {}
        self._free_states = list(range(count))

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
        if len(snapshot.segments) > self._num_lanes:
            self._make_lanes(2 * len(snapshot.segments))
        if len(self._free_states) < num_requests:
            self._make_states(min(max(_MAX_STATES, num_requests), 2 * len(self.states) + num_requests))

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

    def ask(self, row: int, request: DraftRequest, price: float) -> tuple[npt.NDArray[Any], ...]:
        """Write what is asked for in a row, but for what ``place`` writes. ``price`` : where the request has none.

        The result keeps alive what was written: hold it until the kernel returns.
        """
        ask, prices, prediction = self._asks[row], request.prices, request.prediction
        ask.is_tree = request.tree
        ask.num_prices = ask.prediction_length = 0
        ask.price = price if prices is None or not len(prices) else prices[0]
        held: tuple[npt.NDArray[Any], ...] = ()
        if prices is not None and len(prices) > 1:
            prices = np.ascontiguousarray(prices, np.float64)
            ask.prices, ask.num_prices = address(prices), len(prices)
            held += (prices,)
        if prediction is not None:
            prediction = contiguous(prediction)
            ask.prediction, ask.prediction_length = address(prediction), len(prediction)
            held += (prediction,)
        return held

    def fill(self, requests: Sequence[DraftRequest], price: float) -> list[tuple[npt.NDArray[Any], ...]]:
        """Write a row for every request. The result keeps what they bring alive: hold it until the kernel returns."""
        held = []
        for row, request in enumerate(requests):
            context, (state, is_new) = contiguous(request.context), self.state_of(request.request_id)
            held.append((context, *self.ask(row, request, price)))
            place(self.address, row, context, request.limit, state, is_new, request.prompt_length)
        return held

    def draft(self, row: int, *, with_probabilities: bool = False) -> Draft:
        """The draft that a kernel wrote in ``row``."""
        written = self._drafts[row]
        size = written.size
        if size == 0:
            return EMPTY_DRAFT
        estimates = self._probabilities[row][:size].copy() if with_probabilities else None
        parents = self._parents[row][:size].copy() if written.is_tree else None
        return Draft(self._tokens[row][:size].copy(), written.match_length, SOURCES[written.source], estimates, parents)


def contiguous(context: TokenIds) -> TokenIds:
    """``context`` as the kernels take it: itself, or a copy. Ids that int32 cannot hold become -1, which is no token.

    A copy also of what is read-only: the kernels are compiled for one kind of array.
    """
    if context.dtype is _INT32 and context.flags.carray:
        return context
    context = as_context(context)
    return context if context.flags.writeable else context.copy()


def checked_lengths(max_match_length: int, min_match_length: int) -> tuple[int, int]:
    """These, the second at least 1. Raises ConfigError where the kernels have no room for the first."""
    if not 1 <= max_match_length <= MAX_MATCH_LENGTH:
        raise ConfigError(f"max_match_length must be within 1..{MAX_MATCH_LENGTH}, got {max_match_length}")
    return max_match_length, max(1, min_match_length)
