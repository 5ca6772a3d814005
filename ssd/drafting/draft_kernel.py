"""Draft for a row in one kernel: learn from the outcome of the last draft, look up matches, and grow the next draft."""

from __future__ import annotations

from ssd.drafting.acceptance_features import acceptance_tables_at
from ssd.drafting.draft_outcomes import learn_from_context, learn_from_path, reset_scored, start_scored
from ssd.drafting.draft_records import NO_SEGMENT_TABLE, DraftRow, clear_draft, row_at
from ssd.drafting.draft_scratch import DraftScratch
from ssd.drafting.grow import DraftInputs, grow_draft
from ssd.drafting.lookup import resume_matches, sample_matches, save_matches, searched_texts
from ssd.drafting.noise_prediction import start_noise
from ssd.drafting.prediction import advance_prediction, reset_prediction
from ssd.drafting.proposal_tree import build_proposals, propose_lookahead, save_lookahead
from ssd.jit.addresses import Int64s, TokenIds, inlined, int32_array, kernel
from ssd.retrieval.snapshot import snapshot_at


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


@inlined
def _start_draft(row: DraftRow) -> None:
    clear_draft(row.draft)
    row.draft.is_tree = int(row.params.is_tree != 0)
    start_scored(row.state.scored, row.params.context_length)


@kernel
def draft_row(scratch: DraftScratch, row: DraftRow, max_length: int, min_length: int) -> None:
    """Update the acceptance model from the outcome of a row's last draft, and write the row's next draft."""
    params, out, state = row.params, row.draft, row.state
    snapshot, model = snapshot_at(params.snapshot), acceptance_tables_at(params.model)
    context = int32_array(params.context, params.context_length)
    clear_draft(out)
    learn_from_context(state.scored, context, model)
    if params.limit < 1 or len(context) == 0:
        return
    _start_draft(row)
    if params.prediction_length > 0:
        prediction = int32_array(params.prediction, params.prediction_length)
        advance_prediction(state.prediction, prediction, context, scratch.prediction_hits)
    scratch.candidates.recycling_table = params.recycling_table
    start_noise(params, scratch.candidates.position_noise, scratch.candidates.cached_sample)
    build_proposals(params, scratch.candidates.proposals)
    propose_lookahead(state.lookahead, context, scratch.candidates.proposals)
    inputs = DraftInputs(searched_texts(context, snapshot), snapshot, model, max_length, min_length)
    samples, cursor, table = scratch.samples[0], state.match_cursor, snapshot.table_number
    samples.num_levels = 0
    if out.is_tree == 0:
        resume_matches(cursor, table, inputs.texts, max_length, samples)
    if samples.num_levels > 0:
        grow_draft(scratch, row, inputs, True)
    if out.size < params.limit:  # no saved matches, or they ended too early
        _start_draft(row)
        samples.num_levels = 0
        if params.no_lookup == 0:
            sample_matches(snapshot, scratch.lookups, context, max_length, min_length, samples)
        grow_draft(scratch, row, inputs, False)
    cursor.table = NO_SEGMENT_TABLE
    if out.is_tree == 0:
        save_matches(cursor, table, inputs.texts, samples)


@kernel
def finish_row(row: int, num_verified: int, path: TokenIds, model: int) -> None:
    """Update the acceptance model from the last draft of a request that has ended.

    ``num_verified`` draft tokens were verified, and ``path`` holds the indices of the accepted draft tokens.
    """
    learn_from_path(row_at(row).state.scored, num_verified, path, acceptance_tables_at(model))
