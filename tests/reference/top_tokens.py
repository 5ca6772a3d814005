"""The most probable tokens of a position, by sorting all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def top_of(logits: Sequence[float], count: int) -> list[tuple[int, float]]:
    """The ``count`` greatest logits with their ids, or fewer: no NaN, nothing impossible; of equals the first."""
    possible = [(token, logit) for token, logit in enumerate(logits) if logit > -math.inf]
    return sorted(possible, key=lambda pair: (-pair[1], pair[0]))[:count]
