"""Prompt lookup: draft from the request's own text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ssd.compiled.addresses import Int64s, TokenIds, kernel
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, DraftRequest
from ssd.retrieval.search import MAX_SCAN_HITS, pattern_length, scan

LOOKUP_LENGTH: Final = 10
"""Longest tail that is looked up, whatever the configuration allows beyond it."""


@kernel
def latest_longest(context: TokenIds, max_length: int, hits: Int64s) -> tuple[int, int]:
    """Where the longest earlier occurrence of the context's tail goes on, the most recent of these, and its length."""
    longest = pattern_length(context, max_length)
    found = scan(context, 0, len(context) - 1, context, longest, hits[0], hits[1])
    position, length = 0, 0
    for i in range(found):
        if hits[1, i] > length:
            position, length = hits[0, i], hits[1, i]
    return position, length


class PromptLookupDrafter:
    """Copies what followed the longest earlier occurrence of the context's tail, the most recent one. No index.

    Prompt lookup decoding (Saxena, 2023), with the longest match instead of a fixed n-gram. O(context) per request.
    """

    def __init__(self, *, max_match_length: int = LOOKUP_LENGTH, min_match_length: int = 1) -> None:
        self._max_length = max_match_length
        self._min_length = min_match_length
        self._hits = np.empty((2, MAX_SCAN_HITS), np.int64)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        if request.limit < 1:
            return EMPTY_DRAFT
        context = np.ascontiguousarray(request.context, np.int32)
        position, length = latest_longest(context, self._max_length, self._hits)
        if length < max(1, self._min_length):
            return EMPTY_DRAFT
        token_ids = context[position : position + request.limit].copy()
        foreign = np.flatnonzero(token_ids < 0)
        return Draft(token_ids[: foreign[0]] if len(foreign) else token_ids, length, "own")

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """Nothing is learned from single drafts."""

    def finish(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def warm_up(self) -> None:
        """Compile the kernel, so that the first request compiles nothing."""
        self.propose([DraftRequest("", np.zeros(2, np.int32), 2, None, 1)])
