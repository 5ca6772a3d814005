"""A baseline that runs in our process: the most frequent continuation of the longest match in the shared index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, kernel
from ssd.drafting.ask import MAX_DRAFT
from ssd.drafting.drafter import NO_SNAPSHOT, Workspace, contiguous
from ssd.drafting.lookup import MAX_SAMPLES, NOTHING, evidence_at, look_up, next_token, texts_of
from ssd.drafting.propose import frame_at
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.retrieval.search import longest_match
from ssd.retrieval.snapshot import Snapshot, snapshot_at


class FrequencyDrafter:
    """Looks up the last ``max_match_length`` tokens, or as many of them as occur, in the index, and nothing else.

    Of all places where these occur, what followed most often, as long as the limit, is the draft; it is cut at the end
    of its sequence, and the most recent wins ties. Exact up to a few dozen occurrences; more are sampled evenly
    (segments) or the most recent taken (tail). Owned by one thread.
    """

    def __init__(self, *, max_match_length: int = 10) -> None:
        self._max_length = max_match_length
        self._workspace = Workspace()
        self._continuations = np.empty((MAX_SAMPLES, MAX_DRAFT), np.int32)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        return [self._propose(request, request.snapshot or NO_SNAPSHOT) for request in requests]

    def _propose(self, request: DraftRequest, snapshot: Snapshot) -> Draft:
        context, limit = contiguous(request.context), min(request.limit, MAX_DRAFT)
        length = longest_match(snapshot, context, self._max_length).length
        if limit < 1 or length == 0:
            return EMPTY_DRAFT
        self._workspace.room_for(1, snapshot)
        # Of no more tokens than match in the index, so that a longer match in own text is out of the question.
        tail = context[len(context) - length :]
        best = _find(self._workspace.address, snapshot.address, tail, limit, self._continuations)
        if best < 0:
            return EMPTY_DRAFT
        token_ids = self._continuations[best, :limit]
        return Draft(token_ids[: int(np.argmax(np.append(token_ids, NOTHING) < 0))].copy(), length)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Nothing is learned from single drafts."""

    def finish(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        longest_match(NO_SNAPSHOT, np.zeros(1, np.int32), 1)
        _find(self._workspace.address, NO_SNAPSHOT.address, np.zeros(1, np.int32), 1, self._continuations)


@kernel
def _find(workspace: int, snapshot: int, tail: TokenIds, limit: int, continuations: TokenIds) -> int:
    """Write what follows the places where all of ``tail`` stands; the row that most of them say, -1 for none.

    ``continuations`` : int32[MAX_SAMPLES, MAX_DRAFT], of each place up to ``limit`` tokens, NOTHING behind its end.
    """
    frame, searched, count = frame_at(workspace), snapshot_at(snapshot), 0
    evidence, texts = evidence_at(frame.evidences), texts_of(tail, searched)
    look_up(searched, frame.lookups, tail, len(tail), len(tail), evidence)
    if evidence.num_levels > 0:
        count = evidence.ends[0]
    for sample in range(count):
        depth = 0
        while depth < limit:
            token = next_token(evidence, sample, depth, texts)
            continuations[sample, depth] = token
            if token < 0:
                break
            depth += 1
        continuations[sample, depth:limit] = NOTHING
    return _most_frequent(continuations, evidence.weights, evidence.recency, count, limit)


@kernel
def _most_frequent(
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
            if _are_equal(continuations[i], continuations[j], width):
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
def _are_equal(one: TokenIds, other: TokenIds, width: int) -> bool:
    for i in range(width):
        if one[i] != other[i]:
            return False
        if one[i] < 0:
            return True
    return True
