"""Which blocks of stored text are kept: the most used ones that fit, then the newest, or some of all the rest."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cache_builder.pruning.used import BLOCK_TOKENS, Counts
from ssd.retrieval.packed import Tokens

LEAD_IN_TOKENS: Final = BLOCK_TOKENS // 2
"""Kept before a block, so that what is said there is found from its first token."""

_STRETCH_BLOCKS: Final = 4
_GOLDEN_RATIO: Final = 0.6180339887498949

LEAST_TOKENS: Final = 8
"""Shorter pieces of a sequence are not kept: hardly anything is drafted from them."""

Flags = npt.NDArray[np.bool_]


def chosen(credits: Counts, budget: int, *, spread: bool = False) -> Flags:
    """Of every half block whether it is kept, bool[2 n]; all of it takes at most ``budget`` tokens, with separators.

    ``credits`` : int64[n], how often each block was of use. Of blocks of equal use the newest, which is the last, goes
    first; with ``spread`` those that lie spread over the text. O(n log n).
    """
    newest = np.arange(len(credits))
    order = (newest, _spread(len(credits)), credits) if spread else (newest, credits)
    ranked = np.lexsort(order)[::-1]
    fewest, most = 0, len(ranked)
    while fewest < most:
        count = (fewest + most + 1) // 2
        fewest, most = (
            (count, most) if _num_tokens(_halves(ranked[:count], len(credits))) <= budget else (fewest, count - 1)
        )
    return _halves(ranked[:fewest], len(credits))


def _spread(count: int) -> npt.NDArray[np.float64]:
    """float64[count], a number of each block: those with the greatest lie all over the text, in stretches of a few."""
    stretches = (np.arange(count) // _STRETCH_BLOCKS).astype(np.float64)
    found: npt.NDArray[np.float64] = (stretches * _GOLDEN_RATIO) % 1.0  # evenly spread, however many are taken
    return found


def _halves(blocks: npt.NDArray[np.int64], count: int) -> Flags:
    kept = np.zeros(2 * count, np.bool_)
    kept[2 * blocks] = kept[2 * blocks + 1] = True
    kept[np.maximum(0, 2 * blocks - 1)] = True
    return kept


def _num_tokens(kept: Flags) -> int:
    """At most so many, a separator after each run of half blocks included."""
    num_runs = int(kept[:1].sum() + (kept[1:] & ~kept[:-1]).sum())
    return LEAD_IN_TOKENS * int(kept.sum()) + num_runs


def kept_pieces(tokens: Tokens, start: int, kept: Flags) -> list[Tokens]:
    """What is kept of a sequence that begins at ``start``: views, in order. O(n / 32 + pieces)."""
    first, last = start // LEAD_IN_TOKENS, (start + len(tokens) - 1) // LEAD_IN_TOKENS
    flags = np.concatenate([[False], kept[first : last + 1], [False]])
    edges = np.flatnonzero(flags[1:] != flags[:-1]).reshape(-1, 2) + first
    pieces = []
    for begin, end in edges.tolist():
        piece = tokens[max(0, begin * LEAD_IN_TOKENS - start) : end * LEAD_IN_TOKENS - start]
        if len(piece) >= min(LEAST_TOKENS, len(tokens)):
            pieces.append(piece)
    return pieces
