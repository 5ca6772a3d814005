"""Kernels that fill the draft buffers of a batch, and learn from what was accepted and how long it took."""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.cost_model.calibration import BACKOFF_AFTER, accepted_share, calibration_at, record_outcome
from ssd.cost_model.pass_costs import costs_at, draft_token_cost, observe_pass
from ssd.drafting.draft_batch import cut_drafts, draft_batch, draft_batch_at, is_valid_draft
from ssd.drafting.draft_records import MAX_DRAFT, DraftRecord, clear_draft
from ssd.engine.batch import DRAFT_ROW_OFFSET, Batch, BatchRecord, batch_record_at, sequence_at
from ssd.engine.request import SequenceRecord
from ssd.jit.addresses import Int64s, dtype_of, inlined, int32_array, int64_array, kernel, offset_of

_DRAFTS_OFFSET: Final = offset_of(SequenceRecord, "drafts")
_DRAFT_BYTES: Final = dtype_of(DraftRecord).itemsize
_NUM_PREPARED_PASSES: Final = 3
"""The number of forward passes for which a prepared draft, made ahead while a pass runs, is long enough."""


@inlined
def _max_draft_length(row: SequenceRecord, limit: int) -> int:
    return max(0, min(limit, row.end - row.length - 1, row.max_draft_length))


@inlined
def _copy_draft(draft: DraftRecord, begin: int, end: int, out: DraftRecord) -> None:
    out.size, out.match_length, out.source = end - begin, draft.match_length, draft.source
    out.is_tree, out.has_estimates = draft.is_tree, draft.has_estimates
    for i in range(end - begin):
        out.tokens[i], out.parents[i] = draft.tokens[begin + i], draft.parents[begin + i]
        out.probabilities[i] = draft.probabilities[begin + i]


@inlined
def _update_width(record: BatchRecord, rows: Int64s, buffer: int) -> None:
    record.width, record.has_trees = 1, 0
    for b in range(len(rows)):
        draft = sequence_at(rows[b]).drafts[buffer]
        record.width = max(record.width, draft.size + 1)
        record.has_trees |= draft.is_tree == 1 and draft.size > 0


@kernel
def reuse_prepared_drafts(batch: int, buffer: int, limit: int, should_draft_all: bool) -> int:
    """Take the next draft of each sequence from its prepared draft if it fits; mark all other sequences for drafting.

    Returns the number of marked sequences.

    A prepared draft is a long draft for several forward passes, made while an earlier pass ran. It fits only if the
    output since then equals its tokens. A sequence whose recent drafts were all empty is marked only if
    ``should_draft_all``.

    Args:
        batch: The address of the `BatchRecord`.
        buffer: Which of the two draft buffers of each sequence (0 or 1) is filled.
        limit: The maximum draft length.
        should_draft_all: Whether to draft also for sequences whose recent drafts were empty.
    """
    record = batch_record_at(batch)
    rows, needs_draft = int64_array(record.rows, record.num_rows), int64_array(record.needs_draft, record.num_rows)
    num_marked = record.num_in_backoff = 0
    for b in range(record.num_rows):
        row = sequence_at(rows[b])
        draft, at, begin = row.drafts[buffer], row.prepared_length, row.prepared_begin
        end = begin + _max_draft_length(row, limit)
        clear_draft(draft)
        row.prepared_length, row.used_offset, row.was_drafted[buffer] = 0, 0, 0
        is_due = should_draft_all or row.num_empty_drafts < BACKOFF_AFTER
        record.num_in_backoff += not is_due
        if at == row.length and begin < end <= row.prepared.size:
            last = int32_array(row.tokens, row.length)[row.length - 1]
            if row.prepared.tokens[begin - 1] == last:
                _copy_draft(row.prepared, begin, end, draft)
                row.used_offset, row.was_drafted[buffer] = begin, 1
        needs_draft[b] = is_due and row.used_offset == 0
        num_marked += needs_draft[b]
    _update_width(record, rows, buffer)
    return num_marked


@kernel
def fill_draft_params(batch: int, buffer: int, settings: int, shape: int) -> int:
    """Write the drafter's input for each sequence that needs a draft, and return the number of these sequences.

    Args:
        batch: The address of the `BatchRecord`.
        buffer: Which of the two draft buffers (0 or 1) holds the drafts that are being verified; used only for
            PREPARED_CHAIN.
        settings: The address of the `DraftBatch`.
        shape: CHAIN, TREE, or PREPARED_CHAIN. A prepared chain repeats the draft that is being verified and continues
            it, so that it is long enough for several forward passes.
    """
    record, drafting = batch_record_at(batch), draft_batch_at(settings)
    rows, needs_draft = int64_array(record.rows, record.num_rows), int64_array(record.needs_draft, record.num_rows)
    draft_rows, outcomes = int64_array(record.draft_rows, record.num_rows), calibration_at(drafting.calibration)
    is_known, token_cost = costs_at(drafting.costs).is_known == 1, drafting.default_token_cost
    if is_known:
        token_cost = draft_token_cost(drafting.costs, record.num_rows)
    record.num_draft_rows = 0
    for b in range(record.num_rows):
        if needs_draft[b] == 0:
            continue
        row = sequence_at(rows[b])
        params, limit = row.draft_row.params, drafting.limit
        if shape == PREPARED_CHAIN:
            limit = row.drafts[buffer].size + _NUM_PREPARED_PASSES * (1 + limit)
        params.context_length, params.limit = row.length, min(MAX_DRAFT, _max_draft_length(row, limit))
        params.token_cost = token_cost
        if is_known:
            params.token_cost /= accepted_share(outcomes, row.temperature_bucket)
        params.is_tree = shape == TREE and row.allow_tree == 1
        draft_rows[record.num_draft_rows] = rows[b] + DRAFT_ROW_OFFSET
        record.num_draft_rows += 1
    return record.num_draft_rows


CHAIN: Final = 0
TREE: Final = 1
PREPARED_CHAIN: Final = 2


@kernel
def collect_drafts(batch: int, buffer: int, settings: int) -> None:
    """Copy new drafts to the draft buffers of their sequences, and shorten all drafts to the same maximum length.

    `cut_drafts` chooses the length with the greatest expected throughput. One maximum holds for all sequences, because
    a forward pass pads every row to the longest draft.
    """
    record, drafting = batch_record_at(batch), draft_batch_at(settings)
    rows, needs_draft = int64_array(record.rows, record.num_rows), int64_array(record.needs_draft, record.num_rows)
    outcomes, shares = calibration_at(drafting.calibration), np.empty(record.num_rows)
    for b in range(record.num_rows):
        row = sequence_at(rows[b])
        shares[b] = accepted_share(outcomes, row.temperature_bucket)
        if needs_draft[b] == 1 and is_valid_draft(drafting, row.draft_row, shares[b]):
            _copy_draft(row.draft_row.draft, 0, row.draft_row.draft.size, row.drafts[buffer])
            row.was_drafted[buffer] = 1
    cut_drafts(drafting.costs, rows + (_DRAFTS_OFFSET + buffer * _DRAFT_BYTES), shares, True)
    for b in range(record.num_rows):
        if needs_draft[b] == 1:
            row = sequence_at(rows[b])
            row.num_empty_drafts = 0 if row.drafts[buffer].size > 0 else row.num_empty_drafts + 1
    _update_width(record, rows, buffer)


@kernel
def start_drafts(batch: int, buffer: int, settings: int, should_draft_all: bool) -> int:
    """Run `reuse_prepared_drafts`, and `collect_drafts` if no sequence needs a new draft; return how many need one."""
    num_marked = reuse_prepared_drafts(batch, buffer, draft_batch_at(settings).limit, should_draft_all)
    if num_marked == 0 and batch_record_at(batch).width > 1:
        collect_drafts(batch, buffer, settings)
    return num_marked


@kernel
def plan_prepared_drafts(batch: int, buffer: int, settings: int) -> int:
    """Mark the sequences for which a long draft is prepared while the current forward pass runs; return how many.

    These are the sequences whose last draft was fully accepted: their output probably goes on repeating an earlier
    text. A sequence is left out if its earlier prepared draft still covers the next pass.
    """
    record, limit = batch_record_at(batch), draft_batch_at(settings).limit
    rows, needs_draft = int64_array(record.rows, record.num_rows), int64_array(record.needs_draft, record.num_rows)
    num_drafted, num_accepted = (
        int64_array(record.num_drafted, record.num_rows),
        int64_array(record.num_accepted, record.num_rows),
    )
    num_marked = 0
    for b in range(record.num_rows):
        row = sequence_at(rows[b])
        size, begin = row.drafts[buffer].size, row.used_offset
        needs_draft[b] = 0 < num_drafted[b] == num_accepted[b] and size > 0 and row.drafts[buffer].is_tree == 0
        if needs_draft[b] == 1 and begin > 0 and begin + size + 1 + limit <= row.prepared.size:
            needs_draft[b] = 0
            row.prepared_offset, row.prepared_begin = begin, begin + size + 1
            row.prepared_length = row.length + size + 1
        num_marked += needs_draft[b]
    return num_marked


@kernel
def store_prepared_drafts(batch: int, buffer: int, settings: int) -> None:
    """Store the prepared drafts: the long drafts that the drafter made while a forward pass ran.

    `reuse_prepared_drafts` takes the drafts of later passes from them.
    """
    record = batch_record_at(batch)
    rows, needs_draft = int64_array(record.rows, record.num_rows), int64_array(record.needs_draft, record.num_rows)
    for b in range(record.num_rows):
        if needs_draft[b] == 0:
            continue
        row = sequence_at(rows[b])
        found, draft, common = row.draft_row.draft, row.drafts[buffer], 0
        if not is_valid_draft(draft_batch_at(settings), row.draft_row, 1.0):
            clear_draft(found)
        _copy_draft(found, 0, found.size, row.prepared)
        while common < min(draft.size, found.size) and found.tokens[common] == draft.tokens[common]:
            common += 1
        row.prepared_offset, row.prepared_begin = 0, common + 1
        row.prepared_length = row.length + draft.size + 1 if common == draft.size else -1


@kernel
def make_drafts(batch: int, buffer: int, settings: int, shape: int) -> None:
    """Draft for each marked sequence, and collect or store the drafts. The arguments are those of `fill_draft_params`.

    The settings must have the scratch memory of a suffix drafter.
    """
    num_rows = fill_draft_params(batch, buffer, settings, shape)
    draft_batch(settings, int64_array(batch_record_at(batch).draft_rows, num_rows))
    if shape == PREPARED_CHAIN:
        store_prepared_drafts(batch, buffer, settings)
    else:
        collect_drafts(batch, buffer, settings)


@inlined
def _expected_accepted(draft: DraftRecord, path: Int64s, num_accepted: int) -> float:
    expected = 0.0
    if draft.is_tree == 0:
        for i in range(min(draft.size, num_accepted + 1)):
            expected += draft.probabilities[i]
        return expected
    for i in range(draft.size):
        for depth in range(num_accepted + 1):
            if draft.parents[i] + 1 == path[depth]:
                expected += draft.probabilities[i]
    return expected


@kernel
def learn_from_pass(
    batch: int, buffer: int, settings: int, sizes: Int64s, paths: Int64s, width: int, num_tokens: int, seconds: float
) -> int:
    """Learn from a forward pass: how many draft tokens were accepted, and how long the pass took.

    The accepted draft tokens of each sequence are compared with the estimated number, to correct later estimates.
    Sequences for which no draft was requested are skipped. ``sizes`` and ``paths`` are the result of `accept_drafts`.
    ``seconds`` is 0 if the time of the pass tells nothing about its size.

    Returns the number of passes since promising drafts began to be left out because of their cost, else 0.
    """
    record, drafting = batch_record_at(batch), draft_batch_at(settings)
    outcomes, costs = calibration_at(drafting.calibration), costs_at(drafting.costs)
    rows, committed = int64_array(record.rows, len(sizes)), int64_array(record.committed, len(sizes))
    for b in range(len(sizes)):
        row = sequence_at(rows[b])
        draft = row.drafts[buffer]
        if row.was_drafted[buffer] == 1 and committed[b] > 0 and (draft.has_estimates == 1 or draft.size == 0):
            expected = _expected_accepted(draft, paths[b], sizes[b] - 1)
            record_outcome(outcomes, row.temperature_bucket, expected, sizes[b] - 1)
    if seconds > 0.0:
        observe_pass(drafting.costs, len(sizes) * width, width > 1, num_tokens, seconds)
    return costs.num_withheld


def warm_up_draft_buffers(settings: int, *, with_suffix_drafter: bool) -> None:
    """Compile the kernels. ``settings`` is the address of the `DraftBatch` of the engine."""
    batch = Batch(())
    start_drafts(batch.address, 0, settings, False)
    plan_prepared_drafts(batch.address, 0, settings)
    if with_suffix_drafter:
        make_drafts(batch.address, 0, settings, CHAIN)
    fill_draft_params(batch.address, 0, settings, CHAIN)
    collect_drafts(batch.address, 0, settings)
    store_prepared_drafts(batch.address, 0, settings)
    learn_from_pass(batch.address, 0, settings, np.zeros(0, np.int64), np.zeros((0, 1), np.int64), 1, 0, 0.0)
