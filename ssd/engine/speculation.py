"""Speculation: decides when to draft and which drafts to verify, and learns from the number of accepted tokens."""

from __future__ import annotations

import logging
import time
from threading import Thread
from typing import NamedTuple

import numpy as np

from ssd.config import DraftConfig, DraftShape
from ssd.cost_model.calibration import FIRST_TOKEN_THRESHOLD, AcceptanceCalibration, DraftBackoff
from ssd.cost_model.cost_model import CostModel
from ssd.drafting.draft_batch import DraftBatch
from ssd.drafting.protocol import Drafter, NoDrafter, ScoredPass, ScoreLearner
from ssd.engine.batch import Batch
from ssd.engine.draft_buffers import (
    CHAIN,
    PREPARED_CHAIN,
    TREE,
    collect_drafts,
    fill_draft_params,
    learn_from_pass,
    make_drafts,
    plan_prepared_drafts,
    reuse_prepared_drafts,
    start_drafts,
    store_prepared_drafts,
    warm_up_draft_buffers,
)
from ssd.engine.drafter_backends import make_backend
from ssd.engine.forward_pass import CommittedPass, ForwardPass
from ssd.engine.metrics import BestEffort
from ssd.engine.pass_timing import timed_passes
from ssd.engine.sequence import Sequence
from ssd.jit.addresses import Records
from ssd.jit.code_cache import kernel_counts
from ssd.model.target import Target

log = logging.getLogger(__name__)


_REPORTED_WIDTH = 16  # tokens of the pass whose cost is logged
_WITHHELD_STEPS = 200
"""The number of steps in which promising drafts cost too much to be verified, after which a warning is logged."""


class SpeculationStatus(NamedTuple):
    """Whether drafts are verified at present, and the reason in one sentence."""

    active: bool
    reason: str


def supported_shape(shape: DraftShape, target: Target) -> DraftShape:
    """Return the configured shape of drafts, or "chain" if the target cannot verify draft trees."""
    if target.can_verify_trees:
        return shape
    if shape == "tree":
        log.warning(
            "the model runner %s verifies only chains: drafts are chains instead of trees (nothing to do)",
            target.backend,
        )
    return "chain"


def uses_trees(shape: DraftShape, num_rows: int) -> bool:
    """Return whether the drafts of a forward pass over ``num_rows`` sequences are trees instead of chains.

    ``shape`` is the configured shape. With "auto", only a single sequence has a tree. With several sequences trees were
    slower on a CPU: they add accepted tokens to one sequence, but all sequences are padded to the longest draft.
    """
    return shape == "tree" or (shape == "auto" and num_rows == 1)


class SpeculationManager:
    """Calls the drafter, and decides when to draft: if the expected gain exceeds the measured cost.

    It also limits the draft length; the cost model (`pass_costs`) chooses the length below this limit.

    These decisions affect only speed, never an output token. If the drafter raises an exception, the drafts are empty.
    """

    def __init__(self, target: Target, drafter: Drafter, draft: DraftConfig, best_effort: BestEffort) -> None:
        self._target = target
        self._drafter = drafter
        self._cost_model = CostModel()
        self._calibration = AcceptanceCalibration()
        self._backend = make_backend(drafter, self._cost_model)
        self._best_effort = best_effort
        self._limit = draft.num_speculative_tokens if target.can_roll_back and type(drafter) is not NoDrafter else 0
        self._memory = Records(DraftBatch)
        settings, self._settings = self._memory[0], self._memory.address
        self._backend.write_settings(settings)
        settings.limit, settings.vocab_size = self._limit, target.vocab_size
        settings.first_threshold, settings.default_token_cost = FIRST_TOKEN_THRESHOLD, self._backend.default_token_cost
        settings.costs, settings.calibration = self._cost_model.address, self._calibration.address
        self._shape = supported_shape(draft.draft_shape, target)
        self._learner = drafter if draft.recycling and self._limit and isinstance(drafter, ScoreLearner) else None
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
            what = f"a pass of {_REPORTED_WIDTH} tokens is estimated to take as long as {cost:.1f} passes of one token"
            return SpeculationStatus(False, f"verifying drafts costs more than it gains: {what}")
        return SpeculationStatus(True, "drafts are verified if their expected gain exceeds their cost")

    def relative_cost(self, width: int) -> float:
        return self._cost_model.relative_cost(width)

    @property
    def is_ready(self) -> bool:
        """Whether the drafter may be called. False while its kernels are compiled in the background."""
        if self._compiling is not None and not self._compiling.is_alive():
            self._compiling, self._is_drafter_ready = None, True
        return self._is_drafter_ready

    def defer_drafting(self) -> None:
        """Disable drafting until ``warm_up`` has compiled the drafting kernels; without effect if there are none.

        ``warm_up`` then compiles them on a background thread.
        """
        self._is_drafter_ready = not self._backend.needs_kernels

    @property
    def num_failures(self) -> int:
        return self._best_effort.num_failures + self._backend.num_failures + self._memory[0].num_invalid

    def warm_up(self, patience_s: float | None) -> None:
        """Compile the drafting kernels.

        After `defer_drafting`, a background thread compiles them, and this method waits at most ``patience_s`` seconds.
        """

        def compile_kernels() -> None:
            self._best_effort(lambda: getattr(self._drafter, "warm_up", lambda: None)())
            warm_up_draft_buffers(self._settings, with_suffix_drafter=self._backend.needs_kernels)

        empty_batch = Batch(())
        reuse_prepared_drafts(empty_batch.address, 0, 0, True)  # this kernel runs in every pass
        if self._is_drafter_ready:
            compile_kernels()
        else:
            self._compiling = Thread(target=compile_kernels, name="ssd-compile", daemon=True)
            self._compiling.start()
            self._compiling.join(patience_s)

    def publish(self) -> None:
        """Make the drafter hand its learned statistics to the caches, which store them when they are closed."""
        if self.is_ready:
            self._best_effort(lambda: getattr(self._drafter, "publish", lambda: None)())

    def calibrate(self) -> None:
        """Measure the latency of forward passes of several sizes for the cost model. All slots must be free."""
        if self._limit > 0:
            for (num_rows, width), seconds in timed_passes(self._target, self._limit + 1).items():
                self._cost_model.calibrate(num_rows * width, seconds, is_wide=width > 1)
            self._cost_model.end_warm_up()

    def allows_early_launch(self, is_draftless: bool) -> bool:
        """Return whether the next forward pass may be launched before the output of the current pass is known.

        The drafter must then draft without that output. This is allowed if speculation is off. It is also allowed if no
        draft was found for a while (``is_draftless``), unless a drafter, such as a draft model or head, must see the
        output of each pass.
        """
        return self._limit == 0 or (is_draftless and not self._backend.needs_outcomes)

    def discard_drafts(self) -> None:
        self._buffer ^= 1

    def propose(self, batch: Batch) -> int:
        """Make the drafts for the next forward pass; return which of the two draft buffers (0 or 1) holds them."""
        self._buffer ^= 1
        should_draft_all = self._backoff.should_draft_all(len(batch.sequences))
        if not self._limit or not self.is_ready or not batch.sequences:
            reuse_prepared_drafts(batch.address, self._buffer, 0, should_draft_all)
            return self._buffer
        started = time.perf_counter()
        self._backend.start_step()
        num_rows = start_drafts(batch.address, self._buffer, self._settings, should_draft_all)
        if num_rows:
            shape = TREE if uses_trees(self._shape, len(batch.sequences)) else CHAIN
            self._draft(batch, self._buffer, num_rows, shape)
        seconds = time.perf_counter() - started
        self._backoff.record_drafting(num_rows, seconds, skips_some=batch.record.num_in_backoff > 0)
        return self._buffer

    def _draft(self, batch: Batch, buffer: int, num_rows: int, shape: int) -> None:
        arguments = batch.address, buffer, self._settings
        try:
            groups = self._backend.prepare(batch, num_rows)  # alive until the kernel has searched their snapshots
            if groups is not None:
                make_drafts(*arguments, shape)
                return
            fill_draft_params(*arguments, shape)
            self._backend.draft(batch)
        except BaseException as error:
            self._best_effort.record(error)
            for b in np.flatnonzero(batch.needs_draft).tolist():
                batch.sequences[b].row.draft_row.draft.size = 0
        if shape == PREPARED_CHAIN:
            store_prepared_drafts(*arguments)
        else:
            collect_drafts(*arguments)

    def prepare_drafts(self, in_flight: ForwardPass) -> None:
        """Prepare long drafts while a forward pass runs, for sequences whose last draft was fully accepted.

        Later passes take their drafts from a prepared draft, so that the device need not wait for the drafter while the
        output repeats an earlier text. If the running pass rejects a draft token, the prepared draft of the sequence is
        not used.
        """
        batch, buffer = in_flight.batch, in_flight.buffer
        if self._backend.needs_outcomes or not self.is_ready or not self._limit:
            return
        if num_rows := plan_prepared_drafts(batch.address, buffer, self._settings):
            self._draft(batch, buffer, num_rows, PREPARED_CHAIN)

    def observe(self, committed: CommittedPass) -> None:
        """Report to the drafter which draft tokens of a forward pass were accepted, and the target's logits.

        Logits of passes without drafts are reported only now and then, because learning from them takes time. Call this
        after the output tokens were appended, and before the next drafts are made.
        """
        self._scored_pass = None
        if not self._limit or not self.is_ready:
            return
        completed, started = committed.forward_pass, time.perf_counter()
        if self._learner is not None and self._backoff.should_observe(has_drafts=completed.width > 1):
            self._scored_pass = self._best_effort(completed.scored_pass)
        try:
            self._backend.observe(committed, self._scored_pass)
        except BaseException as error:
            self._best_effort.record(error)
        self._observing_s = time.perf_counter() - started

    def learn(self, completed: ForwardPass, num_tokens: int) -> None:
        """Update acceptance estimates and the cost model after a forward pass, and let the drafter learn from logits.

        Call this while a GPU computes the next pass. On a CPU, the time for learning counts as a cost of drafting.
        """
        if not self._limit or not self.is_ready:
            return
        learner, scored_pass, seconds = self._learner, self._scored_pass, completed.seconds
        if learner is not None and scored_pass is not None:
            self._scored_pass = None
            started = time.perf_counter()
            self._best_effort(lambda: learner.learn_scores(scored_pass))
            learning_s = time.perf_counter() - started
            self._backoff.record_observing(self._observing_s + learning_s)
            if completed.width > 1:
                seconds += self._observing_s + (0.0 if self._target.is_asynchronous else learning_s)
        if completed.has_prefill:
            seconds = 0.0
        else:
            self._backoff.observe_pass(seconds)
        num_withheld = learn_from_pass(
            completed.batch.address,
            completed.buffer,
            self._settings,
            completed.sizes,
            completed.paths,
            completed.width,
            num_tokens,
            seconds,
        )
        is_withheld = num_withheld >= _WITHHELD_STEPS
        if is_withheld and not self._is_withheld:
            self._num_withheld_periods += 1
            if self._num_withheld_periods.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time
                log.warning(
                    "for %d decoding steps, drafts with a high acceptance estimate were not verified (%s)",
                    _WITHHELD_STEPS,
                    self.status.reason,
                )
        self._is_withheld = is_withheld

    def drop_request(self, sequence: Sequence) -> None:
        if self._scored_pass is not None and sequence.namespace is None:  # nothing else could learn from it
            is_its = [name == sequence.request.request_id for name in self._scored_pass.request_ids]
            self._scored_pass.num_positions[is_its] = 0
        sequence.advance_noise()
        if self.is_ready:
            self._best_effort(lambda: self._backend.finish(sequence))
        sequence.drop_drafts()
