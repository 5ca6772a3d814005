"""Where a draft's places have ended, what it ends with is looked up again: it may stand elsewhere."""

from __future__ import annotations

from typing import Final

import numpy as np

from ssd.compiled.addresses import Int64s, TokenIds, inlined
from ssd.drafting.suffix.gather import Evidence, Texts, next_token

CONTINUED_CONTEXT: Final = 4096
"""Tokens of a context that are looked at where a draft is carried on past the end of its sources."""

LEAST_CONTINUED: Final = 4
"""Shorter matches do not carry on a draft whose sources have ended: they mostly begin something else."""

_LEAST_NEW: Final = 2
"""Tokens that no place said, before it is looked whether some place says all of them."""


@inlined
def wants_places(texts: Texts, evidence: Evidence, alive: Int64s, num_alive: int, passed: int, predicted: int) -> bool:
    """Whether a draft is worth a lookup of what it ends with, before it goes on with what no place says.

    ``alive[:num_alive]`` : samples that agree with it; ``passed`` : tokens since they were looked up. ``predicted`` :
    what the client's prediction says, which is followed as it is. O(samples).
    """
    if passed == 0 or predicted >= 0:
        return False
    for i in range(num_alive):
        if next_token(evidence, alive[i], passed, texts) >= 0:
            return False
    return num_alive > 0 or passed >= _LEAST_NEW


@inlined
def begin_text(context: TokenIds, text: TokenIds) -> int:
    """Copy the end of a context into ``text``, int32[CONTINUED_CONTEXT + n]: how many tokens."""
    kept = min(len(context), CONTINUED_CONTEXT)
    text[:kept] = context[len(context) - kept :]
    return int(np.int64(kept))
