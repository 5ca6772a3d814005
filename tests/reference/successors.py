"""What the target said, kept the plain way: a dictionary for each kind of entry."""

from __future__ import annotations

import math

from ssd.drafting.protocol import ScoredPass
from ssd.drafting.token_recycling import LEAST_SHARE

LEVELS = (LEAST_SHARE, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)
"""Of each level of shares, the bound that it is above."""

Entry = list[tuple[int, int]]
"""Tokens and the levels of their shares."""


def level_of(share: float) -> int:
    """The highest level whose bound the share is above; -1 where it is above none."""
    return sum(share > bound for bound in LEVELS) - 1


def entry_of(ids: list[int], logits: list[float]) -> Entry:
    """The entry that the most probable tokens of a position give; may be empty."""
    there = [(token, logit) for token, logit in zip(ids, logits, strict=True) if token >= 0]
    weights = [math.exp(logit - logits[0]) if abs(logit) < math.inf else math.nan for _, logit in there]
    total = sum(weights)
    levels = [level_of(weight / total) for weight in weights]
    return [(token, level) for (token, _), level in zip(there, levels, strict=True) if level >= 0]


def entries_of_row(scored: ScoredPass, b: int) -> list[tuple[tuple[int, ...], Entry]]:
    """Of a row, in order: after which token, and after which pair, what is likely."""
    found: list[tuple[tuple[int, ...], Entry]] = []
    for t in range(int(scored.num_positions[b])):
        token = int(scored.input_ids[b, t])
        parent = t - 1 if scored.parents is None else int(scored.parents[b, t])
        previous = int(scored.previous_ids[b]) if t == 0 else int(scored.input_ids[b, parent])
        entry = entry_of(scored.top_ids[b, t].tolist(), scored.top_logits[b, t].tolist())
        if token >= 0 and entry:
            found.append(((token,), entry))
            if previous >= 0:
                found.append(((previous, token), entry))
    return found
