"""How much of a text is caught in a loop.

A small model decoded greedily soon repeats itself, and repeated text is what a retrieval drafter predicts best. The
share measured here says how far a speed-up may be trusted; training uses the same definition to push loops away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_PERIOD = 32
"""Longest repeated unit that counts as a loop, in tokens."""
MIN_LOOP_TOKENS = 8
"""Shortest looped stretch, in tokens: keeps ``))))`` and dashed lines of a table from counting."""


def looped_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Mark the tokens of every stretch that is two or more whole copies of a unit of 1 to ``MAX_PERIOD`` tokens.

    Returns bool[n], True inside a loop, its first copy included. A stretch has at least ``MIN_LOOP_TOKENS`` tokens.
    """
    return _mark(np.asarray(token_ids), first_copy=True)


def repeated_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Like ``looped_tokens`` without the first copy: the tokens a model should not have produced."""
    return _mark(np.asarray(token_ids), first_copy=False)


def loop_share(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> float:
    """Share of tokens inside loops; 0 for an empty text."""
    mask = looped_tokens(token_ids)
    return float(mask.mean()) if len(mask) else 0.0


def _mark(tokens: npt.NDArray[np.integer], *, first_copy: bool) -> npt.NDArray[np.bool_]:
    mask = np.zeros(len(tokens), np.bool_)
    for period in range(1, min(MAX_PERIOD, len(tokens) // 2) + 1):
        same = tokens[period:] == tokens[:-period]
        # Edges of the runs of True: a run [lo, hi) of `same` is the looped stretch [lo, hi + period) of the text.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
        for lo, hi in zip(edges[::2], edges[1::2], strict=True):
            if hi - lo >= period and hi - lo + period >= MIN_LOOP_TOKENS:
                mask[lo if first_copy else lo + period : hi + period] = True
    return mask
