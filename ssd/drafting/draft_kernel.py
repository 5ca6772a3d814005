"""Draft for a row in one kernel: learn from the outcome of the last draft, look up matches, and grow the next draft."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.drafting.acceptance_mixing import AcceptanceTables, acceptance_tables_at
from ssd.drafting.candidates import (
    Candidates,
    ScoredDraft,
    learn_from_context,
    learn_from_path,
    reset_scored,
    start_scored,
)
from ssd.drafting.draft_records import MAX_DRAFT, DraftParams, DraftRecord, clear_draft
from ssd.drafting.grow import (
    CONTINUED_CONTEXT,
    MIN_CONTINUED_MATCH,
    ChainScratch,
    FurtherLookups,
    TreeScratch,
    copy_context_end,
    grow_chain,
    grow_tree,
)
from ssd.drafting.lookup import (
    MATCH_SAMPLES_BYTES,
    NO_SEGMENT_TABLE,
    LookupScratch,
    MatchCursor,
    MatchSamples,
    ScanHits,
    SearchedTexts,
    match_samples_at,
    resume_matches,
    sample_matches,
    save_matches,
    searched_texts,
)
from ssd.drafting.noise_prediction import start_noise
from ssd.drafting.prediction import PredictionCursor, advance_prediction, reset_prediction
from ssd.drafting.proposal_tree import (
    Lookahead,
    build_proposals,
    propose_lookahead,
    save_lookahead,
)
from ssd.jit.addresses import (
    Address,
    Int64s,
    Record,
    TokenIds,
    inlined,
    int32_array,
    kernel,
    view_of,
)
from ssd.retrieval.snapshot import SnapshotRecord, snapshot_at


class RowState(Record):
    match_cursor: MatchCursor
    scored: ScoredDraft
    prediction: PredictionCursor
    lookahead: Lookahead


class DraftRow(Record):
    """The drafting kernel's data of one sequence: parameters, last draft, and state that is kept between steps.

    The record must not move in memory until the sequence ends.
    """

    params: DraftParams
    draft: DraftRecord
    state: RowState


class DraftScratch(Record):
    """The scratch memory of a drafter.

    Attributes:
        samples_of_lookups: The address of MatchSamples[1 + MAX_FURTHER_LOOKUPS]: the matches of the context, then those
            of a tree's further lookups.
        prediction_hits: Scratch for the search in a client's predicted output.
        continued: The text of a chain's further lookups: the end of the context followed by the draft.
    """

    samples_of_lookups: Address
    lookups: LookupScratch
    prediction_hits: ScanHits
    candidates: Candidates
    chain: ChainScratch
    tree: TreeScratch
    continued: Annotated[TokenIds, np.int32, CONTINUED_CONTEXT + MAX_DRAFT]


draft_scratch_at, row_at = view_of(DraftScratch), view_of(DraftRow)


@inlined
def reset_row(row: DraftRow, prompt_length: int) -> None:
    """Clear the drafting state that the previous request left in a row of the batch."""
    row.params.prompt_length, state = prompt_length, row.state
    state.match_cursor.table = NO_SEGMENT_TABLE
    reset_scored(state.scored)
    reset_prediction(state.prediction, prompt_length)
    state.lookahead.count = 0


@kernel
def reset_row_at(row: int, prompt_length: int) -> None:
    reset_row(row_at(row), prompt_length)


@kernel
def save_all_lookahead(
    rows: Int64s,
    ends: Int64s,
    input_ids: Int64s,
    counts: Int64s,
    parents: Int64s,
    is_tree: bool,
    sampled_ids: Int64s,
) -> None:
    """Save the tokens that the target sampled after rejected draft tokens, for every row of a `ScoredPass`.

    ``rows`` are the addresses of the `DraftRow` records (0 for none), and ``ends`` the last accepted position of each
    row (negative for none), both int64[B]. The other arguments are fields of the `ScoredPass`.
    """
    for b in range(len(rows)):
        if rows[b] != 0:
            lookahead = row_at(rows[b]).state.lookahead
            save_lookahead(lookahead, input_ids[b], parents[b], is_tree, counts[b], sampled_ids[b], ends[b])


_MAX_CONTINUATIONS: Final = 4
"""The maximum number of lookups that continue a draft chain after its text matches have ended.

Each lookup searches for the last tokens of the chain.
"""


@kernel
def _search(
    scratch: DraftScratch,
    snapshot: SnapshotRecord,
    params: DraftParams,
    context: TokenIds,
    max_length: int,
    min_length: int,
    samples: MatchSamples,
) -> None:
    if params.no_lookup == 1:
        samples.num_levels = 0
    else:
        sample_matches(snapshot, scratch.lookups, context, max_length, min_length, samples)


@inlined
def _continued(scratch: DraftScratch, context: TokenIds, out: DraftRecord) -> TokenIds:
    kept, drafted = copy_context_end(context, scratch.continued), out.size
    scratch.continued[kept : kept + drafted] = out.tokens[:drafted]
    return scratch.continued[: kept + drafted]


@kernel
def _draft_tree(
    scratch: DraftScratch,
    snapshot: SnapshotRecord,
    texts: SearchedTexts,
    params: DraftParams,
    state: RowState,
    model: AcceptanceTables,
    max_length: int,
    min_length: int,
    out: DraftRecord,
) -> None:
    samples, out.is_tree = match_samples_at(scratch.samples_of_lookups), 1
    _search(scratch, snapshot, params, texts.context, max_length, min_length, samples)
    further_at, least = scratch.samples_of_lookups + MATCH_SAMPLES_BYTES, max(min_length, MIN_CONTINUED_MATCH)
    further = FurtherLookups(snapshot, scratch.lookups, further_at, max_length, least)
    grow_tree(
        texts, samples, further, params, state.prediction, model, scratch.candidates, scratch.tree, state.scored, out
    )
    state.match_cursor.table = NO_SEGMENT_TABLE


@kernel
def _draft_chain(
    scratch: DraftScratch,
    snapshot: SnapshotRecord,
    texts: SearchedTexts,
    params: DraftParams,
    state: RowState,
    model: AcceptanceTables,
    max_length: int,
    min_length: int,
    out: DraftRecord,
) -> None:
    prediction, scored, candidates, chain_scratch = state.prediction, state.scored, scratch.candidates, scratch.chain
    samples = match_samples_at(scratch.samples_of_lookups)
    resume_matches(state.match_cursor, snapshot.table_number, texts, max_length, samples)
    has_ended, may_look_up = True, params.no_lookup == 0
    if samples.num_levels > 0:
        has_ended = grow_chain(
            texts, samples, 0, may_look_up, params, prediction, model, candidates, chain_scratch, scored, out
        )
    if out.size < params.limit:  # no saved matches, or they ended too early
        start_scored(scored, len(texts.context))
        clear_draft(out)
        _search(scratch, snapshot, params, texts.context, max_length, min_length, samples)
        has_ended = grow_chain(
            texts, samples, 0, may_look_up, params, prediction, model, candidates, chain_scratch, scored, out
        )
    save_matches(state.match_cursor, snapshot.table_number, texts, samples)
    context = texts.context
    for number in range(_MAX_CONTINUATIONS + 1):
        # All matches have ended, but another token would be worth its cost: look up the end of the draft.
        drafted = out.size
        if not has_ended or drafted == 0 or drafted == params.limit:
            break
        texts = searched_texts(_continued(scratch, context, out), snapshot)
        may_look_up = may_look_up and number < _MAX_CONTINUATIONS
        if may_look_up:
            _search(scratch, snapshot, params, texts.context, max_length, max(min_length, MIN_CONTINUED_MATCH), samples)
        else:
            samples.num_levels = 0
        has_ended = grow_chain(
            texts, samples, drafted, may_look_up, params, prediction, model, candidates, chain_scratch, scored, out
        )
        if out.size == drafted:
            break


@kernel
def draft_row(scratch: DraftScratch, row: DraftRow, max_length: int, min_length: int) -> None:
    """Learn from the outcome of a row's last draft, and write its next draft."""
    params, out, state = row.params, row.draft, row.state
    searched, learned = snapshot_at(params.snapshot), acceptance_tables_at(params.model)
    context = int32_array(params.context, params.context_length)
    clear_draft(out)
    learn_from_context(state.scored, context, learned)
    if params.limit < 1 or len(context) == 0:
        return
    start_scored(state.scored, len(context))
    if params.prediction_length > 0:
        prediction = int32_array(params.prediction, params.prediction_length)
        advance_prediction(state.prediction, prediction, context, scratch.prediction_hits)
    scratch.candidates.recycling_table = params.recycling_table
    start_noise(params, scratch.candidates.position_noise, scratch.candidates.cached_sample)
    build_proposals(params, scratch.candidates.proposals)
    propose_lookahead(state.lookahead, context, scratch.candidates.proposals)
    texts = searched_texts(context, searched)
    if params.is_tree:
        _draft_tree(scratch, searched, texts, params, state, learned, max_length, min_length, out)
    else:
        _draft_chain(scratch, searched, texts, params, state, learned, max_length, min_length, out)


@kernel
def finish_row(row: int, num_verified: int, path: TokenIds, model: int) -> None:
    """Update the acceptance model from the last draft of a request that has ended.

    ``num_verified`` draft tokens were verified, and ``path`` holds the indices of the accepted draft tokens.
    """
    learn_from_path(row_at(row).state.scored, num_verified, path, acceptance_tables_at(model))
