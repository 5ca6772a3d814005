"""Memory of the drafting kernels: made once, found by address, so that a call passes a handful of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, address, float64_array, inlined, int32_array, int64_array, kernel
from ssd.compiled.records import dtype_of
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.drafting.suffix.extend import EXPANSION_WORDS, MAX_DRAFT, SOURCES
from ssd.drafting.suffix.follow import NO_TABLE, STATE_INT64S
from ssd.drafting.suffix.gather import (
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
from ssd.drafting.suffix.judge import CANDIDATES_WORDS
from ssd.drafting.suffix.learn import LESSONS_INT64S, forget_lessons
from ssd.drafting.suffix.prediction import PREDICTION_INT64S, begin_prediction
from ssd.drafting.suffix.wishes import Wishes, contiguous
from ssd.errors import ConfigError
from ssd.retrieval.lanes import Lane, Lanes, Walker, Walkers, lanes_at, walkers_at
from ssd.retrieval.pattern import MAX_MATCH_LENGTH, PATTERNS_BYTES
from ssd.retrieval.snapshot import Snapshot, make_snapshot, segment_table

ROW_COLUMNS: Final = 10
"""Of a row: address of the context, its length, the draft's limit, the request's state, the prompt's length; address
and length of the prediction, address and number of the prices, 1 for a tree."""

RESULT_COLUMNS: Final = 4
"""Of a result: length of the draft, of the match, what most of the first token's evidence is, 1 for a tree."""

CONTINUED_CONTEXT: Final = 4096
"""Tokens of a context that are looked at where a draft is carried on past the end of its sources."""

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
_CANDIDATES: Final = 8
_EXPANSION: Final = 9
_CONTINUED: Final = 10
_ROWS: Final = 11
_NUM_ROWS: Final = 12
_TOKENS: Final = 13
_PROBABILITIES: Final = 14
_PARENTS: Final = 15
_RESULTS: Final = 16
_STATES: Final = 17
_NUM_STATES: Final = 18
_LESSONS: Final = 19
_PREDICTING: Final = 20
_FRAME_WORDS: Final = 21

NO_SNAPSHOT = make_snapshot(0, (), segment_table(()), np.zeros(1, np.int32), 0, 0)


class Frame(NamedTuple):
    """What the kernels find in a workspace."""

    lanes: Lanes
    walkers: Walkers
    patterns: int
    own: Hits
    tail: Hits
    pool: Pool
    levels: Levels
    candidates: int
    expansion: int
    continued: TokenIds
    rows: Int64s
    tokens: TokenIds
    probabilities: npt.NDArray[np.float64]
    parents: TokenIds
    results: Int64s
    states: Int64s
    lessons: Int64s
    predicting: Int64s


@inlined
def frame_at(address: int) -> Frame:
    """The frame whose words lie at an address."""
    words = int64_array(address, _FRAME_WORDS)
    lanes, rows, states = words[_NUM_LANES], words[_NUM_ROWS], words[_NUM_STATES]
    return Frame(
        lanes_at(words[_LANES], lanes),
        walkers_at(words[_WALKERS], 2 * lanes),
        words[_PATTERNS],
        hits_at(words[_OWN]),
        hits_at(words[_TAIL]),
        pool_at(words[_POOL]),
        levels_at(words[_LEVELS]),
        words[_CANDIDATES],
        words[_EXPANSION],
        int32_array(words[_CONTINUED], CONTINUED_CONTEXT + MAX_DRAFT),
        int64_array(words[_ROWS], rows * ROW_COLUMNS).reshape((rows, ROW_COLUMNS)),
        int32_array(words[_TOKENS], rows * MAX_DRAFT).reshape((rows, MAX_DRAFT)),
        float64_array(words[_PROBABILITIES], rows * MAX_DRAFT).reshape((rows, MAX_DRAFT)),
        int32_array(words[_PARENTS], rows * MAX_DRAFT).reshape((rows, MAX_DRAFT)),
        int64_array(words[_RESULTS], rows * RESULT_COLUMNS).reshape((rows, RESULT_COLUMNS)),
        int64_array(words[_STATES], states * STATE_INT64S).reshape((states, STATE_INT64S)),
        int64_array(words[_LESSONS], states * LESSONS_INT64S).reshape((states, LESSONS_INT64S)),
        int64_array(words[_PREDICTING], states * PREDICTION_INT64S).reshape((states, PREDICTION_INT64S)),
    )


@kernel
def begin_state(address: int, state: int, prompt_length: int) -> None:
    """What is kept of a request in the workspace at an address: nothing yet."""
    words = int64_array(address, _FRAME_WORDS)
    int64_array(words[_STATES] + 8 * STATE_INT64S * state, 1)[0] = NO_TABLE
    forget_lessons(int64_array(words[_LESSONS] + 8 * LESSONS_INT64S * state, LESSONS_INT64S))
    begin_prediction(int64_array(words[_PREDICTING] + 8 * PREDICTION_INT64S * state, PREDICTION_INT64S), prompt_length)


@kernel
def place(
    address: int, row: int, context: TokenIds, limit: int, state: int, is_new: bool, prompt_length: int, wish: int
) -> None:
    """Write row ``row`` of the workspace at an address.

    ``is_new`` : nothing is kept of the request yet. ``wish`` : address of the last five columns, see ROW_COLUMNS.
    """
    words = int64_array(address, _FRAME_WORDS)
    at = int64_array(words[_ROWS] + 8 * ROW_COLUMNS * row, ROW_COLUMNS)
    at[0], at[1], at[2], at[3] = context.ctypes.data, len(context), max(0, min(limit, MAX_DRAFT)), state
    at[4] = prompt_length
    at[5:] = int64_array(wish, ROW_COLUMNS - 5)
    if is_new:
        begin_state(address, state, prompt_length)


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
        self._put(_CANDIDATES, np.zeros(CANDIDATES_WORDS, np.int64))
        self._put(_EXPANSION, np.zeros(EXPANSION_WORDS, np.int64))
        self._put(_CONTINUED, np.zeros(CONTINUED_CONTEXT + MAX_DRAFT, np.int32))
        self._make_lanes(32)
        self._make_rows(16)
        self._make_states(32)

    def _put(self, word: int, array: npt.NDArray[Any]) -> None:
        self._scratch[word] = array
        self._words[word] = address(array)

    def _make_lanes(self, count: int) -> None:
        self._num_lanes = self._words[_NUM_LANES] = count
        self._put(_LANES, np.empty(count, dtype_of(Lane)))
        self._put(_WALKERS, np.empty(2 * count, dtype_of(Walker)))
        self._put(_PATTERNS, np.zeros(PATTERNS_BYTES, np.uint8))

    def _make_states(self, count: int) -> None:
        """Forgets what is kept of all requests; they search again at their next step."""
        self._num_states = self._words[_NUM_STATES] = count
        self._put(_STATES, np.full((count, STATE_INT64S), NO_TABLE, np.int64))
        self._put(_LESSONS, np.zeros((count, LESSONS_INT64S), np.int64))
        self._put(_PREDICTING, np.zeros((count, PREDICTION_INT64S), np.int64))
        self._state_of: dict[str, int] = {}
        self._free_states = list(range(count))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        state = self._state_of.pop(request_id, None)
        if state is not None:
            self._free_states.append(state)

    def _make_rows(self, count: int) -> None:
        self._num_rows = self._words[_NUM_ROWS] = count
        tokens, parents = np.empty((count, MAX_DRAFT), np.int32), np.empty((count, MAX_DRAFT), np.int32)
        probabilities, results = np.empty((count, MAX_DRAFT), np.float64), np.zeros((count, RESULT_COLUMNS), np.int64)
        # Views of each row, made once: they are read at every step.
        self._tokens, self._parents, self._probabilities = list(tokens), list(parents), list(probabilities)
        self._results = memoryview(results.reshape(-1))  # type: ignore[arg-type]
        self.spare = [Wishes(np.zeros(1)) for _ in range(count)]
        """Of each row, wishes that are written anew at every call."""
        self._put(_ROWS, np.zeros((count, ROW_COLUMNS), np.int64))
        self._put(_TOKENS, tokens)
        self._put(_PROBABILITIES, probabilities)
        self._put(_PARENTS, parents)
        self._put(_RESULTS, results)

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

    def begun_state(self, request_id: str, prompt_length: int) -> int:
        """Where what is kept of a request lies; begun here when nothing is yet."""
        state, is_new = self.state_of(request_id)
        if is_new:
            begin_state(self.address, state, prompt_length)
        return state

    def known_state(self, request_id: str) -> int | None:
        """Where what is kept of a request lies; None when nothing is."""
        return self._state_of.get(request_id)

    def fill(self, requests: Sequence[DraftRequest], usual: Wishes) -> list[tuple[TokenIds, Wishes]]:
        """Write a row for every request. The result keeps what they bring alive: hold it until the kernel returns."""
        held = []
        for row, request in enumerate(requests):
            context, (state, is_new) = contiguous(request.context), self.state_of(request.request_id)
            wishes = usual.of(request, self.spare[row])
            held.append((context, wishes))
            place(self.address, row, context, request.limit, state, is_new, request.prompt_length, wishes.address)
        return held

    def draft(self, row: int, *, with_probabilities: bool = False) -> Draft:
        """The draft that a kernel wrote in ``row``."""
        size, match_length, source, is_tree = self._results[RESULT_COLUMNS * row : RESULT_COLUMNS * (row + 1)].tolist()
        if size == 0:
            return EMPTY_DRAFT
        estimates = self._probabilities[row][:size].copy() if with_probabilities else None
        parents = self._parents[row][:size].copy() if is_tree else None
        return Draft(self._tokens[row][:size].copy(), match_length, SOURCES[source], estimates, parents)


def checked_lengths(max_match_length: int, min_match_length: int) -> tuple[int, int]:
    """These, the second at least 1. Raises ConfigError where the kernels have no room for the first."""
    if not 1 <= max_match_length <= MAX_MATCH_LENGTH:
        raise ConfigError(f"max_match_length must be within 1..{MAX_MATCH_LENGTH}, got {max_match_length}")
    return max_match_length, max(1, min_match_length)
