"""For how long do the places that agree with a draft go on alike? Packed text is compared some tokens at a time."""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.compiled.addresses import Int64s, inlined, kernel, load_uint64, trailing_zeros
from ssd.drafting.suffix.gather import IN_SEGMENT, Evidence, Texts, next_token

MOST_IN_COMMON: Final = 8
"""Tokens that are looked at: two words of packed text, and hardly more than a draft goes on for."""


@inlined
def num_in_common(evidence: Evidence, one: int, other: int, passed: int, most: int, texts: Texts) -> int:
    """On how many tokens from ``passed`` places after them two samples agree, ``most`` at most.

    Asked only while neither has ended; the end of both counts as a token that they agree on.
    """
    width = evidence.width[one]
    if evidence.kind[one] == IN_SEGMENT and evidence.kind[other] == IN_SEGMENT and width == evidence.width[other]:
        at, beside, agreeing = evidence.at[one] + width * passed, evidence.at[other] + width * passed, 0
        while agreeing < most * width:
            different = load_uint64(at + agreeing) ^ load_uint64(beside + agreeing)
            if different != np.uint64(0):
                agreeing += trailing_zeros(different) >> 3
                break
            agreeing += 8
        return int(min(most, agreeing // width))
    for depth in range(most):
        token = next_token(evidence, one, passed + depth, texts)
        if token != next_token(evidence, other, passed + depth, texts):
            return depth
        if token < 0:
            return depth + 1
    return most


@kernel
def num_unanimous(texts: Texts, evidence: Evidence, alive: Int64s, num_alive: int, passed: int, most: int) -> int:
    """For how many tokens, ``most`` or MOST_IN_COMMON at most, all samples ``alive[:num_alive]`` say the same.

    ``passed`` : tokens after each that are left out. None of them has ended there. Most positions of a long draft are
    so, and most of a count is the same as at the one before. O(samples).
    """
    first, run = alive[0], min(most, MOST_IN_COMMON)
    for i in range(1, num_alive):
        run = num_in_common(evidence, first, alive[i], passed, run, texts)
        if run == 0:
            return 0
    for depth in range(run):
        if next_token(evidence, first, passed + depth, texts) < 0:
            return depth
    return run
