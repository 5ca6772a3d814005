"""Speculation: decides when to draft and which drafts to verify, and learns from the result."""

from __future__ import annotations

import logging
import time
from threading import Thread
from typing import NamedTuple

import numpy as np

from ssd.config import DraftConfig, DraftShape
from ssd.cost_model.calibration import AcceptanceCalibration, DraftBackoff
from ssd.cost_model.cost_model import CostModel
from ssd.drafting.draft_records import MAX_DRAFT, DraftRecord, source_number
from ssd.drafting.hybrid_drafter import HybridDrafter
from ssd.drafting.proposer import FaultIsolatingDrafter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest, NoDrafter, ScoredPass, ScoreObserver
from ssd.drafting.suffix_drafter import SuffixDrafter, draft_of
from ssd.engine.batch import DRAFT_ROW_OFFSET, Batch
from ssd.engine.drafts import (
    CHAIN,
    PREPARED_CHAIN,
    TREE,
    collect_drafts,
    fill_draft_params,
    plan_prepared_drafts,
    record_draft_outcomes,
    reuse_prepared_drafts,
    store_prepared_drafts,
    warm_up_drafts,
)
from ssd.engine.forward_pass import ForwardPass
from ssd.engine.metrics import BestEffort
from ssd.engine.pass_timing import timed_passes
from ssd.engine.sequence import Sequence
from ssd.jit.code_cache import kernel_counts
from ssd.model.kv.tree import is_tree, leading_chain
from ssd.model.target import Target
from ssd.retrieval.cache_state import LearnedState

log = logging.getLogger(__name__)


_REPORTED_WIDTH = 16  # tokens of the pass whose cost is logged
_WITHHELD_STEPS = 200
"""After this many steps in which promising drafts were not verified because of their cost, a warning is logged."""


class SpeculationStatus(NamedTuple):
    """Whether drafts are verified at present, and the reason in one sentence."""

    active: bool
    reason: str


def supported_shape(shape: DraftShape, target: Target) -> DraftShape:
    """Return the configured shape of drafts, or "chain" if the target cannot verify draft trees."""
    if target.can_verify_trees:
        return shape
    if shape == "tree":
        log.warning("the model runs %s, which verifies only chains: drafts are chains", target.backend)
    return "chain"


def uses_trees(shape: DraftShape, num_rows: int) -> bool:
    """Return whether a forward pass over ``num_rows`` sequences verifies draft trees; "auto": only for one sequence.

    With several sequences trees were slower on a CPU: they add accepted tokens to one sequence, but all sequences are
    padded to the longest draft.
    """
    return shape == "tree" or (shape == "auto" and num_rows == 1)


def validate_draft(draft: Draft, limit: int, *, allow_tree: bool) -> Draft | None:
    """Return a draft cut to ``limit`` tokens, or None if it is no valid tree.

    If trees are not allowed, a tree is replaced by the chain at its beginning.
    """
    if draft.parents is not None:
        if not is_tree(draft.parents, len(draft.token_ids)):
            return None
        if not allow_tree:
            straight = leading_chain(draft.parents)
            draft = Draft(draft.token_ids, draft.match_length, draft.source, draft.probabilities).cut(straight)
    return draft.cut(min(limit, MAX_DRAFT))


def write_draft(draft: Draft, out: DraftRecord) -> None:
    """Write a draft of at most MAX_DRAFT tokens to a record that compiled kernels read."""
    size = out.size = len(draft.token_ids)
    out.match_length, out.source = draft.match_length, source_number(draft.source)
    out.is_tree, out.has_estimates = draft.parents is not None, draft.probabilities is not None
    out.tokens[:size] = draft.token_ids.tolist()
    if draft.parents is not None:
        out.parents[:size] = draft.parents.tolist()
    if draft.probabilities is not None:
        out.probabilities[:size] = draft.probabilities.tolist()


class SpeculationManager:
    """Decides when drafts are made and how long they are, by expected gain and measured cost, and calls the drafter.

    It affects only speed, never an output token. If the drafter raises an exception, the drafts are empty.
    """

    def __init__(self, target: Target, drafter: Drafter, draft: DraftConfig, best_effort: BestEffort) -> None:
        self._target = target
        self._drafter = drafter
        hybrid = drafter if isinstance(drafter, HybridDrafter) else None
        first = drafter if hybrid is None else hybrid.primary
        # The suffix drafter, which drafts for all rows in one call; None for other drafters.
        self._suffix = first if isinstance(first, SuffixDrafter) else None
        # The hybrid drafter if its primary drafter is a suffix drafter.
        self._hybrid = None if self._suffix is None else hybrid
        self._isolated_drafter = FaultIsolatingDrafter(drafter)
        self._best_effort = best_effort
        self._limit = draft.num_speculative_tokens if target.can_roll_back and type(drafter) is not NoDrafter else 0
        self._shape = supported_shape(draft.draft_shape, target)
        self._observer = drafter if draft.recycling and self._limit and isinstance(drafter, ScoreObserver) else None
        self._cost_model = CostModel()
        self._calibration = AcceptanceCalibration()
        self._backoff = DraftBackoff()
        self._buffer = 0
        self._scored_pass: ScoredPass | None = None  # the scores of the last pass, until they are learned from
        self._observing_s = 0.0
        self._is_drafter_ready = True
        self._compiling: Thread | None = None
        self._disabled_reason = ""  # the reason why no drafts are ever made; empty if they are
        if not target.can_roll_back:
            self._disabled_reason = f"the model runs {target.backend}, which cannot undo rejected draft tokens"
        elif not self._limit:
            self._disabled_reason = "disabled by num_speculative_tokens=0"
        self._is_withheld = False
        self._num_withheld_periods = 0

    @property
    def is_enabled(self) -> bool:
        return not self._disabled_reason

    @property
    def status(self) -> SpeculationStatus:
        """Whether drafts are verified at present, and the reason. Any thread may read it."""
        if self._disabled_reason:
            return SpeculationStatus(False, self._disabled_reason)
        if not self.is_ready:
            is_first = kernel_counts().compiled > 0
            what = "compiled, once on each machine and version" if is_first else "loaded"
            return SpeculationStatus(False, f"kernels are being {what}")
        if self._cost_model.num_withheld >= _WITHHELD_STEPS:
            cost = self.relative_cost(_REPORTED_WIDTH)
            what = f"a {_REPORTED_WIDTH}-token pass is estimated at {cost:.1f} single-token passes"
            return SpeculationStatus(False, f"withheld: {what}")
        return SpeculationStatus(True, "drafts are verified if their expected gain exceeds their cost")

    def relative_cost(self, width: int) -> float:
        return self._cost_model.relative_cost(width)

    @property
    def is_ready(self) -> bool:
        """Whether the drafter may be called; False while its kernels are compiled in the background."""
        if self._compiling is not None and not self._compiling.is_alive():
            self._compiling, self._is_drafter_ready = None, True
        return self._is_drafter_ready

    def defer_drafting(self) -> None:
        """Disable drafting until ``warm_up`` has compiled the kernels; a drafter that needs no kernels goes on."""
        self._is_drafter_ready = self._suffix is None

    @property
    def num_failures(self) -> int:
        own = self._best_effort.num_failures + self._isolated_drafter.num_failures
        return own + int(getattr(self._drafter, "num_failures", 0))

    def warm_up(self, patience_s: float | None) -> None:
        """Compile the drafting kernels.

        If ``defer_drafting`` was called, a background thread compiles them, and this waits at most ``patience_s``
        seconds.
        """

        def compile_kernels() -> None:
            self._best_effort(lambda: getattr(self._drafter, "warm_up", lambda: None)())
            warm_up_drafts()

        empty_batch = Batch(())
        reuse_prepared_drafts(empty_batch.address, 0, 0, True)  # this kernel runs in every pass
        if self._is_drafter_ready:
            compile_kernels()
        else:
            self._compiling = Thread(target=compile_kernels, name="ssd-compile", daemon=True)
            self._compiling.start()
            self._compiling.join(patience_s)

    def publish(self) -> None:
        """Let the drafter publish the statistics that it learned, so that they are stored in the caches."""
        if self.is_ready:
            self._best_effort(lambda: getattr(self._drafter, "publish", lambda: None)())

    def calibrate(self) -> None:
        """Measure the latency of forward passes of several sizes on free slots for the cost model."""
        if self._limit > 0:
            for (num_rows, width), seconds in timed_passes(self._target, self._limit + 1).items():
                self._cost_model.calibrate(num_rows * width, seconds, is_wide=width > 1)
            self._cost_model.begin()

    def allows_early_launch(self, is_draftless: bool) -> bool:
        """Return whether a forward pass may be launched without waiting for the drafter.

        It may if speculation is off, or if no draft was found for a while (``is_draftless``) and no draft model or head
        must see the output of each pass.
        """
        return self._limit == 0 or (is_draftless and self._suffix is not None and self._hybrid is None)

    def discard_drafts(self) -> None:
        self._buffer ^= 1

    def propose(self, batch: Batch) -> int:
        """Make the drafts for the next forward pass, and return the number (0 or 1) of the buffer that holds them."""
        self._buffer ^= 1
        limit = self._limit if self.is_ready else 0
        should_draft_all = self._backoff.should_draft_all(len(batch.sequences))
        reuse_prepared_drafts(batch.address, self._buffer, limit, should_draft_all)
        if limit and batch.sequences:
            self._draft(batch, limit)
        return self._buffer

    def _draft(self, batch: Batch, limit: int) -> None:
        costs, calibration, num_rows = self._cost_model.address, self._calibration.address, len(batch.sequences)
        shape = TREE if uses_trees(self._shape, num_rows) else CHAIN
        default_token_cost = 0.0 if self._suffix is None else self._suffix.default_token_cost
        started = time.perf_counter()
        num_draft_rows = fill_draft_params(
            batch.address, self._buffer, costs, calibration, limit, default_token_cost, shape
        )
        if num_draft_rows:
            self._run_drafter(batch, num_draft_rows)
        seconds = time.perf_counter() - started
        if num_draft_rows or batch.record.width > 1:
            vocab_size = self._target.vocab_size
            self._best_effort.num_failures += collect_drafts(
                batch.address, self._buffer, costs, calibration, vocab_size
            )
        self._backoff.record_drafting(num_draft_rows, seconds, skips_some=batch.record.num_in_backoff > 0)

    def prepare_drafts(self, in_flight: ForwardPass) -> None:
        """Make drafts ahead, while a forward pass runs, for sequences whose last draft was fully accepted.

        If a text repeats verbatim, the device would otherwise wait for drafting. If the running pass rejects a token,
        the draft is not used.
        """
        batch, costs, calibration = in_flight.batch, self._cost_model.address, self._calibration.address
        if self._suffix is None or self._hybrid is not None or not self.is_ready or not self._limit:
            return
        plan_prepared_drafts(batch.address, in_flight.buffer, self._limit)
        token_cost = self._suffix.default_token_cost
        num_draft_rows = fill_draft_params(
            batch.address, in_flight.buffer, costs, calibration, self._limit, token_cost, PREPARED_CHAIN
        )
        if num_draft_rows:
            self._run_drafter(batch, num_draft_rows)
            num_invalid = store_prepared_drafts(batch.address, in_flight.buffer, self._target.vocab_size)
            self._best_effort.num_failures += num_invalid

    def _run_drafter(self, batch: Batch, num_draft_rows: int) -> None:
        """Call the drafter for the sequences that need a draft; if it raises an exception, their drafts are empty."""
        suffix = self._suffix
        if suffix is None:
            drafts = self._best_effort(lambda: self._draft_by_requests(batch))
            is_done = drafts is not None
        else:
            is_done = self._best_effort(lambda: self._draft_records(suffix, batch, num_draft_rows)) is not None
        if not is_done:
            for b in np.flatnonzero(batch.needs_draft).tolist():
                batch.sequences[b].row.draft_row.draft.size = 0

    def _draft_records(self, suffix: SuffixDrafter, batch: Batch, num_draft_rows: int) -> bool:
        for sequence in batch.coupled:
            sequence.advance_noise()
        if self._hybrid is not None:
            self._hybrid.start_step()
        groups = batch.namespace_groups(lambda sequence, learned: self._start_request(suffix, sequence, learned))
        suffix.draft_groups(batch.draft_rows[:num_draft_rows], groups)
        if self._hybrid is not None and self._hybrid.is_due(num_draft_rows):
            sequences, requests = self._draft_requests(batch)
            found = [draft_of(sequence.row.draft_row.draft) for sequence in sequences]
            drafts = self._hybrid.extend_drafts(requests, list(found))
            for sequence, own, draft in zip(sequences, found, drafts, strict=True):
                if draft is not own:
                    write_draft(draft, sequence.row.draft_row.draft)
        return True

    def _start_request(self, suffix: SuffixDrafter, sequence: Sequence, learned: LearnedState | None) -> None:
        """Create the drafter's state of a sequence before its first draft, with its namespace's drafting statistics."""
        if sequence.request_row is None:
            request = self._draft_request(sequence)
            sequence.request_row = suffix.start_request(
                request, sequence.row.draft_row, sequence.address + DRAFT_ROW_OFFSET
            )
        assert sequence.draft_request is not None
        sequence.draft_request.learned = sequence.request_row.learned = learned

    def _draft_by_requests(self, batch: Batch) -> bool:
        """Call a drafter that takes a list of `DraftRequest`, and copy its drafts to the records of the sequences."""
        sequences, requests = self._draft_requests(batch)
        drafts = self._isolated_drafter.propose(requests)
        if len(drafts) != len(sequences):
            return False
        for sequence, request, draft in zip(sequences, requests, drafts, strict=True):
            found = validate_draft(draft, request.limit, allow_tree=request.allow_tree)
            self._best_effort.num_failures += found is None
            write_draft(EMPTY_DRAFT if found is None else found, sequence.row.draft_row.draft)
        return True

    def _draft_requests(self, batch: Batch) -> tuple[list[Sequence], list[DraftRequest]]:
        sequences = [batch.sequences[b] for b in np.flatnonzero(batch.needs_draft).tolist()]
        has_costs = self._cost_model.pass_time is not None
        requests = [self._draft_request(sequence) for sequence in sequences]
        for sequence, request in zip(sequences, requests, strict=True):
            params = sequence.row.draft_row.params
            cache = None if sequence.namespace is None else sequence.namespace.cache
            if cache is not None:
                request.snapshot, request.learned = cache.snapshot(), cache.learned
            request.limit, request.allow_tree = params.limit, bool(params.is_tree)
            request.token_costs = np.array([params.token_cost]) if has_costs else None
        return sequences, requests

    def observe_scores(self, completed: ForwardPass) -> None:
        """Pass the top-k logits of a forward pass to the drafter, unless learning from them costs too much time.

        Call it before the output tokens are appended. The drafter learns from the logits later, in `observe_pass`.
        """
        self._scored_pass = None
        observer = self._observer
        if observer is None or not self.is_ready or not self._backoff.should_observe(has_drafts=completed.width > 1):
            return
        started = time.perf_counter()
        self._scored_pass = self._best_effort(completed.scored_pass)
        if (scored_pass := self._scored_pass) is not None:
            self._best_effort(lambda: observer.observe_scores(scored_pass))
        self._observing_s = time.perf_counter() - started

    def observe(self, completed: ForwardPass) -> None:
        """Report to the drafter how many tokens of each draft were accepted; `observe_row` does so for special rows.

        The suffix drafter is not called, because it sees the accepted tokens in the next context.
        """
        if self._limit and (self._suffix is None or self._hybrid is not None):
            for b in np.flatnonzero(completed.batch.committed > 0).tolist():
                self.observe_row(completed, b, int(completed.sizes[b]) - 1)

    def observe_row(self, completed: ForwardPass, b: int, num_accepted: int) -> None:
        """Report to the drafter that ``num_accepted`` draft tokens of sequence ``b`` were accepted."""
        sequence = completed.batch.sequences[b]
        row, request_id = sequence.row, sequence.request.request_id
        if not self.is_ready:
            return
        drafter: Drafter | None = self._drafter if self._suffix is None else None
        if self._hybrid is not None and self._hybrid.count_step(request_id, num_accepted):
            drafter = self._hybrid
        elif sequence.finish_reason is not None:
            drafter = self._suffix or self._drafter
        if drafter is None:
            return
        draft = completed.draft(b)
        if draft.path is not None:
            draft.path = draft.path[:num_accepted]
        if row.prepared_length:  # the drafter expects the result of the draft that it made last
            draft = draft_of(row.prepared).cut(row.prepared_begin - 1)
            num_accepted = min(row.prepared_offset + num_accepted, len(draft.token_ids))
        elif row.used_offset:
            return
        try:
            drafter.observe(request_id, draft, num_accepted)
        except BaseException as error:
            self._best_effort.record(error)
        if drafter is self._hybrid and sequence.request_row is not None and sequence.finish_reason is None:
            sequence.request_row.verified = None  # it sees the result in the next context

    def record_outcomes(self, completed: ForwardPass) -> None:
        if self._limit and self.is_ready:
            calibration = self._calibration.address
            record_draft_outcomes(
                completed.batch.address, completed.buffer, calibration, completed.sizes, completed.paths
            )

    def observe_pass(self, completed: ForwardPass, num_tokens: int) -> None:
        """Update the cost model with the latency of a forward pass, and let the drafter learn from its logits.

        The drafter's learning time counts as a cost of drafting unless the device computes meanwhile.
        """
        if not self._limit:
            return
        observer, scored_pass, seconds = self._observer, self._scored_pass, completed.seconds
        if observer is not None and scored_pass is not None:
            self._scored_pass = None
            started = time.perf_counter()
            self._best_effort(lambda: observer.learn_scores(scored_pass))
            learning_s = time.perf_counter() - started
            self._backoff.record_observing(self._observing_s + learning_s)
            if completed.width > 1:
                seconds += self._observing_s + (0.0 if self._target.is_asynchronous else learning_s)
        self._observe_pass(len(completed.sizes), completed.width, num_tokens, seconds)

    def _observe_pass(self, num_rows: int, width: int, num_tokens: int, seconds: float) -> None:
        self._backoff.observe_pass(seconds)
        self._cost_model.observe(num_rows * width, num_tokens, seconds, is_wide=width > 1)
        is_withheld = self._cost_model.num_withheld >= _WITHHELD_STEPS
        if is_withheld and not self._is_withheld:
            self._num_withheld_periods += 1
            if self._num_withheld_periods.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time
                log.warning("promising drafts were not verified for %d steps (%s)", _WITHHELD_STEPS, self.status.reason)
        self._is_withheld = is_withheld

    def drop_request(self, sequence: Sequence) -> None:
        if self._scored_pass is not None and sequence.namespace is None:  # nothing else could learn from it
            is_its = [name == sequence.request.request_id for name in self._scored_pass.request_ids]
            self._scored_pass.num_positions[is_its] = 0
        sequence.advance_noise()
        self._isolated_drafter.forget(sequence.request.request_id)
        if self.is_ready:
            self._best_effort(lambda: self._drafter.finish(sequence.request.request_id))
        sequence.drop_drafts()

    def _draft_request(self, sequence: Sequence) -> DraftRequest:
        """Return the sequence's `DraftRequest`, always the same object; the caller sets limit, cost and shape."""
        sequence.advance_noise()
        request = sequence.draft_request
        if request is None:
            request = sequence.draft_request = DraftRequest(
                request_id=sequence.request.request_id,
                context=sequence.context,
                prompt_length=sequence.num_prompt_tokens,
                snapshot=None,
                limit=0,
                prediction=sequence.prediction,
                sampling=sequence.sampling,
                allow_caching=sequence.request.learn,
            )
        request.context, request.slot = sequence.context, sequence.slot
        return request
