"""The default drafter: own text, index and prediction together, each token with an estimated chance of acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, Records, address, kernel
from ssd.compiled.machine_code import CHECKED, name_memory
from ssd.drafting.acceptance_model import AcceptanceModel, NamespaceModels
from ssd.drafting.draft_kernel import (
    DraftRow,
    DraftScratch,
    draft_batch,
    finish_row,
    reset_row_at,
    row_at,
    save_all_lookahead,
)
from ssd.drafting.draft_records import MAX_DRAFT, DraftParams, source_name
from ssd.drafting.grow import MAX_FURTHER_LOOKUPS
from ssd.drafting.lookup import MatchSamples
from ssd.drafting.protocol import (
    EMPTY_DRAFT,
    MAX_PROPOSED_TOKENS,
    Draft,
    DraftRequest,
    ExternalProposals,
    ScoredPass,
    TokenIds,
)
from ssd.drafting.sample_cache import NamespaceSampleCaches
from ssd.drafting.sample_cache import warm_up as warm_up_sample_cache
from ssd.drafting.token_recycling import NamespaceRecyclingTables
from ssd.errors import ConfigError
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.lanes import MAX_MATCH_LENGTH, PATTERNS_BYTES, Lane, Walker, as_context
from ssd.retrieval.snapshot import SegmentTable, Snapshot

_MOST_KEPT: Final = 4096  # requests remembered; when there are more, all begin anew
_MOST_SPARE: Final = 64

_COOL: Final = 0.5
"""Temperature up to which the target mostly chooses what it holds most probable."""

_INT32: Final = np.dtype(np.int32)
NO_SNAPSHOT = Snapshot(0, SegmentTable(()), np.zeros(1, np.int32), 0, 0)


class Workspace:
    """Scratch memory of one drafter; grows, never shrinks. ``address`` : of its ``DraftScratch``."""

    def __init__(self) -> None:
        self._memory = Records(DraftScratch)
        self._scratch, self.address = self._memory[0], self._memory.address
        self._patterns, self._samples = (
            np.zeros(PATTERNS_BYTES, np.uint8),
            Records(MatchSamples, 1 + MAX_FURTHER_LOOKUPS),
        )
        self._scratch.lookups.patterns = address(self._patterns)
        self._scratch.samples_of_lookups = self._samples.address
        self._make_lanes(32)

    def room_for(self, snapshot: Snapshot) -> None:
        """Grow, if that has more segments than any before."""
        if len(snapshot.segments) > len(self._lanes):
            self._make_lanes(2 * len(snapshot.segments))

    def _make_lanes(self, count: int) -> None:
        self._lanes, self._walkers = Records(Lane, count), Records(Walker, 2 * count)
        lookups = self._scratch.lookups
        lookups.num_lanes, lookups.lanes, lookups.walkers = count, self._lanes.address, self._walkers.address


class KeptRow:
    """The `DraftRow` of a request, at ``address`` from its first draft to its end, and what goes with it.

    ``learned`` : of its namespace. ``verified`` : of its last draft so many tokens, and which were right: so many of
    the first, or these.
    """

    __slots__ = ("address", "held", "is_own", "learned", "row", "verified")

    def __init__(self, row: DraftRow | None = None, at: int = 0) -> None:
        """``row``, ``at`` : memory of the caller's for it, and where that lies; None takes memory of its own."""
        self.held: object = None
        self.is_own = row is None
        if row is None:
            self.held = memory = Records(DraftRow)
            row, at = memory[0], memory.address
        self.row, self.address = row, at
        self.learned: LearnedState | None = None
        self.verified: tuple[int, int | TokenIds] | None = None


def draft_of(record: Any) -> Draft:
    """A `DraftRecord` as an object."""
    size = record.size
    if size == 0:
        return EMPTY_DRAFT
    parents = np.frombuffer(record.parents, np.int32, size).copy() if record.is_tree else None
    chances = np.frombuffer(record.probabilities, np.float64, size).copy() if record.has_estimates else None
    tokens = np.frombuffer(record.tokens, np.int32, size).copy()
    return Draft(tokens, record.match_length, source_name(record.source), chances, parents)


class Group(NamedTuple):
    """Requests of one namespace, which are drafted for from one snapshot.

    ``rows`` : addresses of their `DraftRow`. ``own`` : of them those that have a table of their own to be looked up:
    that draw with coupled noise, or have no namespace.
    """

    snapshot: Snapshot | None
    learned: LearnedState | None
    rows: Int64s
    own: Sequence[tuple[DraftRequest, DraftRow]]


@kernel
def _look_in(rows: Int64s, snapshot: int, model: int, recycling_table: int) -> None:
    for i in range(len(rows)):
        params = row_at(rows[i]).params
        params.snapshot, params.model, params.recycling_table = snapshot, model, recycling_table


def _temperature_bucket(temperature: float) -> int:
    """Of a request's sampling, see `DraftParams`."""
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


class SuffixDrafter:
    """Drafts what probably comes next, as far as it pays, from all that is known.

    The context's end is looked up in the request's own text, in the index's tail and its segments, at up to
    ``max_match_length`` tokens and at a few shorter lengths; a client's prediction is followed. All of them vote for
    the next token, an acceptance model says how probable each candidate is, and the draft takes the most probable and
    goes on with those who agree. It ends where the chance that all of it is accepted falls below the price of one more
    token: of all lengths the one with the greatest expected accepted tokens minus price. A tree is grown the same way,
    best first, from all candidates.

    What a request's ``proposals`` say, what the target held likely when the same tokens came before and what it guessed
    in the last pass are candidates of the same chain or tree, and so is what the same noise chose before, where it
    is shared. What no place has said for a while is looked up again.

    The model is the namespace's and learns from every token that was tested, of drafts that were and were not made.
    Deterministic given its calls. Owned by one thread. Bounded work: at most 112 places are looked at per request, see
    `lookup.sample_matches`.
    """

    def __init__(
        self,
        *,
        max_match_length: int = 32,
        min_match_length: int = 1,
        price: float = 0.1,
        recycling: bool = True,
        retrieval: bool = True,
        use_sample_cache: bool = True,
    ) -> None:
        """``price`` : of a drafted token in expected accepted tokens, for requests that bring none.

        ``recycling`` : whether what the target held likely before is drafted. ``retrieval`` : whether index, own text
        and predictions are looked up; without, what other sources offer is judged all the same.
        ``use_sample_cache`` : whether it is kept what coupled noise chose.
        Raises ConfigError when ``max_match_length`` is not within 1..256.
        """
        self._longest, self._shortest = checked_lengths(max_match_length, min_match_length)
        self.price = price
        self._workspace = Workspace()
        self._models = NamespaceModels()
        self._looks_up = retrieval
        self._recycling = NamespaceRecyclingTables() if recycling else None
        self._sample_caches = NamespaceSampleCaches() if use_sample_cache else None
        self._kept: dict[str, KeptRow] = {}
        self._spare: list[KeptRow] = []  # of requests that have ended: new memory costs more than a draft

    def model_of(self, learned: LearnedState | None) -> AcceptanceModel:
        """What was learned about acceptance in a namespace; with None, of all requests that have none."""
        return self._models.of(learned)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order: each learns from what came of those before it."""
        if self._sample_caches is not None:
            self._sample_caches.begin_pass()
        held, addresses, rows = list[object](), list[int](), list[DraftRow]()
        for request in requests:
            kept = self._kept.get(request.request_id) or self.keep(request)
            held.append(self._write_params(kept.row, request))
            kept.learned = request.learned
            addresses.append(kept.address)
            rows.append(kept.row)
        draft_batch(self._workspace.address, np.array(addresses, np.int64), self._longest, self._shortest)
        for row in rows:  # what these lead to goes with ``held``, and by rows the next draft is asked for without
            row.params.num_proposed = row.params.num_token_costs = 0
        del held
        return [draft_of(row.draft) for row in rows]

    def keep(self, request: DraftRequest, row: DraftRow | None = None, at: int = 0) -> KeptRow:
        """Begin to keep what is kept of a request, in memory of the caller's where that is given, see `KeptRow`."""
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        kept = KeptRow(row, at) if row is not None or not self._spare else self._spare.pop()
        self._kept[request.request_id] = kept
        reset_row_at(kept.address, request.prompt_length)
        if row is not None:
            kept.held = self._settle(row.params, request)
        return kept

    def draft_groups(self, rows: Int64s, groups: Iterable[Group]) -> None:
        """Draft for the rows at addresses, which were given to ``keep`` and say in ``ask`` how much and at which price.

        ``groups`` : hold all of them, and maybe others.
        """
        if self._sample_caches is not None:
            self._sample_caches.begin_pass()
        for group in groups:
            self._look_in(group)
        draft_batch(self._workspace.address, rows, self._longest, self._shortest)

    def _look_in(self, group: Group) -> None:
        snapshot, learned = group.snapshot or NO_SNAPSHOT, group.learned
        self._workspace.room_for(snapshot)
        recycling_table = 0 if self._recycling is None or learned is None else self._recycling.of(learned, "")
        _look_in(group.rows, snapshot.address, self._models.of(learned).address, recycling_table)
        for request, row in group.own:
            row.params.recycling_table, row.params.sample_cache = (
                self._recycling_table_of(request),
                self._sample_cache_of(request),
            )

    def _write_params(self, row: DraftRow, request: DraftRequest) -> object:
        """Write all that is asked for. The result keeps matching what was written: hold it until the kernel returns."""
        params, context, token_costs = row.params, contiguous(request.context), request.token_costs
        snapshot = request.snapshot or NO_SNAPSHOT
        self._workspace.room_for(snapshot)
        params.snapshot, params.model = snapshot.address, self._models.of(request.learned).address
        params.context, params.context_length = address(context), len(context)
        params.limit, params.is_tree = max(0, min(request.limit, MAX_DRAFT)), request.allow_tree
        held = self._settle(params, request)
        params.recycling_table, params.sample_cache = self._recycling_table_of(request), self._sample_cache_of(request)
        if token_costs is None or not len(token_costs):
            params.token_cost = self.price
        elif len(token_costs) == 1:
            params.token_cost = token_costs[0]
        else:
            token_costs = np.ascontiguousarray(token_costs, np.float64)
            params.token_costs, params.num_token_costs = address(token_costs), len(token_costs)
        if request.proposals is not None:
            held += _offer(params, request.proposals)
        return context, snapshot, token_costs, held

    def _settle(self, params: DraftParams, request: DraftRequest) -> tuple[object, ...]:
        """Write what stays as it is from step to step, and that nothing else is asked for; the result is to be held."""
        params.num_token_costs = params.prediction_length = params.num_proposed = params.recycling_table = (
            params.sample_cache
        ) = 0
        params.prompt_length, params.no_lookup, params.allow_caching = (
            request.prompt_length,
            not self._looks_up,
            request.allow_caching,
        )
        params.temperature_bucket, params.temperature, params.noise = 0, 0.0, 0
        sampling, prediction = request.sampling, request.prediction
        if sampling is not None:
            temperature, noise = sampling.params.temperature, sampling.noise
            params.temperature_bucket = _temperature_bucket(temperature)
            if not sampling.params.greedy and (not noise.is_coupled or noise.num_counted == len(request.context)):
                params.temperature, params.noise = temperature, noise.address
        if prediction is not None and self._looks_up:
            prediction = contiguous(prediction)
            params.prediction, params.prediction_length = address(prediction), len(prediction)
        return sampling, prediction

    def _recycling_table_of(self, request: DraftRequest) -> int:
        """Address of the target's own candidates for a request, 0 for none."""
        return 0 if self._recycling is None else self._recycling.of(request.learned, request.request_id)

    def _sample_cache_of(self, request: DraftRequest) -> int:
        """Address of what the same noise chose before, 0 for none."""
        return 0 if self._sample_caches is None else self._sample_caches.of(request)

    def observe_scores(self, scored: ScoredPass) -> None:
        """Keep what the target chose behind wrong tokens: the next draft may go on there."""
        if self._recycling is not None:
            kept = [self._kept.get(request_id) for request_id in scored.request_ids]
            save_all_lookahead(
                np.array([0 if each is None else each.address for each in kept], np.int64),
                scored.last_accepted,
                scored.input_ids,
                scored.num_positions,
                scored.input_ids if scored.parents is None else scored.parents,
                scored.parents is not None,
                scored.sampled_ids,
            )

    def learn_scores(self, scored: ScoredPass) -> None:
        """Learn what the target held likely at every position of a pass."""
        if self._recycling is not None:
            self._recycling.learn(scored)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Keep how much was accepted: it is learned from when the request ends, and before that from its context."""
        kept = self._kept.get(request_id)
        if draft is EMPTY_DRAFT or kept is None:  # nothing was asked at this step: the last draft is the one before
            return
        if draft.parents is None or num_accepted == 0:
            kept.verified = len(draft.token_ids), num_accepted
        elif draft.path is None:  # of a tree, and nobody says which tokens of it
            kept.verified = None
        else:
            kept.verified = len(draft.token_ids), contiguous(draft.path)

    def finish(self, request_id: str) -> None:
        """Learn from the last step and forget the request: it has ended."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            if kept.verified is not None:
                size, right = kept.verified
                path = np.arange(right, dtype=np.int32) if isinstance(right, int) else right
                finish_row(kept.address, size, path, self._models.of(kept.learned).address)
            self._models.ended(kept.learned)
            if kept.is_own and len(self._spare) < _MOST_SPARE:
                kept.learned = kept.verified = None
                self._spare.append(kept)
        if self._recycling is not None:
            self._recycling.ended(request_id)
        if self._sample_caches is not None:
            self._sample_caches.ended(request_id)

    def publish(self) -> None:
        """Leave what was learned for other threads and the next process, in every request's ``learned``."""
        self._models.publish()

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        request = DraftRequest("", np.zeros(2, np.int32), 2, None, 1)
        draft = self.propose([request])[0]
        _look_in(np.zeros(0, np.int64), 0, 0, 0)
        if self._sample_caches is not None:
            warm_up_sample_cache()
        self.observe("", draft, 0)
        self.finish("")


def _offer(params: DraftParams, proposals: ExternalProposals) -> tuple[npt.NDArray[Any], ...]:
    """Write what other sources propose; the result keeps it matching."""
    tokens, parents, kinds = (
        contiguous(each[:MAX_PROPOSED_TOKENS]) for each in (proposals.token_ids, proposals.parents, proposals.kinds)
    )
    chances = np.ascontiguousarray(proposals.probabilities[:MAX_PROPOSED_TOKENS], np.float64)
    assert len(tokens) == len(parents) == len(kinds) == len(chances)
    params.num_proposed = len(tokens)
    params.proposed_tokens, params.proposed_parents = address(tokens), address(parents)
    params.proposed_probabilities, params.proposed_kinds = address(chances), address(kinds)
    return tokens, parents, chances, kinds
