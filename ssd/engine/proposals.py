"""What the engine asks its drafter, how much of the answer is verified, and what is learned from that."""

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
from ssd.engine.batch import DRAFTING_AT, Batch
from ssd.engine.drafts import (
    AHEAD,
    CHAIN,
    TREE,
    ask_drafts,
    begin_drafts,
    count_promises,
    plan_ahead,
    take_ahead,
    take_drafts,
    warm_up_drafts,
)
from ssd.engine.metrics import BestEffort
from ssd.engine.pass_timing import timed_passes
from ssd.engine.sequence import Sequence
from ssd.engine.verify import Pass
from ssd.jit.code_cache import kernel_counts
from ssd.model.kv.tree import is_tree, leading_chain
from ssd.model.target import Target
from ssd.retrieval.cache_state import LearnedState

log = logging.getLogger(__name__)


_REPORTED_WIDTH = 16
"""Tokens of the pass whose cost is reported."""
_WITHHELD_STEPS = 200
"""Steps after which likely drafts that are withheld because of their cost are reported."""


class SpeculationStatus(NamedTuple):
    """Whether drafts are verified, and the reason in one sentence."""

    active: bool
    reason: str


def possible_shape(shape: DraftShape, target: Target) -> DraftShape:
    """The shape of drafts: what was asked for, or chains where the target verifies nothing else."""
    if target.can_verify_trees:
        return shape
    if shape == "tree":
        log.warning("driven %s, the model verifies chains only: drafts are chains", target.backend)
    return "chain"


def branches(shape: DraftShape, num_rows: int) -> bool:
    """Whether a pass of ``num_rows`` rows drafts trees. "auto" means: where one sequence runs alone.

    So it measured better on a CPU: a tree brings more accepted tokens to a row, but all rows are padded to the widest.
    """
    return shape == "tree" or (shape == "auto" and num_rows == 1)


def usable(draft: Draft, limit: int, *, allow_tree: bool) -> Draft | None:
    """The draft cut to ``limit`` tokens; None where it is no draft: parents that cannot be.

    Where trees cannot be verified, the chain that a tree begins with is given.
    """
    if draft.parents is not None:
        if not is_tree(draft.parents, len(draft.token_ids)):
            return None
        if not allow_tree:
            straight = leading_chain(draft.parents)
            draft = Draft(draft.token_ids, draft.match_length, draft.source, draft.probabilities).cut(straight)
    return draft.cut(min(limit, MAX_DRAFT))


def write_draft(draft: Draft, out: DraftRecord) -> None:
    """Write a draft of at most MAX_DRAFT tokens as a record."""
    size = out.size = len(draft.token_ids)
    out.match_length, out.source = draft.match_length, source_number(draft.source)
    out.is_tree, out.has_estimates = draft.parents is not None, draft.probabilities is not None
    out.tokens[:size] = draft.token_ids.tolist()
    if draft.parents is not None:
        out.parents[:size] = draft.parents.tolist()
    if draft.probabilities is not None:
        out.probabilities[:size] = draft.probabilities.tolist()


class Proposals:
    """Drafts for the rows of a pass, as many tokens as pay. Only speed depends on it, never a token.

    A drafter that fails proposes nothing, see `BestEffort`.
    """

    def __init__(self, target: Target, drafter: Drafter, draft: DraftConfig, best_effort: BestEffort) -> None:
        self._target = target
        self._drafter = drafter
        hybrid = drafter if isinstance(drafter, HybridDrafter) else None
        first = drafter if hybrid is None else hybrid.primary
        self._suffix = first if isinstance(first, SuffixDrafter) else None
        """Which drafts for all rows in one call; others may take long, ask others, learn from counts."""
        self._hybrid = None if self._suffix is None else hybrid
        """Which asks others beside it."""
        self._asked = FaultIsolatingDrafter(drafter)
        self._best_effort = best_effort
        self._limit = draft.num_speculative_tokens if target.can_roll_back and type(drafter) is not NoDrafter else 0
        self._shape = possible_shape(draft.draft_shape, target)
        self._observer = drafter if draft.recycling and self._limit and isinstance(drafter, ScoreObserver) else None
        self._cost_model = CostModel()
        self._calibration = AcceptanceCalibration()
        self._throttle = DraftBackoff()
        self._turn = 0
        self._scored: ScoredPass | None = None
        """What the last pass said, until it is learned from."""
        self._telling_s = 0.0
        self._is_asked = True
        self._compiling: Thread | None = None
        self._disabled = ""
        """Why nothing is ever drafted; empty if drafts are made."""
        if not target.can_roll_back:
            self._disabled = f"the model runs {target.backend}, which cannot undo rejected draft tokens"
        elif not self._limit:
            self._disabled = "disabled by num_speculative_tokens=0"
        self._is_withheld = False
        self._num_withholdings = 0

    @property
    def is_enabled(self) -> bool:
        """Whether drafts are ever made."""
        return not self._disabled

    @property
    def status(self) -> SpeculationStatus:
        """Whether drafts are verified now, and why or why not. May be asked from any thread."""
        if self._disabled:
            return SpeculationStatus(False, self._disabled)
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
        """Return the estimated time of a pass of ``width`` tokens of one row, in passes of one token; 0 if unknown."""
        return self._cost_model.relative_cost(width)

    @property
    def is_ready(self) -> bool:
        """Whether the drafter is asked and told: not before its kernels are compiled, where that is done aside."""
        if self._compiling is not None and not self._compiling.is_alive():
            self._compiling, self._is_asked = None, True
        return self._is_asked

    def wait(self) -> None:
        """Leave the drafter alone until ``warm_up``; one that runs a model of its own is not left alone."""
        self._is_asked = self._suffix is None

    @property
    def num_failures(self) -> int:
        """Times that a drafter or a cache failed; one that owns several survives the failure of one, and counts it."""
        own = self._best_effort.num_failures + self._asked.num_failures
        return own + int(getattr(self._drafter, "num_failures", 0))

    def warm_up(self, patience_s: float | None) -> None:
        """Compile what drafts; where ``wait`` was called, on a thread that is waited for so long."""

        def compile_kernels() -> None:
            self._best_effort(lambda: getattr(self._drafter, "warm_up", lambda: None)())
            warm_up_drafts()

        nobody = Batch(())
        begin_drafts(nobody.address, 0, 0, True)  # a part of every pass
        if self._is_asked:
            compile_kernels()
        else:
            self._compiling = Thread(target=compile_kernels, name="ssd-compile", daemon=True)
            self._compiling.start()
            self._compiling.join(patience_s)

    def publish(self) -> None:
        """Have the drafter publish what it learned about namespaces, to be kept with their text."""
        if self.is_ready:
            self._best_effort(lambda: getattr(self._drafter, "publish", lambda: None)())

    def calibrate(self) -> None:
        """Time passes of several sizes, on free slots."""
        if self._limit > 0:
            for (num_rows, width), seconds in timed_passes(self._target, self._limit + 1).items():
                self._cost_model.calibrate(num_rows * width, seconds, is_wide=width > 1)
            self._cost_model.begin()

    def spares_passes(self, is_quiet: bool) -> bool:
        """Whether a pass may begin before it is known if there is a draft for it. ``is_quiet`` : hardly one is found.

        Not where others learn from what each pass says.
        """
        return self._limit == 0 or (is_quiet and self._suffix is not None and self._hybrid is None)

    def take_back(self) -> None:
        """Of what was drafted last nothing is verified."""
        self._turn ^= 1

    def propose(self, batch: Batch) -> int:
        """Draft for the rows that are due; the turn of the pass that is to verify it, see `Row`.

        Where this fails nothing is drafted.
        """
        self._turn ^= 1
        limit = self._limit if self.is_ready else 0
        should_draft_all = self._throttle.should_draft_all(len(batch.sequences))
        begin_drafts(batch.address, self._turn, limit, should_draft_all)
        if limit and batch.sequences:
            self._draft(batch, limit)
        return self._turn

    def _draft(self, batch: Batch, limit: int) -> None:
        prices, shares, num_rows = self._cost_model.address, self._calibration.address, len(batch.sequences)
        shape = TREE if branches(self._shape, num_rows) else CHAIN
        own_price = 0.0 if self._suffix is None else self._suffix.default_token_cost
        started = time.perf_counter()
        num_asked = ask_drafts(batch.address, self._turn, prices, shares, limit, own_price, shape)
        if num_asked:
            self._ask(batch, num_asked)
        seconds = time.perf_counter() - started
        if num_asked or batch.frame.width > 1:
            vocab_size = self._target.vocab_size
            self._best_effort.num_failures += take_drafts(batch.address, self._turn, prices, shares, vocab_size)
        self._throttle.record_drafting(num_asked, seconds, skips_some=batch.frame.num_spared > 0)

    def prepare(self, under_way: Pass) -> None:
        """While a pass runs, draft on behind what it verifies, for rows whose last draft came true: where one text is
        said again, drafting is most of what a device waits for. Where the target chooses otherwise, nothing is lost."""
        batch, prices, shares = under_way.batch, self._cost_model.address, self._calibration.address
        if self._suffix is None or self._hybrid is not None or not self.is_ready or not self._limit:
            return
        plan_ahead(batch.address, under_way.turn, self._limit)
        price = self._suffix.default_token_cost
        num_asked = ask_drafts(batch.address, under_way.turn, prices, shares, self._limit, price, AHEAD)
        if num_asked:
            self._ask(batch, num_asked)
            num_wrong = take_ahead(batch.address, under_way.turn, self._target.vocab_size)
            self._best_effort.num_failures += num_wrong

    def _ask(self, batch: Batch, num_asked: int) -> None:
        """Have drafts written for the rows that ask; none where that fails."""
        suffix = self._suffix
        if suffix is None:
            drafts = self._best_effort(lambda: self._ask_objects(batch))
            is_done = drafts is not None
        else:
            is_done = self._best_effort(lambda: self._ask_rows(suffix, batch, num_asked)) is not None
        if not is_done:
            for b in np.flatnonzero(batch.wanted).tolist():
                batch.sequences[b].row.drafting.draft.size = 0

    def _ask_rows(self, suffix: SuffixDrafter, batch: Batch, num_asked: int) -> bool:
        for sequence in batch.coupled:
            sequence.note_context()
        if self._hybrid is not None:
            self._hybrid.start_step()
        groups = batch.groups(lambda sequence, learned: self._keep(suffix, sequence, learned))
        suffix.draft_groups(batch.asked[:num_asked], groups)
        if self._hybrid is not None and self._hybrid.is_due(num_asked):
            asked, requests = self._requests(batch)
            found = [draft_of(sequence.row.drafting.draft) for sequence in asked]
            drafts = self._hybrid.extend_drafts(requests, list(found))
            for sequence, own, draft in zip(asked, found, drafts, strict=True):
                if draft is not own:
                    write_draft(draft, sequence.row.drafting.draft)
        return True

    def _keep(self, suffix: SuffixDrafter, sequence: Sequence, learned: LearnedState | None) -> None:
        """Have the drafter keep of a sequence what it keeps, with the row."""
        if sequence.kept is None:
            request = self._request(sequence)
            sequence.kept = suffix.start_request(request, sequence.row.drafting, sequence.address + DRAFTING_AT)
        assert sequence.asking is not None
        sequence.asking.learned = sequence.kept.learned = learned

    def _ask_objects(self, batch: Batch) -> bool:
        """Ask a drafter of requests, and write what it says into the rows."""
        asked, requests = self._requests(batch)
        drafts = self._asked.propose(requests)
        if len(drafts) != len(asked):
            return False
        for sequence, request, draft in zip(asked, requests, drafts, strict=True):
            found = usable(draft, request.limit, allow_tree=request.allow_tree)
            self._best_effort.num_failures += found is None
            write_draft(EMPTY_DRAFT if found is None else found, sequence.row.drafting.draft)
        return True

    def _requests(self, batch: Batch) -> tuple[list[Sequence], list[DraftRequest]]:
        """The sequences whose drafts are wanted, and what is asked for them, as their rows say it."""
        asked = [batch.sequences[b] for b in np.flatnonzero(batch.wanted).tolist()]
        is_priced = self._cost_model.pass_time is not None
        requests = [self._request(sequence) for sequence in asked]
        for sequence, request in zip(asked, requests, strict=True):
            params = sequence.row.drafting.params
            cache = None if sequence.namespace is None else sequence.namespace.cache
            if cache is not None:
                request.snapshot, request.learned = cache.snapshot(), cache.learned
            request.limit, request.allow_tree = params.limit, bool(params.is_tree)
            request.token_costs = np.array([params.token_cost]) if is_priced else None
        return asked, requests

    def observe_scores(self, ended: Pass) -> None:
        """Tell the drafter all that a pass said, before any of its tokens is taken; not where that costs too much.

        It learns from that in `observe_pass`.
        """
        self._scored = None
        observer = self._observer
        if observer is None or not self.is_ready or not self._throttle.should_observe(has_drafts=ended.width > 1):
            return
        started = time.perf_counter()
        self._scored = self._best_effort(ended.scored)
        if (scored := self._scored) is not None:
            self._best_effort(lambda: observer.observe_scores(scored))
        self._telling_s = time.perf_counter() - started

    def observe(self, ended: Pass) -> None:
        """Tell the drafter of the drafts of all rows that took all tokens that were said.

        Not one that sees in the next context what came of its drafts: it is told of a request's last one alone.
        """
        if self._limit and (self._suffix is None or self._hybrid is not None):
            for b in np.flatnonzero(ended.batch.taken > 0).tolist():
                self.observe_one(ended, b, int(ended.sizes[b]) - 1)

    def observe_one(self, ended: Pass, b: int, num_accepted: int) -> None:
        """Tell the drafter of one row's draft, of which ``num_accepted`` tokens were emitted."""
        sequence = ended.batch.sequences[b]
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
        draft = ended.draft(b)
        if draft.path is not None:
            draft.path = draft.path[:num_accepted]
        if row.prepared_at:  # the drafter speaks of the draft that it made last
            draft = draft_of(row.prepared).cut(row.prepared_begin - 1)
            num_accepted = min(row.prepared_verified + num_accepted, len(draft.token_ids))
        elif row.used_begin:
            return
        try:
            drafter.observe(request_id, draft, num_accepted)
        except BaseException as error:
            self._best_effort.note(error)
        if drafter is self._hybrid and sequence.kept is not None and sequence.finish_reason is None:
            sequence.kept.verified = None  # it sees in the next context what came of it

    def count(self, ended: Pass) -> None:
        """Learn how far what drafts promise comes true."""
        if self._limit and self.is_ready:
            shares = self._calibration.address
            count_promises(ended.batch.address, ended.turn, shares, ended.sizes, ended.paths)

    def observe_pass(self, ended: Pass, num_tokens: int) -> None:
        """Learn from a pass that put out ``num_tokens``: what it took, and what the target said.

        Telling the drafter of drafts is a part of what they cost, but for what a device does not wait for.
        """
        if not self._limit:
            return
        observer, scored, seconds = self._observer, self._scored, ended.seconds
        if observer is not None and scored is not None:
            self._scored = None
            started = time.perf_counter()
            self._best_effort(lambda: observer.learn_scores(scored))
            learning_s = time.perf_counter() - started
            self._throttle.record_observing(self._telling_s + learning_s)
            if ended.width > 1:
                seconds += self._telling_s + (0.0 if self._target.is_asynchronous else learning_s)
        self._observe_pass(len(ended.sizes), ended.width, num_tokens, seconds)

    def _observe_pass(self, num_rows: int, width: int, num_tokens: int, seconds: float) -> None:
        self._throttle.observe_pass(seconds)
        self._cost_model.observe(num_rows * width, num_tokens, seconds, is_wide=width > 1)
        is_withheld = self._cost_model.num_withheld >= _WITHHELD_STEPS
        if is_withheld and not self._is_withheld:
            self._num_withholdings += 1
            if self._num_withholdings.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time
                log.warning("likely drafts have been withheld for %d steps (%s)", _WITHHELD_STEPS, self.status.reason)
        self._is_withheld = is_withheld

    def forget(self, sequence: Sequence) -> None:
        """Forget a request: nothing of it will be asked for, or all of it anew."""
        if self._scored is not None and sequence.namespace is None:  # its own is not learned any more
            is_its = [name == sequence.request.request_id for name in self._scored.request_ids]
            self._scored.num_positions[is_its] = 0
        sequence.note_context()
        self._asked.forget(sequence.request.request_id)
        if self.is_ready:
            self._best_effort(lambda: self._drafter.finish(sequence.request.request_id))
        sequence.forget_drafts()

    def _request(self, sequence: Sequence) -> DraftRequest:
        """What is asked for a sequence now, but for limit, prices and shape; the same object at every step."""
        sequence.note_context()
        request = sequence.asking
        if request is None:
            request = sequence.asking = DraftRequest(
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
