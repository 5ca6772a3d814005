"""The hindsight optimum: the number of decoding steps if every draft were the best continuation in all earlier text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ssd.jit.addresses import Int64s, TokenIds, kernel
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.suffix_array import build_suffix_array

_MAX_TOKENS: Final = 1 << 26
"""The maximum number of tokens of a log for which the optimum is computed, which needs 24 bytes of memory per token."""


@kernel
def _longest_before(text: TokenIds, order: TokenIds) -> TokenIds:
    """Return for each position the length of the longest token run from there that also begins earlier: int32[n]. O(n).

    The longest common prefixes of neighbours in the suffix array are computed first (Kasai et al. 2001). Then positions
    are removed from the array, the last one first, so that all remaining neighbours are earlier positions (Crochemore
    and Ilie 2008, "Computing longest previous factor").
    """
    n = len(text)
    ranks, common = np.empty(n, np.int32), np.zeros(n + 1, np.int32)
    for rank in range(n):
        ranks[order[rank]] = rank
    shared = 0
    for position in range(n):
        rank = ranks[position]
        if rank == 0:
            shared = 0
            continue
        other = order[rank - 1]
        while max(position, other) + shared < n and text[position + shared] == text[other + shared]:
            shared += 1
        common[rank] = shared
        shared = max(0, shared - 1)
    before, after = np.arange(-1, n - 1).astype(np.int32), np.arange(1, n + 1).astype(np.int32)
    found = np.empty(n, np.int32)
    for position in range(n - 1, -1, -1):
        rank = ranks[position]
        last, following = before[rank], after[rank]
        found[position] = max(common[rank], common[following])
        common[following] = min(common[rank], common[following])
        if last >= 0:
            after[last] = following
        if following < n:
            before[following] = last
    return found


@kernel
def _count_steps(runs: TokenIds, begins: Int64s, ends: Int64s, limit: int) -> Int64s:
    steps = np.zeros(len(begins), np.int64)
    for request in range(len(begins)):
        position = begins[request]
        while position < ends[request]:
            drafted = min(max(0, runs[position - 1] - 1), limit, ends[request] - 1 - position)
            position += drafted + 1
            steps[request] += 1
    return steps


def hindsight_steps(texts: Sequence[TokenIds], prompt_lengths: Int64s, limit: int) -> Int64s | None:
    """Return how many decoding steps each request would need if every draft were the best one in all earlier text.

    At each step, all occurrences of the last token in earlier requests and in the request itself are compared. The
    draft is the continuation, up to ``limit`` tokens, that agrees with the recorded output for longest. No drafter can
    know this, so the result is a lower limit of the steps. If a request has several choices (``n`` > 1), each choice
    counts as earlier text for the next one, although a server generates them at the same time. Returns None for more
    than 64 million tokens. O(n log n) in all tokens.
    """
    if sum(map(len, texts)) + len(texts) > _MAX_TOKENS:
        return None
    gap = np.array([SEPARATOR], np.int32)
    text = np.concatenate([piece for each in texts for piece in (each, gap)] or [gap])
    lengths = np.array([len(each) for each in texts], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths + 1)])[:-1]
    order = len(text) - build_suffix_array(text[::-1].copy())  # it sorts positions by the reversed text before them
    runs = _longest_before(text, order.astype(np.int32))
    return _count_steps(runs, starts + np.maximum(prompt_lengths, 1), starts + lengths, limit)
