"""Compare drafts with the target's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def accepted_length(draft: npt.NDArray[np.int32], chosen: npt.NDArray[np.int64]) -> int:
    """How many draft tokens the target would have produced itself: the length of the common prefix.

    draft : int32[k]. chosen : int64[>= k + 1], the target's token at each position, given the draft before it.

    The output is ``chosen[:accepted + 1]``: the accepted tokens and one more, the recovered token at the first
    difference or the bonus token after full acceptance. Each was chosen with the very prefix that precedes it in the
    output, so it is the token plain decoding chooses there: for greedy trivially, for sampling because the noise is a
    function of seed and position alone. The law is therefore the target's (Leviathan et al. 2023, appendix A.1, is
    the special case of a one-point draft distribution).
    """
    differs = np.flatnonzero(draft != chosen[: len(draft)])
    return int(differs[0]) if len(differs) else len(draft)


def pad_rows(rows: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int64]:
    """Rows of different length as int64[B, T], padded with 0; at least one row, none empty."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = row
    return padded
