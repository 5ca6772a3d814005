"""How much of a prediction came true."""

from __future__ import annotations

from collections.abc import Sequence


def common_tokens(prediction: Sequence[int], output: Sequence[int]) -> int:
    """Length of the longest common subsequence: the prediction's tokens that the output has, in order.

    It is what a line-by-line comparison counts as unchanged, with tokens for lines, and is a matter of the two texts
    alone: not of what was drafted, which would tell what the cache holds. O(n m / 64) by one integer of n bits that is
    updated for each output token (Hyyrö 2004, "Bit-parallel LCS-length computation revisited", section 4).
    """
    places: dict[int, int] = {}
    for place, token_id in enumerate(prediction):
        places[token_id] = places.get(token_id, 0) | 1 << place
    everything = (1 << len(prediction)) - 1
    row = everything  # a zero where one more token of the prediction is matched
    for token_id in output:
        matched = row & places.get(token_id, 0)
        if matched:
            row = (row + matched | row - matched) & everything
    return len(prediction) - row.bit_count()
