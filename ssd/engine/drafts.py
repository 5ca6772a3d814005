"""The drafts of a batch, for all its rows at once: taken up, asked for, cut to what pays, and what came of them."""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.cost_model.calibration import (
    BACKOFF_AFTER,
    FIRST_TOKEN_THRESHOLD,
    AcceptanceCalibration,
    CalibrationRecord,
    accepted_share,
    calibration_at,
    record_outcome,
)
from ssd.cost_model.cost_model import CostModel
from ssd.cost_model.pass_costs import costs_at, draft_token_cost, num_steps_to_verify
from ssd.drafting.draft_records import MAX_DRAFT, DraftRecord, clear_draft
from ssd.engine.batch import DRAFTING_AT, Batch, Frame, frame_at, row_at
from ssd.engine.request import Row
from ssd.jit.addresses import Int64s, inlined, int32_array, int64_array, kernel

_PASSES_AHEAD: Final = 3
"""Passes that are drafted for at once where one text is said again."""


@inlined
def _most_drafted(row: Row, limit: int) -> int:
    """Longest draft of at most ``limit`` tokens: one token is always the target's own, so none reaches the end."""
    return max(0, min(limit, row.end - row.length - 1, row.most_drafted))


@inlined
def _copy(draft: DraftRecord, begin: int, end: int, out: DraftRecord) -> None:
    """Make ``out`` the tokens of a draft from ``begin`` to ``end``; of a tree all of them."""
    out.size, out.match_length, out.source = end - begin, draft.match_length, draft.source
    out.is_tree, out.has_estimates = draft.is_tree, draft.has_estimates
    for i in range(end - begin):
        out.tokens[i], out.parents[i] = draft.tokens[begin + i], draft.parents[begin + i]
        out.probabilities[i] = draft.probabilities[begin + i]


@inlined
def _is_of_vocabulary(draft: DraftRecord, vocab_size: int) -> bool:
    """Whether all tokens are the target's. A tree that is a chain becomes one."""
    is_chain = True
    for i in range(draft.size):
        if draft.tokens[i] < 0 or draft.tokens[i] >= vocab_size:
            return False
        is_chain &= draft.is_tree == 0 or draft.parents[i] == i - 1
    draft.is_tree = draft.is_tree if not is_chain else 0
    return True


@inlined
def _measure(frame: Frame, rows: Int64s, turn: int) -> None:
    frame.width, frame.has_trees = 1, 0
    for b in range(len(rows)):
        draft = row_at(rows[b]).verified[turn]
        frame.width = max(frame.width, draft.size + 1)
        frame.has_trees |= draft.is_tree == 1 and draft.size > 0


@kernel
def begin_drafts(batch: int, turn: int, limit: int, should_draft_all: bool) -> None:
    """Take up what was prepared, where all before it came true; the other rows are wanted, if they are due.

    ``should_draft_all`` : whether those are that got nothing lately.
    """
    frame = frame_at(batch)
    rows, wanted = int64_array(frame.rows, frame.num_rows), int64_array(frame.wanted, frame.num_rows)
    frame.num_spared = 0
    for b in range(frame.num_rows):
        row = row_at(rows[b])
        draft, at, begin = row.verified[turn], row.prepared_at, row.prepared_begin
        end = begin + _most_drafted(row, limit)
        clear_draft(draft)
        row.prepared_at, row.used_begin, row.was_asked[turn] = 0, 0, 0
        is_due = should_draft_all or row.num_fruitless < BACKOFF_AFTER
        frame.num_spared += not is_due
        if at == row.length and begin < end <= row.prepared.size:
            last = int32_array(row.tokens, row.length)[row.length - 1]
            if row.prepared.tokens[begin - 1] == last:
                _copy(row.prepared, begin, end, draft)
                row.used_begin, row.was_asked[turn] = begin, 1
        wanted[b] = is_due and row.used_begin == 0
    _measure(frame, rows, turn)


@kernel
def ask_drafts(batch: int, turn: int, costs: int, shares: int, limit: int, price: float, shape: int) -> int:
    """Ask for a draft for each row that is wanted; how many.

    ``limit`` : tokens. ``price`` : of one, while it is not known what passes take. ``shape`` : TREE, CHAIN, or AHEAD: a
    chain behind what the pass of this ``turn`` verifies, long enough for the passes after it.
    """
    frame = frame_at(batch)
    rows, wanted = int64_array(frame.rows, frame.num_rows), int64_array(frame.wanted, frame.num_rows)
    asked, kept = int64_array(frame.asked, frame.num_rows), calibration_at(shares)
    if costs_at(costs).is_known == 1:
        price = draft_token_cost(costs, frame.num_rows)
    frame.num_asked = 0
    for b in range(frame.num_rows):
        if wanted[b] == 0:
            continue
        row = row_at(rows[b])
        params, most = row.drafting.params, limit
        if shape == AHEAD:
            most = row.verified[turn].size + _PASSES_AHEAD * (1 + limit)
        params.context_length, params.limit = row.length, min(MAX_DRAFT, _most_drafted(row, most))
        params.token_cost = price / accepted_share(kept, row.kind) if costs_at(costs).is_known == 1 else price
        params.is_tree = shape == TREE and row.may_branch == 1
        asked[frame.num_asked] = rows[b] + DRAFTING_AT
        frame.num_asked += 1
    return frame.num_asked


CHAIN: Final = 0
TREE: Final = 1
AHEAD: Final = 2


@inlined
def _cut(frame: Frame, rows: Int64s, turn: int, costs: int, shares: CalibrationRecord) -> None:
    """Cut all drafts to the tokens that give most where every row is padded to the widest.

    With its draft cut to w tokens a row is expected to emit 1 + s (P1 + ... + Pw) tokens, where Pi is the estimated
    chance that its i-th token is accepted and s how far the row's estimates are trusted. Drafts without estimates are
    kept whole, and with them all.
    """
    gains, chances, widest = np.zeros(MAX_DRAFT), np.empty(MAX_DRAFT), 0
    for b in range(len(rows)):
        row = row_at(rows[b])
        draft = row.verified[turn]
        if draft.size > 0 and draft.has_estimates == 0:
            return
        share = accepted_share(shares, row.kind)
        for i in range(draft.size):
            parent = np.int64(draft.parents[i]) if draft.is_tree == 1 else i - 1
            chances[i] = draft.probabilities[i] * (chances[parent] if parent >= 0 else share)
            gains[i] += chances[i]
        widest = max(widest, draft.size)
    if widest > 0 and costs_at(costs).is_known == 1:
        width = num_steps_to_verify(costs, len(rows), len(rows), gains[:widest])
        for b in range(len(rows)):
            draft = row_at(rows[b]).verified[turn]
            draft.size = min(draft.size, width)


@kernel
def take_drafts(batch: int, turn: int, costs: int, shares: int, vocab_size: int) -> int:
    """Take the drafts of the rows that were wanted, as far as they pay; how many of them were none."""
    frame, num_wrong = frame_at(batch), 0
    rows, wanted = int64_array(frame.rows, frame.num_rows), int64_array(frame.wanted, frame.num_rows)
    kept = calibration_at(shares)
    for b in range(frame.num_rows):
        if wanted[b] == 0:
            continue
        row = row_at(rows[b])
        found = row.drafting.draft
        if not _is_of_vocabulary(found, vocab_size):
            num_wrong += 1
            continue
        is_sure = found.size == 0 or found.has_estimates == 0 or row.length > row.prompt_length
        if is_sure or accepted_share(kept, row.kind) * found.probabilities[0] >= FIRST_TOKEN_THRESHOLD:
            _copy(found, 0, found.size, row.verified[turn])
            row.was_asked[turn] = 1
    _cut(frame, rows, turn, costs, kept)
    for b in range(frame.num_rows):
        if wanted[b] == 1:
            row = row_at(rows[b])
            row.num_fruitless = 0 if row.verified[turn].size > 0 else row.num_fruitless + 1
    _measure(frame, rows, turn)
    return num_wrong


@kernel
def plan_ahead(batch: int, turn: int, limit: int) -> None:
    """Want a draft behind what is under way for the rows whose last draft came true; not where there is one."""
    frame = frame_at(batch)
    rows, wanted = int64_array(frame.rows, frame.num_rows), int64_array(frame.wanted, frame.num_rows)
    drafted, accepted = int64_array(frame.drafted, frame.num_rows), int64_array(frame.accepted, frame.num_rows)
    for b in range(frame.num_rows):
        row = row_at(rows[b])
        size, begin = row.verified[turn].size, row.used_begin
        wanted[b] = 0 < drafted[b] == accepted[b] and size > 0 and row.verified[turn].is_tree == 0
        if wanted[b] == 1 and begin > 0 and begin + size + 1 + limit <= row.prepared.size:
            wanted[b] = 0
            row.prepared_verified, row.prepared_begin = begin, begin + size + 1
            row.prepared_at = row.length + size + 1


@kernel
def take_ahead(batch: int, turn: int, vocab_size: int) -> int:
    """Keep the drafts of the rows that were wanted until what is before them is said; how many of them were none."""
    frame, num_wrong = frame_at(batch), 0
    rows, wanted = int64_array(frame.rows, frame.num_rows), int64_array(frame.wanted, frame.num_rows)
    for b in range(frame.num_rows):
        if wanted[b] == 0:
            continue
        row = row_at(rows[b])
        found, draft, common = row.drafting.draft, row.verified[turn], 0
        if not _is_of_vocabulary(found, vocab_size):
            num_wrong += 1
            clear_draft(found)
        _copy(found, 0, found.size, row.prepared)
        while common < min(draft.size, found.size) and found.tokens[common] == draft.tokens[common]:
            common += 1
        row.prepared_verified, row.prepared_begin = 0, common + 1
        row.prepared_at = row.length + draft.size + 1 if common == draft.size else -1
    return num_wrong


@inlined
def _promise_tested(draft: DraftRecord, path: Int64s, num_right: int) -> float:
    """How many tokens of a draft should have come of those that were tested, on the path that was and beside it.

    ``path`` : the positions that were right, the context's end first. Of a draft that is wrong at once that is its
    first token's chance, however long it is.
    """
    promised = 0.0
    if draft.is_tree == 0:
        for i in range(min(draft.size, num_right + 1)):
            promised += draft.probabilities[i]
        return promised
    for i in range(draft.size):
        for depth in range(num_right + 1):
            if draft.parents[i] + 1 == path[depth]:
                promised += draft.probabilities[i]
    return promised


@kernel
def count_promises(batch: int, turn: int, shares: int, sizes: Int64s, paths: Int64s) -> None:
    """Learn how far what the drafts of a pass promised came true: ``sizes`` and ``paths`` are those of `accept_drafts`.

    Nothing of rows that were not drafted for: what was distrusted has not been tried again.
    """
    frame, kept = frame_at(batch), calibration_at(shares)
    rows, taken = int64_array(frame.rows, len(sizes)), int64_array(frame.taken, len(sizes))
    for b in range(len(sizes)):
        row = row_at(rows[b])
        draft = row.verified[turn]
        if row.was_asked[turn] == 1 and taken[b] > 0 and (draft.has_estimates == 1 or draft.size == 0):
            promised = _promise_tested(draft, paths[b], sizes[b] - 1)
            record_outcome(kept, row.kind, promised, sizes[b] - 1)


def warm_up_drafts() -> None:
    """Compile what is done for the drafts of all rows, with none."""
    batch, prices, shares = Batch(()), CostModel(), AcceptanceCalibration()
    prices.calibrate(1, 1.0, is_wide=False)
    prices.begin()
    ask_drafts(batch.address, 0, prices.address, shares.address, 0, 0.0, CHAIN)
    take_drafts(batch.address, 0, prices.address, shares.address, 0)
    plan_ahead(batch.address, 0, 0)
    take_ahead(batch.address, 0, 0)
    count_promises(batch.address, 0, shares.address, np.zeros(0, np.int64), np.zeros((0, 1), np.int64))
