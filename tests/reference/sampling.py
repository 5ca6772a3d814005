"""Slow twins of the sampling rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.reference.noise import gumbel


def bad_word_ends(bad_words: Sequence[Sequence[int]], output: Sequence[int]) -> set[int]:
    """The last token of each sequence of which ``output`` ends with all the others. O(their tokens)."""
    ends = set()
    for *begin, end in bad_words:
        if len(begin) <= len(output) and list(output[len(output) - len(begin) :]) == begin:
            ends.add(end)
    return ends


def kept_tokens(scores: Sequence[float], masses: Sequence[int], top_k: int, top_p: float, floor: float) -> list[int]:
    """Tokens that top-k, top-p and the lowest score allowed leave: by sorting, and one by one with all that tie.

    ``masses`` : whole numbers, what each token weighs. ``top_k`` : 0 cuts nothing.
    """
    ranked = sorted((token for token, score in enumerate(scores) if score > -math.inf), key=lambda i: -scores[i])
    limit = top_k or len(ranked)
    wanted = top_p * sum(masses[token] for token in ranked[:limit])
    kept = []
    for token in ranked:
        above = [other for other in ranked if scores[other] > scores[token]]
        if not above or (len(above) < limit and (top_p >= 1.0 or sum(masses[other] for other in above) < wanted)):
            kept.append(token)
    return [token for token in kept if scores[token] >= floor]


def best_with_noise(scores: Sequence[float], kept: Sequence[int], key: int) -> int:
    """The first of the tokens kept that have the largest score after the noise of a key."""
    return max(kept, key=lambda token: (scores[token] + gumbel(key, token), -token))
