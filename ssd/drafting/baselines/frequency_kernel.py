"""The kernel of the frequency drafter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, int32_array, kernel
from ssd.drafting.suffix.ask import asks_at
from ssd.drafting.suffix.draft_record import MAX_DRAFT, clear, drafts_at
from ssd.drafting.suffix.gather import (
    MAX_SAMPLES,
    NOTHING,
    evidence_at,
    look_up,
    next_token,
    texts_of,
)
from ssd.drafting.suffix.workspace import frame_at
from ssd.retrieval.snapshot import snapshot_at


@kernel
def _equal(one: TokenIds, other: TokenIds, width: int) -> bool:
    for i in range(width):
        if one[i] != other[i]:
            return False
        if one[i] < 0:
            return True
    return True


@kernel
def most_frequent(
    continuations: TokenIds, weights: npt.NDArray[np.float64], recency: Int64s, count: int, width: int
) -> int:
    """Row of the continuation of ``width`` tokens that weighs most; the most recent wins ties. -1 when none.

    Ended continuations compete as they are; those that end at once do not. Pairwise: O(count^2) first-token compares.
    """
    best, best_weight, best_recency = -1, 0.0, np.int64(-1)
    for i in range(count):
        if continuations[i, 0] < 0:
            continue
        weight, latest, counted = 0.0, recency[i], False
        for j in range(count):
            if _equal(continuations[i], continuations[j], width):
                if j < i:
                    counted = True
                    break
                weight += weights[j]
                latest = max(latest, recency[j])
        if counted:
            continue
        if weight > best_weight or (weight == best_weight and latest > best_recency):
            best, best_weight, best_recency = i, weight, latest
    return best


@kernel
def propose_frequency(
    workspace: int, snapshot: int, num_rows: int, max_length: int, min_length: int, continuations: TokenIds
) -> None:
    """Draft for the first ``num_rows`` rows of the workspace at an address, all of the snapshot at an address.

    Writes tokens and results. ``continuations`` : int32[MAX_SAMPLES, MAX_DRAFT], scratch.
    """
    frame, searched = frame_at(workspace), snapshot_at(snapshot)
    asks, drafts = asks_at(frame.asks, frame.num_rows), drafts_at(frame.drafts, frame.num_rows)
    evidence = evidence_at(frame.evidences)
    for row in range(num_rows):
        ask, out = asks[row], drafts[row]
        context, limit = int32_array(ask.context, ask.context_length), ask.limit
        clear(out)
        if limit < 1:
            continue
        look_up(searched, frame.lookups, context, max_length, min_length, 1, False, evidence)
        texts = texts_of(context, searched)
        if evidence.num_levels == 0:
            continue
        for sample in range(evidence.ends[0]):
            depth = 0
            while depth < limit:
                token = next_token(evidence, sample, depth, texts)
                continuations[sample, depth] = token
                if token < 0:
                    break
                depth += 1
            continuations[sample, depth:limit] = NOTHING
        best = most_frequent(continuations, evidence.weights, evidence.recency, evidence.ends[0], limit)
        if best < 0:
            continue
        while out.size < limit and continuations[best, out.size] >= 0:
            out.tokens[out.size] = continuations[best, out.size]
            out.size += 1
        out.match_length = evidence.lengths[0]


def make_continuations() -> TokenIds:
    """The scratch memory that ``propose_frequency`` asks for."""
    return np.empty((MAX_SAMPLES, MAX_DRAFT), np.int32)
