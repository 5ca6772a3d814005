"""A test of goodness of fit, for what is drawn at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_SIGMAS = 4.75  # a right sampler fails with probability 1e-6


def assert_follows(counts: Counter[Any], law: Mapping[Any, float]) -> None:
    """Pearson's chi-square of ``counts`` against ``law``; outcomes expected less than 5 times count as one."""
    total = counts.total()
    impossible = {outcome for outcome in counts if law.get(outcome, 0.0) == 0.0}
    assert not impossible, f"these cannot come out: {sorted(map(str, impossible))[:5]}"
    cells = [(counts[outcome], total * chance) for outcome, chance in law.items() if total * chance >= 5]
    rest = total - sum(found for found, _ in cells), total - sum(expected for _, expected in cells)
    if rest[1] > 1e-6 * total:
        cells.append(rest)
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    freedom = len(cells) - 1
    if freedom:
        # The upper quantile, by Wilson and Hilferty's approximation (1931).
        spread = 2 / (9 * freedom)
        limit = freedom * (1 - spread + _SIGMAS * spread**0.5) ** 3
        assert statistic <= limit, f"chi-square {statistic:.1f} with {freedom} degrees of freedom, at most {limit:.1f}"
