"""Token masks for structured output, computed by llguidance on threads for all positions of a draft.

llguidance (Moskal et al., "Making Structured Outputs Go Brrr", 2025) runs a lexer based on derivatives under an Earley
parser along the vocabulary's trie. Most masks take less than a tenth of a millisecond, some take half a second. If a
mask is late, only the request that needs this mask waits for it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ssd.errors import RequestError
from ssd.text.grammar_memory import GrammarReservation, allocated_bytes

Mask = npt.NDArray[np.bool_]

PATIENCE_S = 0.02
"""The maximum time in seconds that a forward pass waits for token masks of structured output.

Most masks are computed far faster. A mask that is expected to need more processor time than `PATIENCE_S` is called
costly. Costly masks are computed one at a time, because several at once would slow down the forward passes.
"""


_YIELDS = 4  # in multiples of its own time, a costly mask lets shorter ones go first
_MAX_REMEMBERED = 1024
_QUICK_S = 2e-5  # a faster mask adds next to nothing to a grammar's automaton, on a fast processor too
_MAX_GROWTH = 1 << 30  # bytes that masks add per second of processor time: 44 to 110 MB were measured


@dataclass(frozen=True, slots=True)
class _Failure:
    """The position in a draft at which llguidance cannot continue with the grammar, and the reason."""

    at: int  # the number of draft tokens before the failure
    reason: str


_TOO_COMPLEX = "became too complex to follow after {} tokens: simplify it"
_DEAD_END = (
    "came to a dead end after {} tokens, where it allows no further text and the output is not complete: change what "
    "it allows there"
)


class _DraftMasks:
    """The token masks for one draft, which one thread computes while another thread reads those that are ready."""

    def __init__(self, draft: list[int], num_output: int, masks: list[Mask], failure: _Failure | None) -> None:
        self.draft = draft
        self.num_output = num_output
        self.masks = masks
        self.failure = failure
        self.may_stop = False
        self.is_abandoned = False
        self.used: list[Mask] | None = None  # the masks that were ready in time for the forward pass

    @property
    def is_whole(self) -> bool:
        """Whether all masks are computed, up to the end of the draft or to its first token that the grammar forbids."""
        at = len(self.masks) - 1
        return at >= len(self.draft) or (at >= 0 and not self.masks[at][self.draft[at]])


class GrammarState:
    """The structured-output state of one request: its grammar, its generated tokens, and the token masks for a draft.

    One thread calls the methods; other threads compute the masks. After an end-of-text token only end-of-text is
    allowed. The output may have to end because the grammar becomes too complex or allows no further token. Drafts do
    not influence whether this happens.
    """

    def __init__(
        self,
        open_it: Callable[[bool], GrammarReservation | None],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        param: str,
        threads: MaskThreads,
        tenant: str | None,
    ) -> None:
        """Create the state before the first token.

        Args:
            open_it: A function that reserves memory for the compiled grammar. Called with True, it may return None if
                memory is full.
            eos_token_ids: The token ids that end an output.
            vocab_size: The number of logits.
            param: The request field with the constraint, for error messages.
            threads: The threads that compute masks.
            tenant: The tenant; costly masks are computed for one tenant after the other.
        """
        self._open_it = open_it
        self._open: GrammarReservation | None = None
        self._tenant = tenant
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._token_ids: list[int] = []
        self._only_end = np.zeros(vocab_size, np.bool_)
        self._only_end[list(eos_token_ids)] = True
        self._ended = False
        self._param = param
        self._threads = threads
        self._trial: _DraftMasks | None = None
        self._computation: Future[None] | None = None
        self.was_late = False  # whether the last forward pass ran without some of its masks
        # While a thread computes masks, the following attributes belong to it.
        self._matcher: Any = None
        self._num_followed = 0
        self._costs_s = 0.0
        self._growth_left = 0.0  # the bytes by which the grammar may still grow, see `_count_growth`
        self._allocated, self._counted_from = 0, 0.0  # when `_start_to_count` was called

    @property
    def is_busy(self) -> bool:
        return self._computation is not None and not self._computation.done()

    def is_ready(self) -> bool:
        """Return whether the next forward pass may include this sequence; if not, start to compute the missing mask.

        Usually the masks are computed while the pass runs. But a sequence whose last masks were late, or whose grammar
        is not in memory yet, needs its first mask before the pass.
        """
        if self.is_busy:
            return False
        if self._trial is None and (self.was_late or self._matcher is None):
            if self._open is None:
                self._open = self._open_it(True)
                if self._open is None:
                    return False
                self._costs_s = self._open.costs_s
            self.start_masks([])
            return False
        return True

    def start_masks(self, draft: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Start to compute the token masks for a draft. No other draft's masks may be in computation."""
        self._try(draft, self._run)

    def _run(self, make: Callable[[_DraftMasks], None], trial: _DraftMasks) -> Future[None]:
        if self._costs_s > PATIENCE_S:
            return self._threads.submit_costly(self._tenant, self._costs_s, lambda: make(trial))
        return self._threads.submit(make, trial)

    def use_ready_masks(self) -> int:
        """Return how many token masks are ready. The current forward pass uses no masks that become ready later."""
        trial = self._trial
        assert trial is not None
        self.was_late = self.is_busy
        trial.may_stop = True
        trial.used = list(trial.masks)
        return len(trial.used)

    def masks(self, draft: Sequence[int] | npt.NDArray[np.int32]) -> list[Mask]:
        """Return the masks of allowed tokens, bool[V], for each draft token and for the token after the draft.

        A draft of k tokens has k + 1 masks. Fewer are returned if the grammar forbids a draft token, because the masks
        after it are not needed, or if masks were late, see `use_ready_masks`. If `start_masks` was not called for this
        draft, its masks are computed here. Exceptions of the computation are raised here.

        Every mask allows at least one token. If no other token can follow, it allows only end-of-text; `advance` then
        raises RequestError unless the output is complete.
        """
        draft = list(map(int, draft))
        trial = self._trial
        if trial is None or trial.draft[: len(draft)] != draft:
            if self._computation is not None:
                wait_for([self._computation])
            trial = self._try(draft, _run_now)
        if trial.used is None or not self.is_busy:
            made, self._computation = self._computation, None
            if made is not None and (error := made.exception()) is not None:
                self._trial = None
                raise error
        return (trial.masks if trial.used is None else trial.used)[: len(draft) + 1]

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append generated tokens, which must be tokens that the masks allowed.

        Raises RequestError if the output has to end because the grammar became too complex or allows no further token.
        """
        trial, self._trial = self._trial, None
        for number, token in enumerate(token_ids):
            if self._ended:
                return
            if token in self._eos_token_ids:
                failure = trial.failure if trial is not None and trial.draft[:number] == [*token_ids[:number]] else None
                if failure is not None and failure.at == number:
                    raise RequestError(
                        f"{self._param} {failure.reason.format(len(self._token_ids))}", param=self._param
                    )
                self._ended = True
                return
            self._token_ids.append(token)

    def release_memory(self) -> None:
        """Release the compiled grammar after the sequence ended or lost its slot. It is compiled again when needed."""
        if self._trial is not None:
            self._trial.may_stop = self._trial.is_abandoned = True
        if not self.is_busy:
            self._matcher = self._open = None

    def _try(
        self,
        draft: Sequence[int] | npt.NDArray[np.int32],
        run: Callable[[Callable[[_DraftMasks], None], _DraftMasks], Future[None]],
    ) -> _DraftMasks:
        assert not self.is_busy
        wanted = list(map(int, draft))
        trial = _DraftMasks(wanted, len(self._token_ids), [], None)
        if (known := self._trial) is not None:
            common = _common_length(known.draft, wanted)
            trial.masks = known.masks[: common + 1]
            if known.failure is not None and known.failure.at <= common:
                trial.failure = known.failure
        self._trial, self._computation = trial, None
        if not trial.is_whole:
            self._computation = run(self._make, trial)
        return trial

    # -- on a mask thread --------------------------------------------------------------------------------------------

    def _make(self, trial: _DraftMasks) -> None:
        if trial.is_abandoned:  # the request has ended before this began
            self._trial = self._matcher = self._open = None
            return
        started, num_known = time.thread_time(), len(trial.masks)
        self._start_to_count()
        try:
            self._follow(trial)
        except BaseException:  # e.g. a panic: the position of the matcher is unknown
            self._matcher = None
            raise
        finally:
            self._costs_s = time.thread_time() - started
            self._count_growth(len(trial.masks) - num_known)
            if trial.is_abandoned:
                self._matcher = self._open = None

    def _start_to_count(self) -> None:
        self._allocated, self._counted_from = allocated_bytes(), time.thread_time()

    def _count_growth(self, num_masks: int) -> None:
        # Other threads allocate memory too, so only slow masks count, and with a limit per second of all masks so far.
        # A limit per mask would lose most of the growth, because tables double in single masks, however quick they are.
        seconds = time.thread_time() - self._counted_from
        if self._open is not None and seconds > _QUICK_S * num_masks:
            self._growth_left += _MAX_GROWTH * seconds
            grown = allocated_bytes() - self._allocated - num_masks * self._vocab_size
            grown = int(max(-self._growth_left, min(grown, self._growth_left)))
            self._growth_left -= abs(grown)
            self._open.grow(grown)

    def _follow(self, trial: _DraftMasks) -> None:
        """Compute the token masks of a draft. A copy of llguidance's matcher reads the draft tokens.

        Copying takes 1 us. llguidance's own rollback is not used, because it could return masks of an earlier draft.
        """
        if self._matcher is None:
            self._restart_matcher(trial, [])
        elif self._num_followed < trial.num_output:
            self._matcher.consume_tokens(self._token_ids[self._num_followed : trial.num_output])
        self._num_followed = trial.num_output
        ended = self._ended
        at_output: Any = None
        tried: list[int] = []
        for position in range(len(trial.draft) + 1):
            if position:
                token = trial.draft[position - 1]
                if not trial.masks[position - 1][token]:
                    break
                if token in self._eos_token_ids:
                    ended = True
                else:
                    if not tried:
                        at_output = self._matcher
                        self._matcher = at_output.deep_copy()
                    self._matcher.consume_token(token)
                    tried.append(token)
            if position == len(trial.masks):
                trial.masks.append(self._only_end if ended else self._mask(trial, tried))
            if trial.may_stop:
                break
        if tried:
            self._matcher = at_output

    def _restart_matcher(self, trial: _DraftMasks, tried: Sequence[int]) -> None:
        if self._open is None:
            self._open = self._open_it(False)
        assert self._open is not None
        self._matcher = self._open.start()
        self._start_to_count()
        if trial.num_output or tried:
            self._matcher.consume_tokens([*self._token_ids[: trial.num_output], *tried])

    def _mask(self, trial: _DraftMasks, tried: Sequence[int]) -> Mask:
        if self._matcher.is_error():  # perhaps caused by an earlier draft, which a new matcher has not seen
            self._restart_matcher(trial, tried)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
            if mask.any() and not self._matcher.is_error():
                return mask
        if self._matcher.is_error() or not self._matcher.is_accepting():
            complaint = self._matcher.get_error()  # empty if no token is allowed
            is_dead_end = not complaint or re.match("NoExtension|.*doesn't satisfy the grammar", complaint)
            trial.failure = _Failure(len(tried), _DEAD_END if is_dead_end else _TOO_COMPLEX)
        return self._only_end


def use_available_masks(states: Sequence[GrammarState | None]) -> npt.NDArray[np.int64]:
    """Wait at most `PATIENCE_S` for the token masks of a forward pass; return the number of masks of each sequence.

    The result is int64[B], with the largest integer for a sequence without structured output, which needs no masks.
    Sequences whose last masks were late are waited for only if the pass consists only of such sequences.
    """
    found = [state for state in states if state is not None]
    trusted = [state for state in found if not state.was_late]
    wait_for(_computations(trusted if trusted or len(found) < len(states) else found), PATIENCE_S)
    unbounded = np.iinfo(np.int64).max
    return np.array([unbounded if state is None else state.use_ready_masks() for state in states])


def await_masks(states: Iterable[GrammarState]) -> None:
    """Wait at most `PATIENCE_S` until the token masks of at least one of the sequences are computed."""
    wait_for(_computations(states), PATIENCE_S, return_when=FIRST_COMPLETED)


def _computations(states: Iterable[GrammarState]) -> list[Future[None]]:
    return [state._computation for state in states if state._computation is not None]


class MaskThreads:
    """The threads that compute token masks. Up to 1,024 masks are computed concurrently, so that requests rarely wait.

    Costly masks are computed one at a time on a thread of low priority, for one tenant after the other. Of a tenant's
    masks, the shortest is computed first.
    """

    def __init__(self) -> None:
        self.submit = ThreadPoolExecutor(1024, "ssd-masks", lambda: _lower_priority(10)).submit
        self._costly = ThreadPoolExecutor(1, "ssd-costly-masks", lambda: _lower_priority(15))
        self._lock = threading.Lock()
        self._waiting: list[_CostlyMask] = []
        self._last_turn: OrderedDict[str | None, None] = OrderedDict()  # of each tenant, the latest last

    def submit_costly(self, tenant: str | None, costs_s: float, call: Callable[[], None]) -> Future[None]:
        """Queue the computation of a token mask that is expected to take ``costs_s`` seconds.

        A mask that has waited long is computed before a shorter one that was queued much later.
        """
        costly = _CostlyMask(tenant, time.monotonic() + _YIELDS * costs_s, call, Future())
        with self._lock:
            self._waiting.append(costly)
        self._costly.submit(self._make_one)
        return costly.future

    def _make_one(self) -> None:
        with self._lock:
            turns = {tenant: turn for turn, tenant in enumerate(self._last_turn)}
            costly = min(self._waiting, key=lambda each: (turns.get(each.tenant, -1), each.due))
            self._waiting.remove(costly)
            self._last_turn[costly.tenant] = None
            self._last_turn.move_to_end(costly.tenant)
            if len(self._last_turn) > _MAX_REMEMBERED:
                self._last_turn.popitem(last=False)
        _run_into(costly.future, costly.call)


@dataclass(frozen=True, slots=True, eq=False)
class _CostlyMask:
    tenant: str | None
    due: float
    call: Callable[[], None]
    future: Future[None]


def _lower_priority(by: int) -> None:
    """Lower the priority of the current thread below that of forward passes, if the system allows it."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), by)


def _run_now(make: Callable[[_DraftMasks], None], trial: _DraftMasks) -> Future[None]:
    return _run_into(Future(), lambda: make(trial))


def _run_into(future: Future[None], call: Callable[[], None]) -> Future[None]:
    try:
        call()
        future.set_result(None)
    except BaseException as error:
        future.set_exception(error)
    return future


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length
