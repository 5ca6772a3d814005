"""The default drafter: find earlier occurrences of the last tokens, and draft the tokens that followed them.

It searches the context itself and the retrieval cache. Other drafters' proposals, token recycling and lookahead tokens
are further candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.drafting.acceptance_model import AcceptanceModel, NamespaceModels
from ssd.drafting.draft_batch import DraftBatch, draft_batch
from ssd.drafting.draft_kernel import finish_row, reset_row_at, save_all_lookahead
from ssd.drafting.draft_records import MAX_DRAFT, DraftParams, DraftRow, row_at, source_name
from ssd.drafting.draft_scratch import DraftScratch
from ssd.drafting.protocol import (
    EMPTY_DRAFT,
    MAX_PROPOSED_TOKENS,
    Draft,
    DraftOutcome,
    DraftRequest,
    ExternalProposals,
    ScoredPass,
    TokenIds,
)
from ssd.drafting.sample_cache import NamespaceSampleCaches
from ssd.drafting.sample_cache import warm_up as warm_up_sample_cache
from ssd.drafting.token_recycling import NamespaceRecyclingTables
from ssd.errors import ConfigError
from ssd.jit.addresses import Int64s, Records, address, kernel
from ssd.jit.code_cache import CHECKED, register_memory
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import SegmentTable, Snapshot
from ssd.retrieval.suffix_array_search import MAX_MATCH_LENGTH, PATTERNS_BYTES, RangeExpander, SegmentSearch, as_context

_MAX_REQUESTS: Final = 4096  # the state of all requests is dropped if there are more
_MAX_SPARE: Final = 64

_LOW_TEMPERATURE: Final = 0.5
"""The sampling temperature up to which the target usually samples its most probable token."""

_INT32: Final = np.dtype(np.int32)
NO_SNAPSHOT = Snapshot(0, SegmentTable(()), np.zeros(1, np.int32), 0, 0)


class Workspace:
    """The settings and scratch memory of one drafter for its kernels, in a `DraftBatch` record; the memory only grows.

    ``batch`` is the record, and ``address`` its address for numba kernels. Its vocabulary size is unlimited and no
    token ends a draft, so that kernels do not change a draft because of its tokens.
    """

    def __init__(self, max_match_length: int, min_match_length: int) -> None:
        """Allocate the memory. Raises ConfigError if ``max_match_length`` is not within 1..256."""
        if not 1 <= max_match_length <= MAX_MATCH_LENGTH:
            raise ConfigError(f"max_match_length must be within 1..{MAX_MATCH_LENGTH}, got {max_match_length}")
        self._memory, self._batches = Records(DraftScratch), Records(DraftBatch)
        self.batch, self.address = self._batches[0], self._batches.address
        self.batch.scratch, self.batch.vocab_size = self._memory.address, 1 << 32
        self.batch.max_match_length, self.batch.min_match_length = max_match_length, max(1, min_match_length)
        self._patterns = np.zeros(PATTERNS_BYTES, np.uint8)
        self._memory[0].lookups.patterns = address(self._patterns)
        self._allocate_searches(32)

    def reserve(self, snapshot: Snapshot) -> None:
        """Grow the scratch memory if the snapshot has more segments than any before."""
        if len(snapshot.segments) > len(self._searches):
            self._allocate_searches(2 * len(snapshot.segments))

    def _allocate_searches(self, count: int) -> None:
        self._searches, self._expanders = Records(SegmentSearch, count), Records(RangeExpander, 2 * count)
        lookups = self._memory[0].lookups
        lookups.searches, lookups.expanders = self._searches.address, self._expanders.address


class RequestState:
    """The drafter's state of one request, from its first draft to its end.

    Attributes:
        record: The `DraftRow`, which numba kernels read and write; in the caller's memory if a record is given.
        references: The arrays that the record points to, which must be kept alive.
        learned: The learned models of the request's namespace.
        verified: The outcome of the last draft: the number of verified tokens, and the number of accepted ones or, for
            a tree, their indices. None if the outcome is unknown.
    """

    __slots__ = ("address", "learned", "owns_memory", "record", "references", "verified")

    def __init__(self, record: DraftRow | None = None, at: int = 0) -> None:
        self.references: object = None
        self.owns_memory = record is None
        if record is None:
            self.references = memory = Records(DraftRow)
            record, at = memory[0], memory.address
        self.record, self.address = record, at
        self.learned: LearnedState | None = None
        self.verified: tuple[int, int | TokenIds] | None = None


def draft_of(record: Any) -> Draft:
    """Convert a `DraftRecord`, which numba kernels write, to a `Draft`."""
    size = record.size
    if size == 0:
        return EMPTY_DRAFT
    parents = np.frombuffer(record.parents, np.int32, size).copy() if record.is_tree else None
    probabilities = np.frombuffer(record.probabilities, np.float64, size).copy() if record.has_estimates else None
    tokens = np.frombuffer(record.tokens, np.int32, size).copy()
    return Draft(tokens, record.match_length, source_name(record.source), probabilities, parents)


class NamespaceGroup(NamedTuple):
    """The requests of one namespace, for which drafts are made from one snapshot of the namespace's retrieval cache.

    ``rows`` are the addresses of their `DraftRow` records. The requests in ``with_own_tables`` share Gumbel noise or
    have no namespace, so the token-recycling table and the sample cache are chosen for each of them separately.
    """

    snapshot: Snapshot | None
    learned: LearnedState | None
    rows: Int64s
    with_own_tables: Sequence[tuple[DraftRequest, DraftRow]]


@kernel
def _set_group(rows: Int64s, snapshot: int, model: int, recycling_table: int) -> None:
    for i in range(len(rows)):
        params = row_at(rows[i]).params
        params.snapshot, params.model, params.recycling_table = snapshot, model, recycling_table


def _temperature_bucket(temperature: float) -> int:
    return 0 if temperature <= 0.0 else (1 if temperature <= _LOW_TEMPERATURE else 2)


def as_kernel_array(context: TokenIds) -> TokenIds:
    """Return token ids in the form that numba kernels read: the same array, or a contiguous, writable int32 copy.

    Ids that int32 cannot represent become -1, which is not a token id.
    """
    if context.dtype is not _INT32 or not context.flags.carray:
        context = as_context(context)
        context = context if context.flags.writeable else context.copy()
    if CHECKED:
        register_memory(context)
    return context


class SuffixDrafter:
    """Drafts the most probable continuation of a text, as long as the expected gain exceeds the cost.

    The last tokens of the context are looked up in the context itself, in the cache's recent text and in its segments,
    at up to ``max_match_length`` tokens and at a few shorter lengths. The tokens that follow the matches are
    candidates, and the acceptance model estimates each candidate's acceptance probability. The most probable candidate
    is added to the draft, and the next candidates come from the matches that agree with it. The draft ends when the
    probability that all of it is accepted falls below the cost of one more token. This length of the draft maximizes
    the expected accepted tokens minus the cost. A tree is grown in the same way, best first, from all candidates.

    Further candidates are the client's predicted output, the tokens that other drafters propose, the target's earlier
    top-k tokens (token recycling), tokens that the target sampled after a rejected token (lookahead), and tokens
    sampled before with the same Gumbel noise. If all matches have ended, the end of the draft is looked up again.

    The acceptance model belongs to the namespace. It learns from every candidate whose outcome is known, drafted or
    not. The drafter is deterministic given its calls, and only one thread may use it. At most 112 matches are read per
    request.
    """

    learns_from_context: ClassVar[bool] = True
    """True: this drafter sees from the next context which draft tokens were accepted.

    The engine therefore needs to report only the outcome of a request's last draft.
    """

    def __init__(
        self,
        *,
        max_match_length: int = 32,
        min_match_length: int = 1,
        default_token_cost: float = 0.1,
        recycling: bool = True,
        retrieval: bool = True,
        use_sample_cache: bool = True,
    ) -> None:
        """Create a drafter.

        Args:
            max_match_length: The maximum match length in tokens.
            min_match_length: The minimum match length in tokens.
            default_token_cost: The cost of a draft token in expected accepted tokens, if a request names none.
            recycling: Whether to draft the target's earlier top-k tokens.
            retrieval: Whether to look up the context, the cache and predictions. If False, external proposals are still
                scored.
            use_sample_cache: Whether to cache the tokens sampled with shared noise.

        Raises:
            ConfigError: If ``max_match_length`` is not within 1..256.
        """
        self._workspace = Workspace(max_match_length, min_match_length)
        self.default_token_cost = default_token_cost
        self._models = NamespaceModels()
        self._uses_retrieval = retrieval
        self._recycling = NamespaceRecyclingTables() if recycling else None
        self._sample_caches = NamespaceSampleCaches() if use_sample_cache else None
        self._rows: dict[str, RequestState] = {}
        self._spare: list[RequestState] = []  # of ended requests, for reuse: new memory takes longer than a draft

    def model_of(self, learned: LearnedState | None) -> AcceptanceModel:
        """Return the acceptance model of a namespace; all requests without a namespace share one model."""
        return self._models.get(learned)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Learn from the outcome of each request's last draft, and return one new draft for each request, in order."""
        if self._sample_caches is not None:
            self._sample_caches.begin_pass()
        references, addresses, records = list[object](), list[int](), list[DraftRow]()
        for request in requests:
            row = self._rows.get(request.request_id) or self.start_request(request)
            references.append(self._write_params(row.record, request))
            row.learned = request.learned
            addresses.append(row.address)
            records.append(row.record)
        draft_batch(self._workspace.address, np.array(addresses, np.int64))
        for record in records:  # their arrays die with ``references``, and `draft_groups` does not write them
            record.params.num_proposed = record.params.num_token_costs = 0
        del references
        return [draft_of(record.draft) for record in records]

    def start_request(self, request: DraftRequest, record: DraftRow | None = None, at: int = 0) -> RequestState:
        """Allocate the drafter's state of a request, before its first draft.

        If ``record`` is given, it is the caller's memory for the state, at address ``at``; the request's constant
        parameters are written to it.
        """
        if len(self._rows) >= _MAX_REQUESTS:
            self._rows.clear()
        row = RequestState(record, at) if record is not None or not self._spare else self._spare.pop()
        self._rows[request.request_id] = row
        reset_row_at(row.address, request.prompt_length)
        if record is not None:
            row.references = self._write_constant_params(record.params, request)
        return row

    def draft_groups(self, rows: Int64s, groups: Iterable[NamespaceGroup]) -> None:
        """Draft for several namespaces at once, for requests that were passed to ``start_request``.

        ``rows`` are the addresses of the requests' `DraftRow` records, whose ``params`` must hold the limit and the
        token cost. ``groups`` must contain these rows, and may contain other rows.
        """
        self.set_groups(groups)
        draft_batch(self._workspace.address, rows)

    def write_settings(self, settings: DraftBatch) -> None:
        """Copy this drafter's scratch memory and match lengths to an engine's settings, so that kernels can draft."""
        own = self._workspace.batch
        settings.scratch = own.scratch
        settings.max_match_length, settings.min_match_length = own.max_match_length, own.min_match_length

    def set_groups(self, groups: Iterable[NamespaceGroup]) -> None:
        """Set the cache and the tables that each request's row drafts from. Call this before `draft_batch`.

        ``groups`` are those of `draft_groups`. The caller must keep them alive until `draft_batch` has returned: rows
        get the addresses of their snapshots, and other threads replace a cache's snapshot at any time.
        """
        if self._sample_caches is not None:
            self._sample_caches.begin_pass()
        for group in groups:
            self._write_group(group)

    def _write_group(self, group: NamespaceGroup) -> None:
        snapshot, learned = group.snapshot or NO_SNAPSHOT, group.learned
        self._workspace.reserve(snapshot)
        recycling_table = (
            0 if self._recycling is None or learned is None else self._recycling.table_address(learned, "")
        )
        _set_group(group.rows, snapshot.address, self._models.get(learned).address, recycling_table)
        for request, row in group.with_own_tables:
            row.params.recycling_table = self._recycling_table_of(request)
            row.params.sample_cache = self._sample_cache_of(request)

    def _write_params(self, row: DraftRow, request: DraftRequest) -> object:
        params, context, token_costs = row.params, as_kernel_array(request.context), request.token_costs
        snapshot = request.snapshot or NO_SNAPSHOT
        self._workspace.reserve(snapshot)
        params.snapshot, params.model = snapshot.address, self._models.get(request.learned).address
        params.context, params.context_length = address(context), len(context)
        params.limit, params.is_tree = max(0, min(request.limit, MAX_DRAFT)), request.allow_tree
        held = self._write_constant_params(params, request)
        params.recycling_table, params.sample_cache = self._recycling_table_of(request), self._sample_cache_of(request)
        if token_costs is None or not len(token_costs):
            params.token_cost = self.default_token_cost
        elif len(token_costs) == 1:
            params.token_cost = token_costs[0]
        else:
            token_costs = np.ascontiguousarray(token_costs, np.float64)
            params.token_costs, params.num_token_costs = address(token_costs), len(token_costs)
        if request.proposals is not None:
            held += _write_proposals(params, request.proposals)
        return context, snapshot, token_costs, held

    def _write_constant_params(self, params: DraftParams, request: DraftRequest) -> tuple[object, ...]:
        """Write the draft parameters that stay the same in all steps of a request.

        Returns the arrays that the caller must keep alive, because the parameters contain their addresses.
        """
        params.num_token_costs = params.prediction_length = params.num_proposed = 0
        params.recycling_table = params.sample_cache = 0
        params.prompt_length, params.allow_caching = request.prompt_length, request.allow_caching
        params.no_lookup = not self._uses_retrieval
        params.temperature_bucket, params.temperature, params.noise = 0, 0.0, 0
        sampling, prediction = request.sampling, request.prediction
        if sampling is not None:
            temperature, noise = sampling.params.temperature, sampling.noise
            params.temperature_bucket = _temperature_bucket(temperature)
            if not sampling.params.greedy and (not noise.is_coupled or noise.num_counted == len(request.context)):
                params.temperature, params.noise = temperature, noise.address
        if prediction is not None and self._uses_retrieval:
            prediction = as_kernel_array(prediction)
            params.prediction, params.prediction_length = address(prediction), len(prediction)
        return sampling, prediction

    def _recycling_table_of(self, request: DraftRequest) -> int:
        return 0 if self._recycling is None else self._recycling.table_address(request.learned, request.request_id)

    def _sample_cache_of(self, request: DraftRequest) -> int:
        return 0 if self._sample_caches is None else self._sample_caches.table_address(request)

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        """Save the outcome of drafts, and the tokens that the target sampled after rejected draft tokens (lookahead).

        The saved outcome is needed only if the request has ended, because then `finish` trains the acceptance model
        with it. Otherwise the acceptance model learns in the next step, from the new tokens in the context.
        """
        if scored is not None and self._recycling is not None:
            rows = [self._rows.get(request_id) for request_id in scored.request_ids]
            save_all_lookahead(
                np.array([0 if row is None else row.address for row in rows], np.int64),
                scored.last_accepted,
                scored.input_ids,
                scored.num_positions,
                scored.input_ids if scored.parents is None else scored.parents,
                scored.parents is not None,
                scored.sampled_ids,
            )
        for outcome in outcomes:
            row, draft = self._rows.get(outcome.request_id), outcome.draft
            if draft is EMPTY_DRAFT or row is None:  # nothing was drafted in this step
                continue
            if draft.parents is None or outcome.num_accepted == 0:
                row.verified = len(draft.token_ids), outcome.num_accepted
            elif draft.path is None:  # a tree, and the accepted tokens are not known
                row.verified = None
            else:
                row.verified = len(draft.token_ids), as_kernel_array(draft.path)

    def learn_scores(self, scored: ScoredPass) -> None:
        """Store the target's top-k tokens at every position of a forward pass, for token recycling."""
        if self._recycling is not None:
            self._recycling.learn(scored)

    def finish(self, request_id: str) -> None:
        """Update the acceptance model from the last draft of a request that has ended, and drop the request's state."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            if row.verified is not None:
                size, right = row.verified
                path = np.arange(right, dtype=np.int32) if isinstance(right, int) else right
                finish_row(row.address, size, path, self._models.get(row.learned).address)
            self._models.ended(row.learned)
            if row.owns_memory and len(self._spare) < _MAX_SPARE:
                row.learned = row.verified = None
                self._spare.append(row)
        if self._recycling is not None:
            self._recycling.ended(request_id)
        if self._sample_caches is not None:
            self._sample_caches.ended(request_id)

    def publish(self) -> None:
        """Publish copies of all acceptance models, for other threads and the next process."""
        self._models.publish()

    def warm_up(self) -> None:
        request = DraftRequest("", np.zeros(2, np.int32), 2, None, 1)
        draft = self.propose([request])[0]
        _set_group(np.zeros(0, np.int64), 0, 0, 0)
        if self._sample_caches is not None:
            warm_up_sample_cache()
        self.observe([DraftOutcome("", draft, 0)])
        self.finish("")


def _write_proposals(params: DraftParams, proposals: ExternalProposals) -> tuple[npt.NDArray[Any], ...]:
    tokens, parents, kinds = (
        as_kernel_array(each[:MAX_PROPOSED_TOKENS])
        for each in (proposals.token_ids, proposals.parents, proposals.kinds)
    )
    probabilities = np.ascontiguousarray(proposals.probabilities[:MAX_PROPOSED_TOKENS], np.float64)
    assert len(tokens) == len(parents) == len(kinds) == len(probabilities)
    params.num_proposed = len(tokens)
    params.proposed_tokens, params.proposed_parents = address(tokens), address(parents)
    params.proposed_probabilities, params.proposed_kinds = address(probabilities), address(kinds)
    return tokens, parents, probabilities, kinds
