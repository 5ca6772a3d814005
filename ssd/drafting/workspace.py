"""Memory of the drafting kernels: made once, found by address, so that a call passes a handful of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.drafting.cursor import NO_TABLE, STATE_INT64S
from ssd.drafting.evidence import (
    HITS_INT64S,
    LEVELS_INT64S,
    POOL_INT64S,
    Hits,
    Levels,
    Pool,
    hits_at,
    levels_at,
    pool_at,
)
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.retrieval.memory import Int64s, TokenIds, float64_array, inlined, int32_array, int64_array, kernel
from ssd.retrieval.search import LANE_COLUMNS, PATTERNS_BYTES, WALKER_COLUMNS
from ssd.retrieval.snapshot import TABLE_COLUMNS, Snapshot, address, make_snapshot

MAX_DRAFT: Final = 128
"""Longest draft; a greater limit is cut to it."""

ROW_COLUMNS: Final = 4
"""Of a row: address of the context, its length, the draft's limit, the request's state."""

RESULT_COLUMNS: Final = 3
"""Of a result: length of the draft, of the match, 1 when most of the first token's evidence is own text."""

_MAX_STATES: Final = 4096  # requests remembered; when there are more, all begin anew

# Words of a frame.
_LANES: Final = 0
_NUM_LANES: Final = 1
_WALKERS: Final = 2
_PATTERNS: Final = 3
_OWN: Final = 4
_TAIL: Final = 5
_POOL: Final = 6
_LEVELS: Final = 7
_VOTES: Final = 8
_ROWS: Final = 9
_NUM_ROWS: Final = 10
_BIASES: Final = 11
_TOKENS: Final = 12
_PROBABILITIES: Final = 13
_RESULTS: Final = 14
_STATES: Final = 15
_NUM_STATES: Final = 16
_FRAME_WORDS: Final = 17

VOTES_INT64S: Final = 8 * 512

_INT32 = np.dtype(np.int32)
_NO_BIASES: Mapping[str, float] = {}
NO_SNAPSHOT = make_snapshot(0, (), np.zeros((0, TABLE_COLUMNS), np.int64), np.zeros(1, np.int32), 0, 0)


class Frame(NamedTuple):
    """What the kernels find in a workspace."""

    lanes: Int64s
    walkers: Int64s
    patterns: int
    own: Hits
    tail: Hits
    pool: Pool
    levels: Levels
    votes: int
    rows: Int64s
    biases: npt.NDArray[np.float64]
    tokens: TokenIds
    probabilities: npt.NDArray[np.float64]
    results: Int64s
    states: Int64s


@inlined
def frame_at(address: int) -> Frame:
    """The frame whose words lie at an address."""
    words = int64_array(address, _FRAME_WORDS)
    lanes, rows = words[_NUM_LANES], words[_NUM_ROWS]
    return Frame(
        int64_array(words[_LANES], lanes * LANE_COLUMNS).reshape((lanes, LANE_COLUMNS)),
        int64_array(words[_WALKERS], 2 * lanes * WALKER_COLUMNS).reshape((2 * lanes, WALKER_COLUMNS)),
        words[_PATTERNS],
        hits_at(words[_OWN]),
        hits_at(words[_TAIL]),
        pool_at(words[_POOL]),
        levels_at(words[_LEVELS]),
        words[_VOTES],
        int64_array(words[_ROWS], rows * ROW_COLUMNS).reshape((rows, ROW_COLUMNS)),
        float64_array(words[_BIASES], rows),
        int32_array(words[_TOKENS], rows * MAX_DRAFT).reshape((rows, MAX_DRAFT)),
        float64_array(words[_PROBABILITIES], rows * MAX_DRAFT).reshape((rows, MAX_DRAFT)),
        int64_array(words[_RESULTS], rows * RESULT_COLUMNS).reshape((rows, RESULT_COLUMNS)),
        int64_array(words[_STATES], words[_NUM_STATES] * STATE_INT64S).reshape((words[_NUM_STATES], STATE_INT64S)),
    )


@kernel
def place(address: int, row: int, context: TokenIds, limit: int, bias: float, state: int, is_new: bool) -> None:
    """Write row ``row`` of the workspace at an address; ``is_new`` : nothing is kept of the request yet."""
    words = int64_array(address, _FRAME_WORDS)
    at = int64_array(words[_ROWS] + 8 * ROW_COLUMNS * row, ROW_COLUMNS)
    at[0] = context.ctypes.data
    at[1] = len(context)
    at[2] = max(0, min(limit, MAX_DRAFT))
    at[3] = state
    if is_new:
        int64_array(words[_STATES] + 8 * STATE_INT64S * state, 1)[0] = NO_TABLE
    float64_array(words[_BIASES], row + 1)[row] = bias


class Workspace:
    """Rows, results and scratch memory of one drafter; grows, never shrinks. ``address`` : of the frame's words."""

    def __init__(self) -> None:
        self._words: Int64s = np.zeros(_FRAME_WORDS, np.int64)
        self.address = address(self._words)
        self._scratch: dict[int, npt.NDArray[Any]] = {}
        self._put(_OWN, np.empty(HITS_INT64S, np.int64))
        self._put(_TAIL, np.empty(HITS_INT64S, np.int64))
        self._put(_POOL, np.empty(POOL_INT64S, np.int64))
        self._put(_LEVELS, np.empty(LEVELS_INT64S, np.int64))
        self._put(_VOTES, np.zeros(VOTES_INT64S, np.int64))
        self._make_lanes(32)
        self._make_rows(16)
        self._make_states(32)

    def _put(self, word: int, array: npt.NDArray[Any]) -> None:
        self._scratch[word] = array
        self._words[word] = address(array)

    def _make_lanes(self, count: int) -> None:
        self._num_lanes = self._words[_NUM_LANES] = count
        self._put(_LANES, np.empty((count, LANE_COLUMNS), np.int64))
        self._put(_WALKERS, np.empty((2 * count, WALKER_COLUMNS), np.int64))
        self._put(_PATTERNS, np.zeros(PATTERNS_BYTES, np.uint8))

    def _make_states(self, count: int) -> None:
        """Forgets what is kept of all requests; they search again at their next step."""
        self._num_states = self._words[_NUM_STATES] = count
        self._put(_STATES, np.full((count, STATE_INT64S), NO_TABLE, np.int64))
        self._state_of: dict[str, int] = {}
        self._free_states = list(range(count))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        state = self._state_of.pop(request_id, None)
        if state is not None:
            self._free_states.append(state)

    def _make_rows(self, count: int) -> None:
        self._num_rows = self._words[_NUM_ROWS] = count
        self._tokens = np.empty((count, MAX_DRAFT), np.int32)
        self._probabilities = np.empty((count, MAX_DRAFT), np.float64)
        self._results = np.zeros((count, RESULT_COLUMNS), np.int64)
        self._put(_ROWS, np.zeros((count, ROW_COLUMNS), np.int64))
        self._put(_BIASES, np.zeros(count, np.float64))
        self._put(_TOKENS, self._tokens)
        self._put(_PROBABILITIES, self._probabilities)
        self._put(_RESULTS, self._results)

    def room_for(self, num_requests: int, snapshot: Snapshot) -> None:
        """Grow, if a call for so many requests of ``snapshot`` asks for it."""
        if num_requests > self._num_rows:
            self._make_rows(2 * num_requests)
        if len(snapshot.segments) > self._num_lanes:
            self._make_lanes(2 * len(snapshot.segments))
        if len(self._free_states) < num_requests:
            self._make_states(min(max(_MAX_STATES, num_requests), 2 * self._num_states + num_requests))

    def state_of(self, request_id: str) -> tuple[int, bool]:
        """Where what is kept of a request lies, and whether nothing is yet."""
        state = self._state_of.get(request_id)
        if state is not None:
            return state, False
        state = self._state_of[request_id] = self._free_states.pop()
        return state, True

    def fill(self, requests: Sequence[DraftRequest], biases: Mapping[str, float] = _NO_BIASES) -> list[TokenIds]:
        """Write a row for every request. The result keeps the contexts alive: hold it until the kernel returns."""
        contexts = []
        for row, request in enumerate(requests):
            context, (state, is_new) = contiguous(request.context), self.state_of(request.request_id)
            contexts.append(context)
            place(self.address, row, context, request.limit, biases.get(request.request_id, 0.0), state, is_new)
        return contexts

    def draft(self, row: int, *, with_probabilities: bool = False) -> Draft:
        """The draft that a kernel wrote in ``row``."""
        size, match_length, own = self._results[row].tolist()
        if size == 0:
            return EMPTY_DRAFT
        estimates = self._probabilities[row, :size].copy() if with_probabilities else None
        return Draft(self._tokens[row, :size].copy(), match_length, "own" if own else "index", estimates)


def contiguous(context: TokenIds) -> TokenIds:
    """``context`` as the kernels take it."""
    if context.dtype is _INT32 and context.flags.c_contiguous:
        return context
    return np.ascontiguousarray(context, np.int32)


def propose_by_snapshot(
    requests: Sequence[DraftRequest], propose: Callable[[Snapshot, Sequence[DraftRequest]], list[Draft]]
) -> list[Draft]:
    """Call ``propose`` once for the requests of each snapshot; no snapshot is an empty one. Drafts in order."""
    if not requests:
        return []
    snapshot = requests[0].snapshot
    if all(request.snapshot is snapshot for request in requests):
        return propose(snapshot or NO_SNAPSHOT, requests)
    members: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        members.setdefault(id(request.snapshot), []).append(i)
    drafts = [EMPTY_DRAFT] * len(requests)
    for indices in members.values():
        same = [requests[i] for i in indices]
        for i, draft in zip(indices, propose(same[0].snapshot or NO_SNAPSHOT, same), strict=True):
            drafts[i] = draft
    return drafts
