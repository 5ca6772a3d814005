"""The two ways to call a drafter for a batch: with records that kernels read, or with a list of `DraftRequest`."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ssd.cost_model.cost_model import CostModel
from ssd.drafting.draft_batch import DraftBatch
from ssd.drafting.draft_records import MAX_DRAFT, DraftRecord, source_number
from ssd.drafting.hybrid_drafter import HybridDrafter
from ssd.drafting.member_drafter import FaultIsolatingDrafter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftOutcome, DraftRequest, ScoredPass
from ssd.drafting.suffix_drafter import NamespaceGroup, SuffixDrafter, draft_of
from ssd.engine.batch import DRAFT_ROW_OFFSET, Batch
from ssd.engine.forward_pass import CommittedPass
from ssd.engine.sequence import Sequence
from ssd.model.kv.tree import is_tree, leading_chain
from ssd.retrieval.cache_state import LearnedState


class DrafterBackend(Protocol):
    """The interface through which the engine calls a drafter. Every method may raise the drafter's exceptions.

    Attributes:
        default_token_cost: The assumed cost of verifying one more draft token, in expected accepted tokens. It is used
            until the cost is measured.
        needs_kernels: Whether kernels must be compiled before the first draft.
        needs_outcomes: Whether the drafter must see the output of each forward pass before it makes the next draft.
    """

    default_token_cost: float
    needs_kernels: bool
    needs_outcomes: bool

    @property
    def num_failures(self) -> int:
        """The number of drafts that failed or were invalid. Exceptions raised by the methods are not counted."""
        ...

    def write_settings(self, settings: DraftBatch) -> None:
        """Write the settings and the scratch memory with which the kernel `make_drafts` searches."""
        ...

    def start_step(self) -> None:
        """Report that a step begins, also one in which no sequence gets a new draft."""
        ...

    def prepare(self, batch: Batch, num_rows: int) -> list[NamespaceGroup] | None:
        """Prepare to draft for ``num_rows`` sequences, those marked in ``batch.needs_draft``.

        Returns the groups whose caches the kernel `make_drafts` searches; the caller must keep them alive until the
        kernel returns. None if that kernel cannot make these drafts, so that `draft` must make them.
        """
        ...

    def draft(self, batch: Batch) -> None:
        """Make a draft for each sequence in ``batch.draft_rows``, and write it to the row's ``draft_row.draft``."""
        ...

    def observe(self, committed: CommittedPass, scored: ScoredPass | None) -> None:
        """Report the outcome of a forward pass to the drafter, see `Drafter.observe`."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Drop the drafter's state of a sequence that has ended or was preempted."""
        ...


def make_backend(drafter: Drafter, cost_model: CostModel) -> DrafterBackend:
    """Return a `KernelBackend` for the suffix drafter, alone or first in a hybrid drafter, else a `RequestBackend`."""
    hybrid = drafter if isinstance(drafter, HybridDrafter) else None
    first = drafter if hybrid is None else hybrid.primary
    if isinstance(first, SuffixDrafter):
        return KernelBackend(first, hybrid, cost_model)
    return RequestBackend(drafter, cost_model)


class KernelBackend:
    """Calls the suffix drafter, which drafts for all sequences of a batch in one kernel call.

    In a hybrid drafter, the other drafters (a draft model or head) then add tokens if the expected gain exceeds the
    cost.
    """

    needs_kernels = True

    def __init__(self, suffix: SuffixDrafter, hybrid: HybridDrafter | None, cost_model: CostModel) -> None:
        self._suffix, self._hybrid, self._cost_model = suffix, hybrid, cost_model
        self._drafter = suffix if hybrid is None else hybrid
        # Whether a subclass drafts in another way, which the kernel `make_drafts` does not know.
        self._is_overridden = type(suffix).draft_groups is not SuffixDrafter.draft_groups
        self.default_token_cost = suffix.default_token_cost
        self.needs_outcomes = hybrid is not None

    @property
    def num_failures(self) -> int:
        return 0 if self._hybrid is None else self._hybrid.num_failures

    def write_settings(self, settings: DraftBatch) -> None:
        self._suffix.write_settings(settings)

    def start_step(self) -> None:
        if self._hybrid is not None:
            self._hybrid.start_step()

    def prepare(self, batch: Batch, num_rows: int) -> list[NamespaceGroup] | None:
        for sequence in batch.coupled:
            sequence.advance_noise()
        if self._is_overridden or (self._hybrid is not None and self._hybrid.is_due(num_rows)):
            return None
        groups = batch.namespace_groups(self._start_request)
        self._suffix.set_groups(groups)
        return groups

    def draft(self, batch: Batch) -> None:
        draft_rows = batch.draft_rows[: batch.record.num_draft_rows]
        self._suffix.draft_groups(draft_rows, batch.namespace_groups(self._start_request))
        if self._hybrid is not None:
            sequences, requests = _draft_requests(batch, self._cost_model)
            found = [draft_of(sequence.row.draft_row.draft) for sequence in sequences]
            drafts = self._hybrid.extend_drafts(requests, list(found))
            for sequence, own, draft in zip(sequences, found, drafts, strict=True):
                if draft is not own:
                    write_draft(draft, sequence.row.draft_row.draft)

    def _start_request(self, sequence: Sequence, learned: LearnedState | None) -> None:
        if sequence.request_state is None:
            sequence.request_state = self._suffix.start_request(
                _draft_request(sequence), sequence.row.draft_row, sequence.address + DRAFT_ROW_OFFSET
            )
        assert sequence.draft_request is not None
        sequence.draft_request.learned = sequence.request_state.learned = learned

    def observe(self, committed: CommittedPass, scored: ScoredPass | None) -> None:
        """Report the outcome of a forward pass to the drafter.

        A hybrid drafter gets the outcome of every sequence if it considered drafters other than the suffix drafter in
        this step. Otherwise only the outcomes of sequences that ended are needed.
        """
        needs_all = self._hybrid is not None and self._hybrid.awaits_outcomes
        rows = committed.rows() if needs_all else committed.ended
        outcomes = [outcome for b in rows if (outcome := self._outcome(committed, b)) is not None]
        if self._hybrid is not None and not needs_all:
            reported = sum(outcome.num_accepted + 1 for outcome in outcomes)
            self._hybrid.count_tokens(sum(committed.forward_pass.sizes.tolist()) - reported)
        if outcomes or scored is not None:
            self._drafter.observe(outcomes, scored)

    def _outcome(self, committed: CommittedPass, b: int) -> DraftOutcome | None:
        outcome, row = committed.outcome(b), committed.forward_pass.batch.sequences[b].row
        if row.prepared_length:  # the drafter expects the outcome of the draft that it made last
            draft = draft_of(row.prepared).cut(row.prepared_begin - 1)
            num_accepted = min(row.prepared_offset + outcome.num_accepted, len(draft.token_ids))
            return DraftOutcome(outcome.request_id, draft, num_accepted, has_ended=outcome.has_ended)
        return None if row.used_offset else outcome

    def finish(self, sequence: Sequence) -> None:
        self._drafter.finish(sequence.request.request_id)


class RequestBackend:
    """Calls a drafter that is written in Python: it gets a list of `DraftRequest` and returns a list of `Draft`."""

    default_token_cost = 0.0
    needs_kernels = False
    needs_outcomes = True

    def __init__(self, drafter: Drafter, cost_model: CostModel) -> None:
        self._drafter, self._isolated, self._cost_model = drafter, FaultIsolatingDrafter(drafter), cost_model
        self._num_invalid = 0

    @property
    def num_failures(self) -> int:
        own = self._num_invalid + self._isolated.num_failures
        return own + int(getattr(self._drafter, "num_failures", 0))

    def write_settings(self, settings: DraftBatch) -> None:
        pass

    def start_step(self) -> None:
        pass

    def prepare(self, batch: Batch, num_rows: int) -> list[NamespaceGroup] | None:
        return None

    def draft(self, batch: Batch) -> None:
        sequences, requests = _draft_requests(batch, self._cost_model)
        for sequence, request, draft in zip(sequences, requests, self._isolated.propose(requests), strict=True):
            found = validate_draft(draft, request.limit, allow_tree=request.allow_tree)
            self._num_invalid += found is None
            write_draft(EMPTY_DRAFT if found is None else found, sequence.row.draft_row.draft)

    def observe(self, committed: CommittedPass, scored: ScoredPass | None) -> None:
        self._drafter.observe([committed.outcome(b) for b in committed.rows()], scored)

    def finish(self, sequence: Sequence) -> None:
        self._isolated.finish(sequence.request.request_id)


def _draft_requests(batch: Batch, cost_model: CostModel) -> tuple[list[Sequence], list[DraftRequest]]:
    """Return the sequences that need a draft, with a `DraftRequest` for each."""
    sequences = [batch.sequences[b] for b in np.flatnonzero(batch.needs_draft).tolist()]
    requests, has_costs = [_draft_request(sequence) for sequence in sequences], cost_model.pass_time is not None
    for sequence, request in zip(sequences, requests, strict=True):
        params = sequence.row.draft_row.params
        cache = None if sequence.namespace is None else sequence.namespace.cache
        if cache is not None:
            request.snapshot, request.learned = cache.snapshot(), cache.learned
        request.limit, request.allow_tree = params.limit, bool(params.is_tree)
        request.token_costs = np.array([params.token_cost]) if has_costs else None
    return sequences, requests


def _draft_request(sequence: Sequence) -> DraftRequest:
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


def validate_draft(draft: Draft, limit: int, *, allow_tree: bool) -> Draft | None:
    """Return a draft cut to ``limit`` tokens, or None if its parents do not form a valid tree.

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
