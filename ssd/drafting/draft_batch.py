"""Draft for the rows of a batch in one kernel call, validate the drafts, and shorten them to the best lengths."""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.cost_model.pass_costs import costs_at, num_steps_to_verify
from ssd.drafting.draft_kernel import draft_row
from ssd.drafting.draft_records import DraftRecord, DraftRow, parent_of, row_at
from ssd.drafting.draft_scratch import draft_scratch_at
from ssd.jit.addresses import (
    Address,
    Float64,
    Float64s,
    Int64,
    Int64s,
    Record,
    inlined,
    int32_array,
    kernel,
    offset_of,
    view_of,
)


class DraftBatch(Record):
    """The settings of a drafter for the rows of a batch, and its scratch memory.

    Attributes:
        scratch: The address of the `DraftScratch` with which `draft_batch` searches.
        max_match_length: The maximum match length in tokens.
        min_match_length: The minimum match length in tokens.
        limit: The maximum number of draft tokens per row.
        vocab_size: The size of the target's vocabulary. A draft with a token outside the vocabulary is dropped.
        end_ids: The tokens that end a draft, int32[num_end_ids].
        first_threshold: The minimum acceptance probability of the first draft token of a row that has no output yet. A
            less probable draft is dropped, because it would delay the first output token.
        costs: The address of the `PassCostRecord`.
        default_token_cost: The cost of a draft token in expected accepted tokens, used until passes are measured.
        calibration: The address of the `CalibrationRecord`; 0 for none.
        num_invalid: The number of drafts since the start that were dropped because of an invalid token.
    """

    scratch: Address
    max_match_length: Int64
    min_match_length: Int64
    limit: Int64
    vocab_size: Int64
    end_ids: Address
    num_end_ids: Int64
    first_threshold: Float64
    costs: Address
    default_token_cost: Float64
    calibration: Address
    num_invalid: Int64


draft_batch_at, draft_at = view_of(DraftBatch), view_of(DraftRecord)
DRAFT_OFFSET: Final = offset_of(DraftRow, "draft")


@kernel
def draft_batch(batch: int, rows: Int64s) -> None:
    """Draft for several rows one after another, using the snapshot and acceptance model in each row's parameters.

    The acceptance model learns from a row's last draft before the next row is drafted for. ``batch`` is the address of
    a `DraftBatch`, and ``rows`` (int64[n]) are the addresses of the `DraftRow` records, which are updated.
    """
    settings = draft_batch_at(batch)
    scratch = draft_scratch_at(settings.scratch)
    for i in range(len(rows)):
        draft_row(scratch, row_at(rows[i]), settings.max_match_length, settings.min_match_length)


@inlined
def is_valid_draft(batch: DraftBatch, row: DraftRow, share: float) -> bool:
    """Cut a row's draft after its first end-of-text token, and return whether the draft may be verified.

    A draft may not be verified, and is removed, if it has a token outside the vocabulary. The same applies to an
    improbable draft before the first output token, because it would delay this token. A draft tree without branches
    becomes a chain. ``share`` is the recent ratio of accepted to expected draft tokens.
    """
    draft, size, is_chain = row.draft, row.draft.size, True
    end_ids = int32_array(batch.end_ids, batch.num_end_ids)
    for i in range(draft.size):
        if draft.tokens[i] < 0 or draft.tokens[i] >= batch.vocab_size:
            batch.num_invalid += 1
            draft.size = 0
            return False
        is_chain &= draft.is_tree == 0 or draft.parents[i] == i - 1
        if size == draft.size:
            for end_id in end_ids:
                if draft.tokens[i] == end_id:
                    size = i + 1
    draft.size, draft.is_tree = size, 0 if is_chain else draft.is_tree
    has_output = row.params.context_length > row.params.prompt_length
    if size == 0 or has_output or draft.has_estimates == 0 or share * draft.probabilities[0] >= batch.first_threshold:
        return True
    draft.size = 0
    return False


@inlined
def path_probabilities(draft: DraftRecord, share: float, out: Float64s) -> None:
    """Write for each draft token the probability that this token and all tokens before it are accepted.

    The probabilities are multiplied by ``share``, the recent ratio of accepted to expected draft tokens.
    """
    for i in range(draft.size):
        parent = parent_of(draft, i)
        out[i] = draft.probabilities[i] * (out[parent] if parent >= 0 else share)


@kernel
def cut_drafts(costs: int, drafts: Int64s, shares: Float64s, is_padded: bool) -> None:
    """Shorten the drafts of all rows in a pass to the lengths with the greatest expected throughput. O(n log n).

    The gain of a draft token is the estimated probability that it and all tokens before it are accepted. In a padded
    pass, all drafts are cut to one length w; every w is tried, and the expected gain is the sum of the first w gains of
    all rows. In an unpadded pass, the m tokens with the greatest gains are kept; every m is tried. Gains never
    increase along a draft, so the kept tokens are the beginnings of drafts. No draft is cut if a draft has no
    estimates or if the time of forward passes has not been measured.

    Args:
        costs: The address of the `PassCostRecord`.
        drafts: The addresses of the `DraftRecord` of each row, int64[B]; chains, unless the pass is padded.
        shares: The recent ratio of accepted to expected draft tokens of each row, float64[B].
        is_padded: Whether the pass computes as many positions for each row as for the longest draft.
    """
    num_rows, longest, num_tokens = len(drafts), 0, 0
    for b in range(num_rows):
        draft = draft_at(drafts[b])
        if draft.size > 0 and draft.has_estimates == 0:
            return
        longest, num_tokens = max(longest, draft.size), num_tokens + draft.size
    if num_tokens == 0 or costs_at(costs).is_known == 0:
        return
    gains, found, begin = np.zeros(longest if is_padded else num_tokens), np.empty(longest), 0
    for b in range(num_rows):
        draft = draft_at(drafts[b])
        path_probabilities(draft, shares[b], found)
        for i in range(draft.size):
            gains[i if is_padded else begin + i] += found[i]
        begin += draft.size
    if not is_padded:
        gains *= -1.0
        gains.sort()
        gains *= -1.0
    length = num_steps_to_verify(costs, num_rows, num_rows if is_padded else 1, gains)
    least = gains[length - 1] if length > 0 else 2.0
    for b in range(num_rows):
        draft = draft_at(drafts[b])
        if is_padded:
            draft.size = min(draft.size, length)
        else:
            path_probabilities(draft, shares[b], found)
            size = 0
            while size < draft.size and found[size] >= least:
                size += 1
            draft.size = size
